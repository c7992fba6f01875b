"""The messages survive the way, and bytes that are no message do no harm."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm import plans
from kvbm.plans import (
    Copy,
    Hello,
    LoadPlan,
    LoadResult,
    Recompute,
    Report,
    StepPlan,
    StorePlan,
    StoreResult,
    TierHello,
)
from tiernames import DISK, HOST

numbers = st.integers(0, 2**63 - 1)
lists = st.lists(numbers, max_size=4)
flags = st.booleans()
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
copies = st.builds(Copy, tier=st.sampled_from([HOST, DISK]), slots=lists, blocks=lists)
loads = st.builds(
    LoadPlan, id=numbers, request=text, copies=st.lists(copies, max_size=3), in_step=flags, layered=flags, after=lists
)
stores = st.builds(StorePlan, id=numbers, copy=copies)
again = st.lists(st.builds(Recompute, id=numbers, request=text, position=numbers, agreed=flags), max_size=2)
steps = st.builds(
    StepPlan, loads=st.lists(loads, max_size=3), stores=st.lists(stores, max_size=3), fences=lists, recompute=again
)
reports = st.lists(
    st.builds(
        Report,
        rank=numbers,
        loads=st.lists(st.builds(LoadResult, id=numbers, bad=lists), max_size=3),
        stores=st.lists(st.builds(StoreResult, id=numbers, ok=flags), max_size=3),
        faults=st.dictionaries(text, numbers, max_size=3),
    ),
    max_size=3,
)
hellos = st.builds(
    Hello,
    rank=numbers,
    block_bytes=numbers,
    layout=text,
    tiers=st.lists(st.builds(TierHello, name=text, slots=numbers)),
)

MESSAGES = [(steps, plans.decode_step), (reports, plans.decode_reports), (hellos, plans.decode_hello)]
DECODERS = [decode for _, decode in MESSAGES]


@pytest.mark.parametrize(("messages", "decode"), MESSAGES, ids=["step", "reports", "hello"])
@given(st.data())
@settings(deadline=None)
def test_a_message_arrives_as_it_was_sent(messages, decode, data):
    message = data.draw(messages)
    arrived = decode(plans.encode(message))
    assert arrived == message
    assert type(arrived) is type(message)


def test_a_tier_arrives_as_a_tier():
    step = StepPlan(stores=[StorePlan(1, Copy(DISK, [2], [3]))])
    assert plans.decode_step(plans.encode(step)).stores[0].copy.tier == DISK
    hello = Hello(0, 4096, "layout", [TierHello(HOST, 5)])
    assert list(plans.decode_hello(plans.encode(hello)).slots) == [HOST]


@pytest.mark.parametrize(("messages", "decode"), MESSAGES, ids=["step", "reports", "hello"])
@given(st.data())
@settings(deadline=None)
def test_a_message_cut_short_is_refused(messages, decode, data):
    whole = plans.encode(data.draw(messages))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(msgspec.DecodeError):
        decode(whole[:cut])


@pytest.mark.parametrize(("messages", "decode"), MESSAGES, ids=["step", "reports", "hello"])
@given(st.data())
@settings(deadline=None)
def test_a_message_with_something_behind_it_is_refused(messages, decode, data):
    with pytest.raises(msgspec.DecodeError):
        decode(plans.encode(data.draw(messages)) + data.draw(st.binary(min_size=1, max_size=4)))


@pytest.mark.parametrize(("messages", "decode"), MESSAGES, ids=["step", "reports", "hello"])
@given(st.data())
@settings(deadline=None, max_examples=300)
def test_a_damaged_message_raises_nothing_but_a_decode_error(messages, decode, data):
    damaged = bytearray(plans.encode(data.draw(messages)))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = decode(bytes(damaged))
    except msgspec.DecodeError:
        return
    plans.encode(message)  # damaged into another message


@pytest.mark.parametrize("decode", DECODERS)
@given(st.binary(max_size=64))
@settings(deadline=None, max_examples=300)
def test_arbitrary_bytes_raise_nothing_but_a_decode_error(decode, data):
    try:
        decode(data)
    except msgspec.DecodeError:
        return


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",  # nil
        b"\x80",  # a map
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million items
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x91" * 100_000,  # arrays in arrays
        b"\x94\x90\x90\x90" + b"\x91" * 100_000,  # the same, behind a good step
        b"\x91\x91\x95\x01\xa2\xff\xfe\x90\xc3\x90",  # a request name that is no text
        b"\x91\x94\x00\x90\x90\x81\xa1\xff\x01",  # a reason that is no text
        b"\x94\x00\x00\x80\xa1\xff",  # a layout that is no text
    ],
)
def test_hostile_bytes_raise_a_decode_error(decode, data):
    with pytest.raises(msgspec.DecodeError):
        decode(data)


@pytest.mark.parametrize("tier", [0, 5, -1, b"host", None])
def test_a_tier_that_is_no_name_is_refused(tier):
    data = msgspec.msgpack.encode([[], [[1, [tier, [2], [3]]]], []])
    with pytest.raises(msgspec.ValidationError):
        plans.decode_step(data)


def test_an_empty_message_is_false():
    assert not StepPlan()
    assert not Report(0)
    assert StepPlan(fences=[1])
    assert StepPlan(recompute=[Recompute(-1, "r", 0)])
    assert StepPlan(stores=[StorePlan(1, Copy(HOST, [], []))])
    assert StepPlan(loads=[LoadPlan(1, "r", [], True)])
    assert Report(0, loads=[LoadResult(1)])
    assert Report(0, stores=[StoreResult(1)])
    assert Report(0, faults={"io": 1})


def test_messages_do_not_share_their_defaults():
    first, second = StepPlan(), StepPlan()
    first.fences.append(1)
    assert second.fences == []
    assert StepPlan().fences == []


def test_a_load_lists_the_engine_blocks_it_fills_in_order():
    plan = LoadPlan(1, "r", [Copy(HOST, [0, 1], [7, 5]), Copy(DISK, [0], [6])], in_step=False)
    assert plan.blocks == [7, 5, 6]
