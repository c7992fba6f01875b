"""Hints of callers: read where they make sense, harmless otherwise."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.policy import NO_HINTS, Retention, Turn, make_policy
from kvbm.core.pool import Pool
from kvbm.engines import hints as hints_module
from kvbm.engines.hints import from_params, from_priorities, from_retention

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
hints = st.dictionaries(st.sampled_from(["ttl", "priority", "session", "final", "prefetch", "other"]), anything)


def test_hints_of_a_vllm_request():
    turn = from_params({"kvbm": {"ttl": 60, "priority": 2, "session": "s", "final": True}})
    assert turn == Turn(session=hash("s"), is_final=True, retention=(Retention(1, 60.0),))
    assert from_params(None, "s", -3) == Turn(session=hash("s"), retention=(Retention(1),))
    assert from_params({"kvbm": {"ttl": 5}}).retention == (Retention(1, 5.0),)
    assert from_params({"other": 1}) is NO_HINTS


def test_ranges_of_tensorrt_llm():
    ranges = [
        SimpleNamespace(token_start=0, token_end=64, priority=90, duration_ms=2000),
        SimpleNamespace(token_start=64, token_end=None, priority=5, duration_ms=None),
        SimpleNamespace(token_start=0, token_end=64, priority=35, duration_ms=None),
    ]
    config = SimpleNamespace(token_range_retention_configs=ranges)
    assert from_retention(config, 16) == (Retention(1, 2.0, 0, 4), Retention(-1, float("inf"), 4, 2**31 - 1))


def test_priorities_of_blocks_become_ranges():
    assert from_priorities(2, [90, 90, 35, 5, None, 5]) == (
        Retention(1, start=2, end=4),
        Retention(-1, start=5, end=6),
        Retention(-1, start=7, end=8),
    )


def test_entries_that_kvbm_does_not_know_are_refused_once(caplog):
    hints_module._refuse_unknown.cache_clear()
    for _ in range(2):
        assert from_params({"kvbm": {"prefetch": True, "final": True}}) == Turn(is_final=True)
    assert [record.message for record in caplog.records] == [
        "kv_transfer_params.kvbm of a request has entries that KVBM ignores. It knows ttl, priority, session, final."
    ]


@given(params=anything | st.builds(lambda mine: {"kvbm": mine}, hints), session=anything, priority=anything)
def test_no_value_does_harm(params, session, priority):
    turn = from_params(params, session, priority)
    pool = Pool(2, make_policy("session", 2, float))
    pool.commit(pool.reserve([b"a", b"b"]))
    pool.end_turn([b"a", b"b"], turn)
    assert len(pool.lend(2)) == 2


@given(
    st.lists(
        st.builds(SimpleNamespace, token_start=anything, token_end=anything, priority=anything, duration_ms=anything)
    )
)
def test_no_range_does_harm(ranges):
    from_retention(SimpleNamespace(token_range_retention_configs=ranges), 16)
