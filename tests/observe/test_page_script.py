"""The script of the web page, as far as it can be checked without a browser. tests/observe_live has one."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from kvbm.observe import web

SCRIPT = (Path(web.__file__).parent / "page" / "page.js").read_text()


def test_no_function_is_declared_twice():
    """The browser takes the last one without a word, and every caller of the first fails."""
    names = Counter(re.findall(r"^(?:async )?function (\w+)", SCRIPT, re.MULTILINE))
    assert len(names) > 10
    assert [name for name, count in names.items() if count > 1] == []
