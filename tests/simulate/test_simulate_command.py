"""`kvbm simulate`: tables, files, advice that the figures support, and errors that say what to do."""

from __future__ import annotations

import json
import random
import re

import pytest

from kvbm.cli.main import main
from kvbm.simulate import advice
from kvbm.simulate.report import from_json, page
from kvbm.simulate.results import Outcome, TierRates
from tiernames import DISK, HOST


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """300 requests of 40 sessions."""
    source, numbers = random.Random(3), iter(range(10**6))
    live = [[next(numbers) for _ in range(4)] for _ in range(40)]
    lines = []
    for at in range(300):
        session = source.randrange(len(live))
        live[session] = live[session] + [next(numbers) for _ in range(source.randrange(3))]
        tokens = len(live[session]) * 512 - 100
        lines.append({"timestamp": at * 500, "input_length": tokens, "output_length": 5, "hash_ids": live[session]})
    path = tmp_path_factory.mktemp("trace") / "sessions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def simulate(*arguments):
    return main(["simulate", *map(str, arguments)])


def test_a_sweep_writes_a_table_a_page_and_advice(trace, tmp_path, capsys):
    sizes = ["--host-blocks", 20, 80, 320, "--disk-blocks", 0, 300]
    assert simulate(trace, *sizes, "--policy", "lru", "session", "--disk-gbps", 4, "--jobs", 2, "--out", tmp_path) == 0
    printed, said = capsys.readouterr()
    assert re.search(r"^replay +\d+%  [\d,]+ of [\d,]+ requests$", said, re.M)
    result = from_json((tmp_path / "simulate.json").read_bytes())
    assert len(result.outcomes) == 2 * 3 * 2
    for one in result.outcomes:
        assert 0 <= one.prefix_hit_rate <= result.possible_prefix_hit_rate
        bound = next(bound for bound in result.optimum if bound.slots == one.total_slots)
        # A block may lie in both tiers, so the bound for all slots together is never reached by accident.
        assert one.prefix_hit_rate <= bound.prefix_hit_rate + 1e-9
    assert "of what is possible; double gives" in result.advice[0]
    assert all(sentence in printed for sentence in result.advice)
    assert printed.startswith("For blocks of 67.1 MB, prefill of 10,000 tokens/s, ")
    assert result.machine["disk_gbps"] == 4
    html = (tmp_path / "simulate.html").read_text()
    assert html == page(result)
    assert html.count("<svg") == 3
    assert "offline optimum" in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "src=" not in html


def test_json_goes_to_the_output_alone(trace, capsys):
    assert simulate(trace, "--host-blocks", 50, "--no-optimum", "--json", "--jobs", 1) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trace"]["requests"] == 300
    assert found["outcomes"][0]["slots"] == {HOST: 50}
    assert found["optimum"] == []


def test_a_whole_trace_of_memory_finds_all_that_is_possible(trace, capsys):
    assert simulate(trace, "--json", "--jobs", 1) == 0
    result = from_json(capsys.readouterr().out.encode())
    assert len(result.outcomes) >= 8
    assert result.outcomes[-1].prefix_hit_rate == pytest.approx(result.possible_prefix_hit_rate)
    assert result.optimum[-1].prefix_hit_rate == pytest.approx(result.possible_prefix_hit_rate)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["synthetic:nothing"], "expected one of agents"),
        (["synthetic:agents", "--max-requests", "9"], "--max-requests: for traces of files only"),
        (["--disk-gb", "5"], "--host-gb or --host-blocks: expected sizes of at least one block"),
        (["--host-gb", "0.0001"], "expected sizes of at least one block"),
        (["--host-gb", "nan"], "--host-gb nan: expected a number of at least 0"),
        (["--host-gb", "1", "--host-blocks", "1"], "give one of them"),
        (["--set", "KVBM_LOAD"], "expected SETTING=VALUE"),
        (["--set", "KVBM_HOSTPOLICY=lru"], "KVBM_HOSTPOLICY is not a setting"),
        (["--set", "KVBM_LOAD=sometimes"], "KVBM_LOAD='sometimes'"),
        (["--variant", "x"], "expected NAME:SETTING=VALUE"),
        (["--policy", "clairvoyant"], "clairvoyant"),
        (["--hints", "loud"], "expected one of given, none"),
        (["--max-requests", "0"], "--max-requests 0"),
    ],
)
def test_bad_input_is_refused_with_what_is_accepted(trace, arguments, said, capsys):
    given = arguments if not arguments[0].startswith("--") else [trace, *arguments]
    assert simulate(*given) == 2
    assert said in capsys.readouterr().err


def outcome(host, disk, rate, variant="x"):
    slots = {HOST: host, DISK: disk}
    tiers = {name: TierRates(0.0, 0.0, 0.0, 0, 10**12 if name == DISK else 0, 0) for name in ("device", HOST, DISK)}
    sizes = {name: count * 10**9 for name, count in slots.items()}
    return Outcome(variant, slots, sizes, rate, rate, rate, rate, 1.0, 1.0, 2.0, tiers, 0.0)


def test_the_advice_is_computed_from_the_sweep():
    outcomes = [
        outcome(12, 100, 0.20),
        outcome(24, 200, 0.372),
        outcome(48, 400, 0.38),
        outcome(24, 200, 0.30, "other"),
    ]
    first, *others = advice.sentences(outcomes, possible=0.4, seconds=86_400.0)
    assert first.startswith("24 GB of host and 200 GB of disk give 93% of what is possible; double gives 2% more.")
    assert any("1 TB a day" in sentence for sentence in others)
    assert any("x finds +0.072 of all blocks compared with other" in sentence for sentence in others)


def test_a_trace_without_repetition_gets_no_sizes():
    assert advice.sentences([outcome(1, 1, 0.0)], possible=0.0, seconds=1.0) == [
        "No prompt of this trace begins as an earlier one does: no cache can help it."
    ]
