"""GPUDirect Storage is looked for and not used, and that is said in one line."""

from __future__ import annotations

import pytest

from kvbm.doctor import tiers
from kvbm.doctor.base import Examination
from kvbm.tiers.disk import gds


def nothing(name: str) -> object:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(("there", "said"), [("libcufile.so.0", "is there and not used"), ("", "is not there")])
def test_the_line_says_whether_it_is_there_and_which_way_blocks_go(there, said):
    line = gds.statement(lambda name: name if name == there else nothing(name))
    assert said in line
    assert "through pinned host memory" in line


def test_doctor_says_it_where_there_is_a_gpu_and_a_disk_tier(monkeypatch, tmp_path):
    environ = {"DYN_KVBM_DISK_CACHE_GB": "0.01", "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path)}
    case = Examination("http://127.0.0.1:1", quick=True, environ=environ)
    for cards in ((), ("a card",)):
        monkeypatch.setattr(tiers, "gpus", lambda cards=cards: cards)
        said = [finding.text for finding in tiers.Disk().run(case) if finding.name == "gpudirect-storage"]
        assert said == ([f"{gds.statement()}."] if cards else [])
