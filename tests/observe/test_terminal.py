"""Tables and progress bars: plain in a pipe, drawn on a terminal, and no text from outside controls either."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from kvbm.observe.format import columns
from kvbm.observe.terminal import print_table, progress

HOSTILE = "\x1b[2J[red]a[/red]\u202e:boom:"
SHOWN = r"\x1b[2J[red]a[/red]\u202e:boom:"

SCRIPT = f"""
import sys
from kvbm.observe.terminal import print_table, progress
if sys.argv[1:] == ["without rich"]:
    sys.modules["rich.console"] = None
print_table(("NAME", "BLOCKS"), [({HOSTILE!r}, 7), ("b" * 90, 1234)], right=(1,))
with progress({HOSTILE!r}) as show:
    show(1, 4, lambda: "one of four [bold]")
print("end")
"""


def run(terminal: bool, *arguments: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60"}
    if not terminal:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=True)
        assert done.stderr.decode() == f"{SHOWN}   25%  one of four [bold]\n"
        return done.stdout.decode()
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    try:
        while part := os.read(master, 65536):
            seen += part
    except OSError:  # the process has ended
        pass
    os.close(master)
    assert process.wait(120) == 0
    return seen.decode().replace("\r\n", "\n")


def test_columns_are_aligned():
    assert columns([("A", "N"), ("bb", "10")], right=(1,)) == ["A    N", "bb  10"]


@pytest.mark.parametrize("arguments", [(), ("without rich",)])
def test_a_pipe_gets_plain_text(arguments):
    head, first, second, end = run(False, *arguments).splitlines()
    assert head.split() == ["NAME", "BLOCKS"]
    assert first == f"{SHOWN}{' ' * (90 - len(SHOWN))}       7"
    assert second == f"{'b' * 90}    1234"
    assert end == "end"


def test_a_terminal_gets_a_table_and_a_bar():
    shown = run(True)
    assert HOSTILE not in shown
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    assert SHOWN in plain.splitlines()[1]
    assert "one of four [bold]" in plain
    assert "25%" in plain
    assert all(len(line) <= 60 for line in plain.split("end")[0].replace("\r", "\n").splitlines())
    assert plain.endswith("end\n")


def test_without_rich_a_terminal_gets_the_plain_table():
    line = f"{SHOWN}   25%  one of four [bold]\n"
    assert run(True, "without rich") == run(False).replace("end\n", f"{line}end\n")


def test_progress_prints_lines_where_there_is_no_terminal(capsys):
    with progress("a\nname") as show:
        show(1, 4, lambda: "first")
        show(2, 4, lambda: pytest.fail("text that is not shown was made"))
    assert capsys.readouterr().err == "a\\nname   25%  first\n"


def test_a_table_without_rows_has_its_header(capsys):
    print_table(("A", "B"), [])
    assert capsys.readouterr().out == "A  B\n"
