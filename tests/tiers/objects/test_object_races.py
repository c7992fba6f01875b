"""Two writers and four readers of the same prefixes, with kills. `make test-objects` runs 1,000 rounds."""

import os
import sys
from pathlib import Path

import msgspec
import pytest

from processes import Process

ROUNDS = int(os.environ.get("KVBM_TEST_OBJECT_ROUNDS", "6"))


@pytest.mark.timeout(600 + 10 * ROUNDS)
def test_no_block_is_wrong_and_none_that_was_acknowledged_is_lost(weed, tmp_path):
    script = Path(__file__).with_name("object_racers.py")
    settings = msgspec.json.encode(weed.settings()).decode()
    seed = os.environ.get("KVBM_TEST_SEED", "1")
    racers = Process([sys.executable, str(script), settings, str(ROUNDS), seed], tmp_path / "racers.log")
    try:
        assert racers.wait(500 + 10 * ROUNDS) == 0, racers.log.read_text()
    finally:
        racers.end()
    assert "none wrong, none lost" in racers.log.read_text()
    print(racers.log.read_text())
