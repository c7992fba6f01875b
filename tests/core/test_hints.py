"""Hints are advice: a good one is followed as far as it is true, and no envelope raises."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.core.catalog import Hint
from kvbm.core.hints import MALFORMED, STALE, UNKNOWN, parse_envelope, parse_transfer_params

NAMES = [hashlib.sha256(str(i).encode()).digest() for i in range(20)]
HASHES = [int.from_bytes(name[-8:], "big") for name in NAMES]
HERE = "10.0.0.4:23280"


class Action(msgspec.Struct, frozen=True):
    """As vLLM's own."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict


class Envelope(msgspec.Struct, frozen=True):
    protocol_version: str
    message_id: str
    actions: list[Action]


def payload(**more):
    return {"source_control_endpoint": "tcp://10.0.0.4:23280", "block_hashes": HASHES, **more}


def envelope(*actions: Action, version: str = "0.1") -> Envelope:
    return Envelope(version, "req-7", list(actions))


def fetch(version: str = "1.0", **more) -> Action:
    return Action("a1", "kv.fetch", version, payload(**more))


def test_dynamos_envelope_is_understood():
    assert parse_envelope(envelope(fetch()), NAMES) == Hint(HERE, 20)
    as_json = msgspec.json.decode(msgspec.json.encode(envelope(fetch())))
    assert parse_envelope(as_json, NAMES) == Hint(HERE, 20)


def test_the_first_known_action_counts_and_unknown_ones_are_passed_over():
    later = Action("a0", "kv.pin", "1.0", {"for": 5})
    assert parse_envelope(envelope(later, fetch("1.7", extra={"x": 1})), NAMES) == Hint(HERE, 20)
    assert parse_envelope(envelope(fetch("2.0")), NAMES) == UNKNOWN
    assert parse_envelope(envelope(later), NAMES) == UNKNOWN
    assert parse_envelope(envelope(), NAMES) == UNKNOWN
    assert parse_envelope(envelope(fetch(), version="1.0"), NAMES) == UNKNOWN
    assert parse_envelope(envelope(fetch(mode="move")), NAMES) == UNKNOWN
    assert parse_envelope(envelope(fetch(no_retain=True)), NAMES) == UNKNOWN


def test_a_hint_counts_as_far_as_its_hashes_are_the_requests():
    lying = [*HASHES[:5], 1, *HASHES[6:]]
    assert parse_envelope(envelope(fetch(block_hashes=lying)), NAMES) == Hint(HERE, 5)
    assert parse_envelope(envelope(fetch(block_hashes=HASHES[1:])), NAMES) == STALE
    assert parse_envelope(envelope(fetch(block_hashes=[*HASHES, 1, 2])), NAMES) == Hint(HERE, 20)
    assert parse_envelope(envelope(fetch()), []) == STALE


MALFORMED_PAYLOADS = [
    {}, {"block_hashes": HASHES}, {"source_control_endpoint": "tcp://h:1"}, None, [], "kv",
    payload(block_hashes=[]), payload(block_hashes=["1"]), payload(block_hashes=[-1]), payload(block_hashes=[1 << 64]),
    payload(block_hashes=[True]), payload(block_hashes=[1.5]), payload(block_hashes={"0": 1}), payload(mode=7),
    payload(source_control_endpoint="10.0.0.4:23280"), payload(source_control_endpoint="tcp://0.0.0.0:1"),
    payload(source_control_endpoint="tcp://[::]:1"), payload(source_control_endpoint="tcp://224.0.0.1:1"),
    payload(source_control_endpoint="tcp://h:0"), payload(source_control_endpoint="tcp://h:65536"),
    payload(source_control_endpoint="tcp://h"), payload(source_control_endpoint="tcp://:1"),
    payload(source_control_endpoint="ipc:///tmp/x"), payload(source_control_endpoint="tcp://h:1/../x"),
    payload(source_control_endpoint="tcp://h:1\n"), payload(source_control_endpoint="tcp://" + "h" * 300 + ":1"),
    payload(source_control_endpoint=None), payload(source_control_endpoint="tcp://[h]:1"),
]  # fmt: skip


@pytest.mark.parametrize("bad", MALFORMED_PAYLOADS, ids=range(len(MALFORMED_PAYLOADS)))
def test_a_malformed_payload_is_ignored(bad):
    assert parse_envelope(envelope(Action("a1", "kv.fetch", "1.0", bad)), NAMES) == MALFORMED


@pytest.mark.parametrize(
    "bad", [None, 1, "x", b"x", [], {}, {"actions": []}, {"protocol_version": "0.1", "actions": 1}]
)
def test_a_malformed_envelope_is_ignored(bad):
    assert parse_envelope(bad, NAMES) == MALFORMED


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8) | st.just("kv.fetch"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["protocol_version", "actions", "action_type", "action_version", "payload", "block_hashes",
                         "source_control_endpoint", "mode", "no_retain", "remote_kv_source", "remote_host",
                         "remote_port"]) | st.text(max_size=4), inner, max_size=6),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(json_values, json_values, json_values)
def test_no_envelope_raises(anything, body, hashes):
    reasons = {UNKNOWN, MALFORMED, STALE}
    for given_envelope in (
        anything,
        {"protocol_version": "0.1", "message_id": "", "actions": anything},
        envelope(Action("a", "kv.fetch", "1.0", body)),
        envelope(fetch(block_hashes=hashes)),
        envelope(fetch(source_control_endpoint=body)),
    ):
        found = parse_envelope(given_envelope, NAMES)
        assert isinstance(found, Hint) or found in reasons
    for params in (
        anything,
        {"remote_kv_source": body},
        {"remote_kv_source": {"remote_host": body, "remote_port": hashes}},
    ):
        source = parse_transfer_params(params)
        assert source is None or isinstance(source, Hint) or source in reasons


def test_the_source_in_transfer_parameters_is_a_hint_that_introduces_no_address():
    source = {"kv_request_id": "r", "remote_host": "10.0.0.4", "remote_port": 23280}
    assert parse_transfer_params({"remote_kv_source": source}) == Hint(HERE, introduces=False)
    six = {"remote_kv_source": {"remote_host": "fd00::4", "remote_port": 1}}
    assert parse_transfer_params(six) == Hint("[fd00::4]:1", introduces=False)
    assert parse_transfer_params(None) is None
    assert parse_transfer_params({"do_remote_decode": True}) is None
    for bad in (
        {},
        {"remote_host": "h"},
        {"remote_host": "h", "remote_port": "1"},
        {"remote_host": "h/x", "remote_port": 1},
    ):
        assert parse_transfer_params({"remote_kv_source": bad}) == MALFORMED
