"""What is said of a running KVBM: each cause is named when it is the cause, with what to do."""

from __future__ import annotations

import msgspec
import pytest

import observed
from kvbm.observe.findings import explain
from kvbm.observe.snapshot import HitRates, Saved

NOTHING = {
    "hit_rates": HitRates(requests=50, blocks=500),
    "saved": Saved(prefill_tokens_per_second=9000.0, measured=True),
    "refused_loads": {},
    "failures": {},
    "matched_blocks": {},
    "matched_tokens": 0,
    "refused_blocks": {},
}


def names(snapshot):
    return [finding.name for finding in explain(snapshot)]


def tier(base, **changes):
    return msgspec.structs.replace(base, **changes)


def test_a_gain_is_said_first():
    found = explain(observed.snapshot(failures={}))
    assert (found[0].name, found[0].level) == ("gain", "good")
    assert "50%" in found[0].text
    assert "2.2 s" in found[0].text
    assert all(finding.level != "bad" for finding in found)


def test_a_gain_whose_worth_nobody_knows_is_one_all_the_same():
    (first, *_) = explain(observed.snapshot(failures={}, saved=Saved()))
    assert first.name == "gain"
    assert "960 tokens were loaded" in first.text


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("too-early", {"outcomes": {}, "missed": {}}),
        ("too-early", {"outcomes": {"not found": 3}, "missed": {"new": 3}}),
        ("short-prompts", {"outcomes": {"too short": 45, "not found": 5}, "missed": {"new": 5}}),
        ("on-device", {"outcomes": {"on the device": 45, "not found": 5}, "missed": {"new": 5}}),
        ("no-repeats", {"outcomes": {"not found": 50}, "missed": {"new": 50}}),
        ("tier-too-small", {"outcomes": {"not found": 50}, "missed": {"new": 20, "evicted": 30}}),
        ("little", {"outcomes": {"not found": 20, "on the device": 29, "loaded": 1}, "missed": {"new": 20}}),
        (
            "never-load",
            {"outcomes": {"found, not loaded": 50}, "refused_loads": {"configured never to load": 50}},
        ),
        (
            "slow-tier",
            {"outcomes": {"found, not loaded": 50}, "refused_loads": {"recomputing is faster": 500}},
        ),
    ],
)
def test_no_gain_has_a_cause(name, changes):
    (first, *_) = explain(observed.snapshot(**{**NOTHING, **changes}))
    assert first.name == name
    assert first.cure or name == "little"


def test_a_tier_that_is_too_small_is_named_with_its_setting():
    changes = {**NOTHING, "outcomes": {"not found": 50}, "missed": {"evicted": 50}}
    with_disk = explain(observed.snapshot(**changes))[0]
    assert "DYN_KVBM_DISK_CACHE_GB" in with_disk.cure
    host_only = explain(observed.snapshot(**changes, tiers=[observed.HOST]))[0]
    assert "DYN_KVBM_CPU_CACHE_GB" in host_only.cure
    assert "add a disk tier" in host_only.cure


def test_a_slow_disk_is_named_with_its_speed():
    changes = {"outcomes": {"found, not loaded": 50}, "refused_loads": {"recomputing is faster": 500}}
    found = explain(observed.snapshot(**{**NOTHING, **changes}))[0]
    assert found.level == "bad"
    assert "disk 2 GB/s" in found.text
    assert "9,000 tokens/s" in found.text
    assert "DYN_KVBM_DISK_CACHE_DIR" in found.cure


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("failures", {"failures": {"load: OSError": 4}}),
        ("loads-too-slow", {"saved": Saved(saved_seconds=1.0, lost_seconds=3.0, loads=9)}),
        ("host-smaller-than-device", {"tiers": [tier(observed.HOST, slots=99)]}),
        ("disk-smaller-than-host", {"tiers": [observed.HOST, tier(observed.DISK, slots=399)]}),
        (
            "disk-filter",
            {"tiers": [observed.HOST, tier(observed.DISK, free=1000)], "refused_blocks": {"disk filter": 5000}},
        ),
        ("queue-full", {"refused_blocks": {"queue full": 100}}),
    ],
)
def test_what_is_wrong_is_said_whether_or_not_something_is_gained(name, changes):
    assert name in names(observed.snapshot(**{"failures": {}, **changes}))
    assert name not in names(observed.snapshot(failures={}))
    found = {finding.name: finding for finding in explain(observed.snapshot(**{"failures": {}, **changes}))}
    assert found[name].cure


@pytest.mark.parametrize(("left_out", "name", "level"), [(3, "packed", "good"), (100, "unpackable", "bad")])
def test_packed_blocks_are_told_of_and_so_are_those_that_do_not_fit(left_out, name, level):
    identity = msgspec.structs.replace(observed.SNAPSHOT.identity, packed=0.764)
    found = {each.name: each for each in explain(observed.snapshot(identity=identity, unpackable_blocks=left_out))}
    assert found[name].level == level
    assert f"{left_out} " in found[name].text
    assert not {"packed", "unpackable"} & set(names(observed.snapshot()))


def test_names_are_for_scripts():
    for finding in explain(observed.SNAPSHOT):
        assert finding.name == finding.name.lower()
        assert " " not in finding.name
