"""The short ways through a prompt's blocks leave a pool as vLLM leaves it, or are not gone."""

from __future__ import annotations

import importlib
import random
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm.v1.core.block_pool as block_pool
import vllm.v1.core.kv_cache_manager as kv_cache_manager
import vllm.v1.core.kv_cache_utils as kv_cache_utils
import vllm.v1.kv_cache_interface as kv_cache_interface
import vllm.v1.worker.gpu.buffer_utils as buffers

from kvbm.engines.vllm import compat, shortcuts
from kvbm.engines.vllm.shortcuts import blocks as shortcut_blocks
from kvbm.engines.vllm.shortcuts import tokens as shortcut_tokens

pytestmark = pytest.mark.engine
SIZE = 16
BlockPool, KVCacheManager = block_pool.BlockPool, kv_cache_manager.KVCacheManager
PLACES = [
    (BlockPool, "get_new_blocks"),
    (BlockPool, "cache_full_blocks"),
    (KVCacheManager, "estimate_cached_tokens"),
    (buffers, "async_tensor_h2d"),
]


def own_of(place, name):
    function = getattr(place, name)
    return getattr(function, "__wrapped__", function)  # another test may have made an engine in this process


TAKE, CACHE, COUNT, SEND = (own_of(*place) for place in PLACES)


@pytest.fixture(autouse=True)
def _vllm_as_it_is(monkeypatch):
    for place in PLACES:
        monkeypatch.setattr(*place, own_of(*place))


def replaced():
    return [name for place, name in PLACES if hasattr(getattr(place, name), "__wrapped__")]


def counted(own):
    """vLLM's own, which tells what it was called with."""
    calls = []

    def function(self, *args, **kwargs):
        calls.append(args)
        return own(self, *args, **kwargs)

    return function, calls


class Ours:
    """The short ways with a pool, and what they leave to vLLM."""

    def __init__(self, least=1):
        own_take, self.left_to_take = counted(TAKE)
        own_cache, self.left_to_cache = counted(CACHE)
        self.take = shortcut_blocks.taking(own_take, BlockPool, least)
        self.cache = shortcut_blocks.caching(own_cache, BlockPool, least)


class Vllms:
    take = staticmethod(TAKE)
    cache = staticmethod(CACHE)


def names(prompt, count, shared=0):
    """Of a prompt whose first blocks are those of others."""
    return [f"shared {i}".encode() for i in range(shared)] + [f"{prompt} {i}".encode() for i in range(shared, count)]


def request(names):
    return SimpleNamespace(block_hashes=names, request_id="a")


def play(way, seed, steps=60, blocks=48, pool=None):
    """Requests come, hit, grow, share, are preempted and finish as ``seed`` says; yields all that is to be seen."""
    source = random.Random(seed)
    pool = pool or BlockPool(blocks, True, SIZE)
    running = []
    for step in range(steps):
        action = source.choice(["start", "start", "grow", "grow", "finish", "evict", "reset", "half", "odd"])
        if action == "start":
            hashes = names(step, source.randrange(1, 24), source.randrange(12))
            hits = []
            if source.random() < 0.7:
                for name in hashes:
                    if not (found := pool.get_cached_block(name, [0])):
                        break
                    hits += found
            pool.touch(hits)
            running.append(SimpleNamespace(hashes=hashes, blocks=hits, named=len(hits)))
        elif action == "grow" and running:
            it = source.choice(running)
            try:
                it.blocks += (got := way.take(pool, source.randrange(12)))
                yield [block.block_id for block in got]
            except ValueError as error:
                yield str(error)
            full = min(len(it.blocks), len(it.hashes), it.named + source.randrange(12))
            try:
                way.cache(pool, request(it.hashes), it.blocks, it.named, full, SIZE, 0)
            except AssertionError:  # blocks that lost their names while shared
                yield "refused"
            it.named = max(it.named, full)
        elif action == "finish" and running:
            it = running.pop(source.randrange(len(running)))
            pool.free_blocks(reversed(it.blocks))
        elif action == "evict":
            pool.evict_blocks({source.randrange(1, blocks) for _ in range(3)})
        elif action == "reset" and source.random() < 0.3:
            for it in running:
                pool.free_blocks(reversed(it.blocks))
            running.clear()
            yield pool.reset_prefix_cache()
        elif action == "half" and running:  # a block that is named before it is full
            it = source.choice(running)
            if it.named < min(len(it.blocks), len(it.hashes)) and not it.blocks[it.named].block_hash:
                key = kv_cache_utils.make_block_hash_with_group_id(b"half" + it.hashes[it.named], 0)
                pool._insert_block_hash(key, it.blocks[it.named], it.named * SIZE + 8)
        elif action == "odd" and running:  # a second name
            block = source.choice(source.choice(running).blocks or [None])
            if block is not None and block.block_hash and source.random() < 0.2:
                key = kv_cache_utils.make_block_hash_with_group_id(f"second {step}".encode(), 0)
                pool._insert_block_hash(key, block, None)
        yield shortcut_blocks._state(pool)


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.long) for part in range(2, 8))])
def test_a_pool_ends_up_as_vllm_leaves_it_whatever_happens_to_it(part):
    ours = Ours()
    for seed in range(part * 250, (part + 1) * 250):
        assert list(play(ours, seed)) == list(play(Vllms, seed))
    assert ours.left_to_take
    assert ours.left_to_cache


@pytest.mark.parametrize("known", [0, 5])
def test_a_long_prompt_is_taken_and_named_the_short_way(known):
    ours, pools = Ours(least=64), [BlockPool(300, True, SIZE) for _ in range(2)]
    for pool, way in zip(pools, (ours, Vllms), strict=True):
        for prompt in range(4):  # the last ones take the places of the first
            blocks = way.take(pool, 100)
            way.cache(pool, request(names(prompt, 100)), blocks, known, 100, SIZE, 0)
            pool.free_blocks(reversed(blocks))
    assert shortcut_blocks._state(pools[0]) == shortcut_blocks._state(pools[1])
    assert not ours.left_to_take
    assert all(call[2] == 100 for call in ours.left_to_cache)  # nothing but the end is left


def test_few_blocks_are_left_to_vllm_at_once():
    ours, pool = Ours(least=64), BlockPool(300, True, SIZE)
    blocks = ours.take(pool, 63)
    ours.cache(pool, request(names(0, 63)), blocks, 0, 63, SIZE, 0)
    assert len(ours.left_to_take) == 1
    assert ours.left_to_cache[0][2] == 0


class Collector:
    """Metrics of blocks, which hear of every block that changes hands."""

    def __init__(self):
        self.heard = []

    def on_block_allocated(self, block):
        self.heard.append(("allocated", block.block_id))

    def on_block_evicted(self, block):
        self.heard.append(("evicted", block.block_id))


class OtherPool(BlockPool):
    pass


def several_names():
    pool = BlockPool(300, True, SIZE)
    block = TAKE(pool, 1)[0]
    for name in (b"a", b"b"):
        pool._insert_block_hash(kv_cache_utils.make_block_hash_with_group_id(name, 0), block, SIZE)
    pool.free_blocks([block])
    return pool


def watched():
    pool = BlockPool(300, True, SIZE)
    if not hasattr(pool, "unpin_blocks"):
        pytest.skip("this release has nobody who watches")
    pool.unpin_blocks(TAKE(pool, 3), heard_of.append)
    return pool


heard_of = []


@pytest.mark.parametrize(
    "make",
    [
        partial(BlockPool, 300, False, SIZE),
        partial(BlockPool, 300, True, SIZE, enable_kv_cache_events=True),
        lambda: BlockPool(300, True, SIZE, metrics_collector=Collector()),
        partial(OtherPool, 300, True, SIZE),
        several_names,
        watched,
    ],
    ids=["no caching", "events", "metrics", "another kind", "several names", "watched"],
)
def test_a_pool_that_does_more_when_blocks_are_taken_is_left_to_vllm(make):
    ours, pools = Ours(), [make(), make()]
    for pool, way in zip(pools, (ours, Vllms), strict=True):
        way.take(pool, 299)
    assert len(ours.left_to_take) == 1
    assert shortcut_blocks._state(pools[0]) == shortcut_blocks._state(pools[1])


def test_events_tell_what_they_tell_with_vllms_own():
    told = []
    for way in (Ours(), Vllms):
        pool = BlockPool(300, True, SIZE, enable_kv_cache_events=True)
        blocks = way.take(pool, 299)
        for block, name in zip(blocks, names(0, 299), strict=True):
            pool._insert_block_hash(kv_cache_utils.make_block_hash_with_group_id(name, 0), block, SIZE)
        pool.free_blocks(blocks)
        way.take(pool, 299)
        told.append([str(event) for event in pool.take_events()])
    assert len(told[0]) == 299
    assert told[0] == told[1]


def plain(count=80):
    pool = BlockPool(300, True, SIZE)
    return pool, TAKE(pool, count), names(0, count)


def null(pool, blocks, hashes):
    blocks[3] = pool.null_block


def named_before(pool, blocks, hashes):
    CACHE(pool, request(names(1, 80)), blocks[:5], 2, 4, SIZE, 0)
    for block in blocks[2:4]:
        block._block_hash_num_tokens = 5  # it was not full then


def known_name(pool, blocks, hashes):
    other = TAKE(pool, 10)
    CACHE(pool, request(hashes), other, 0, 10, SIZE, 0)


def twice_the_name(pool, blocks, hashes):
    hashes[50] = hashes[20]


def twice_the_block(pool, blocks, hashes):
    blocks[50] = blocks[20]


def too_few_names(pool, blocks, hashes):
    del hashes[60:]


def too_few_blocks(pool, blocks, hashes):
    del blocks[60:]


def no_name(pool, blocks, hashes):
    hashes[60] = None


@pytest.mark.parametrize(
    ("oddity", "first"),
    [
        (null, 3),
        (named_before, 2),
        (known_name, 0),
        (twice_the_name, 50),
        (twice_the_block, 50),
        (too_few_names, 60),
        (too_few_blocks, 60),
        (no_name, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_from_the_first_block_that_is_not_plain_vllm_does_it(oddity, first):
    outcomes, ours = [], Ours()
    for way in (ours, Vllms):
        pool, blocks, hashes = plain()
        oddity(pool, blocks, hashes)
        try:
            outcome = way.cache(pool, request(hashes), blocks, 0, 80, SIZE, 0)
        except Exception as error:
            outcome = type(error), str(error)
        outcomes.append((outcome, shortcut_blocks._state(pool)))
    assert outcomes[0] == outcomes[1]
    assert [call[2] for call in ours.left_to_cache] == ([] if first is None else [first])


def test_blocks_of_another_kind_of_pool_are_named_by_vllm():
    ours, pool = Ours(), OtherPool(300, True, SIZE)
    ours.cache(pool, request(names(0, 80)), TAKE(pool, 80), 0, 80, SIZE, 0)
    assert ours.left_to_cache[0][2] == 0


@pytest.mark.parametrize("group", [0, 7])
def test_blocks_are_named_with_their_group(group):
    states = []
    for way in (Ours(), Vllms):
        pool, blocks, hashes = plain()
        way.cache(pool, request(hashes), blocks, 0, 80, SIZE, group)
        states.append(shortcut_blocks._state(pool))
    assert states[0] == states[1]


@pytest.mark.parametrize("size", [SIZE, 2 * SIZE])
@pytest.mark.parametrize("mask", [None, [i % 3 > 0 for i in range(40)]], ids=["no mask", "mask"])
@pytest.mark.parametrize("events", [False, True], ids=["no events", "events"])
def test_masks_larger_blocks_and_events_are_left_to_vllm(size, mask, events, monkeypatch):
    monkeypatch.setattr(BlockPool, "_build_block_stored_event", lambda self, request, **what: str(what), raising=False)
    monkeypatch.setattr(block_pool, "generate_block_hash_extra_keys", lambda *_: (None, 0))
    outcomes, ours = [], Ours()
    for way in (ours, Vllms):
        pool = BlockPool(300, True, SIZE, enable_kv_cache_events=events)
        blocks = TAKE(pool, 40)
        way.cache(pool, request(names(0, 80)), blocks, 0, 40, size, 0, block_mask=mask)
        outcomes.append((shortcut_blocks._state(pool), pool.take_events()))
    assert outcomes[0] == outcomes[1]
    is_plain = size == SIZE and mask is None and not events
    assert ours.left_to_cache[0][2] == (40 if is_plain else 0)


def test_what_a_release_may_add_is_passed_on():
    given = {}

    def own(self, *args, **more):
        given.update(more)

    pool, blocks, hashes = plain()
    before = shortcut_blocks._state(pool)
    shortcut_blocks.caching(own, BlockPool, 1)(pool, request(hashes), blocks, 0, 80, SIZE, 0, something_new=5)
    assert given == {"something_new": 5}
    assert shortcut_blocks._state(pool) == before


@pytest.mark.parametrize(("done", "full"), [(-5, 80), (80, 80), (81, 80), (0, 0), (0, 200)])
def test_numbers_of_blocks_that_make_little_sense_mean_what_they_mean_to_vllm(done, full):
    outcomes = []
    for way in (Ours(), Vllms):
        pool, blocks, hashes = plain()
        way.cache(pool, request(hashes), blocks, done, full, SIZE, 0)
        outcomes.append(shortcut_blocks._state(pool))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("way", [Ours(), Vllms], ids=["ours", "vLLM's"])
def test_more_blocks_than_are_free_are_refused_and_nothing_is_taken(way):
    pool = BlockPool(100, True, SIZE)
    before = shortcut_blocks._state(pool)
    with pytest.raises(ValueError, match="Cannot get 100 free blocks"):
        way.take(pool, 100)
    assert shortcut_blocks._state(pool) == before


@pytest.mark.parametrize("way", [Ours(), Vllms], ids=["ours", "vLLM's"])
def test_a_free_block_that_somebody_holds_is_noticed(way):
    pool = BlockPool(100, True, SIZE)
    pool.blocks[50].ref_cnt = 1
    with pytest.raises(AssertionError):
        way.take(pool, 99)


def spec(kind=kv_cache_interface.FullAttentionSpec, **more):
    return kind(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16, **more)


class Passing(kv_cache_interface.FullAttentionSpec):
    prefix_cacheable = False


def manager(groups, blocks):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in groups]
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups), get_blocks=lambda _: SimpleNamespace(blocks=blocks)
    )


@pytest.mark.parametrize("cached", [0, 1, 40, 80])
def test_as_many_tokens_are_counted_as_vllm_counts(cached):
    pool, blocks, hashes = plain()
    CACHE(pool, request(hashes), blocks, 0, cached, SIZE, 0)
    for some in (blocks, blocks[::-1], [], [pool.null_block, *blocks[::3]]):
        it = manager([spec()], (some,))
        calls = []
        count = shortcut_blocks.counting(lambda *args, calls=calls: calls.append(args))
        assert count(it, request(hashes)) == COUNT(it, request(hashes))
        assert not calls


@pytest.mark.parametrize(
    "groups",
    [[spec(), spec()], [spec(kv_cache_interface.CrossAttentionSpec)], [spec(Passing)]],
    ids=["two groups", "cross attention", "never cached"],
)
def test_other_groups_are_counted_by_vllm(groups):
    pool, blocks, hashes = plain()
    CACHE(pool, request(hashes), blocks, 0, 40, SIZE, 0)
    it = manager(groups, (blocks, blocks[:10])[: len(groups)])
    own, calls = counted(COUNT)
    assert shortcut_blocks.counting(own)(it, request(hashes)) == COUNT(it, request(hashes))
    assert calls


NUMBERS = [random.Random(0).randrange(-(2**31), 2**31) for _ in range(2000)]


def sent(numbers, send=SEND, **options):
    try:
        found = send(numbers, **{"device": "cpu", "dtype": torch.int32, **options})
    except Exception as error:
        return type(error), str(error)
    return found.dtype, found.shape, found.tolist()


def sender():
    """The short way, and whether it was gone: what vLLM's own was given."""
    given = []

    def own(data, *args, **options):
        given.append(type(data))
        return SEND(data, *args, **options)

    return shortcut_tokens.sending(own), given


@pytest.mark.parametrize("numbers", [NUMBERS, NUMBERS[:1024], [True] * 2000, [*NUMBERS, False]])
def test_a_long_list_of_numbers_arrives_as_vllm_sends_it(numbers):
    send, given = sender()
    assert sent(numbers, send) == sent(numbers)
    assert given == [np.ndarray]


def test_what_arrived_does_not_change_with_the_list():
    send, _ = sender()
    numbers = list(NUMBERS)
    found = send(numbers, device="cpu", dtype=torch.int32)
    numbers.clear()
    found[0] = 5  # and may be written to
    assert found.tolist() == [5, *NUMBERS[1:]]


class Index:
    def __index__(self):
        return 3

    def __repr__(self):
        return "Index()"


@pytest.mark.parametrize(
    "odd",
    [1.5, 2**31, -(2**31) - 1, 2**70, None, "1", [1], np.int64(5), np.float32(1.5), torch.tensor(3), torch.tensor([3]),
     Index()],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1500])
def test_what_is_no_list_of_plain_numbers_is_left_to_vllm(odd, place):
    send, given = sender()
    numbers = [*NUMBERS[:place], odd, *NUMBERS[place:]]
    assert sent(numbers, send) == sent(numbers)
    assert given == [list]


@pytest.mark.parametrize(
    ("numbers", "options"),
    [
        (NUMBERS[:1023], {}),
        (NUMBERS, {"dtype": torch.int64}),
        (NUMBERS, {"dtype": torch.float32}),
        (NUMBERS, {"dtype": None}),
        (np.array(NUMBERS), {}),
        (torch.tensor(NUMBERS), {}),
        (tuple(NUMBERS), {}),
    ],
)
def test_whatever_else_goes_to_the_gpu_goes_vllms_way(numbers, options):
    send, given = sender()
    assert sent(numbers, send, **options) == sent(numbers, **options)
    assert given == [type(numbers)]


def test_pools_and_lists_take_the_short_way_from_now_on():
    for _ in range(2):
        shortcut_blocks.install()
        shortcut_tokens.install()
    assert replaced() == [name for _, name in PLACES]
    assert [own_of(*place) for place in PLACES] == [TAKE, CACHE, COUNT, SEND]
    states = []
    for _ in range(2):
        pool = BlockPool(300, True, SIZE)
        blocks = pool.get_new_blocks(100)
        pool.cache_full_blocks(
            request=request(names(0, 100)),
            blocks=blocks,
            num_cached_blocks=0,
            num_full_blocks=100,
            block_size=SIZE,
            kv_cache_group_id=0,
            block_mask=None,
        )
        states.append(shortcut_blocks._state(pool))
        for place in PLACES:
            setattr(*place, own_of(*place))
    assert states[0] == states[1]


@pytest.mark.parametrize(("place", "name"), PLACES, ids=[name for _, name in PLACES])
def test_what_somebody_else_has_replaced_stays_as_it_is(place, name, monkeypatch):
    """It may do more than what is to be seen in a pool."""
    own = getattr(place, name)

    def theirs(*args, **options):
        return own(*args, **options)

    monkeypatch.setattr(place, name, theirs)
    shortcut_blocks.install()
    shortcut_tokens.install()
    assert getattr(place, name) is theirs


@pytest.mark.parametrize("wanted", [True, False], ids=["wanted", "not wanted"])
def test_the_short_way_is_taken_where_it_is_wanted(wanted, make_clockwork, monkeypatch, caplog):
    monkeypatch.setattr(shortcuts, "_active", [])
    with caplog.at_level("INFO", logger="kvbm"):
        make_clockwork({"fast_prompts": wanted})
    assert len(replaced()) == (4 if wanted else 0)
    line = "vLLM shortcuts active (KVBM_FAST_PROMPTS): "
    assert caplog.text.count(line) == wanted
    assert all(name in caplog.text for name in ("block allocation", "token upload")) is wanted


@pytest.mark.parametrize("wanted", [True, False], ids=["wanted", "not wanted"])
def test_long_prompts_that_return_are_answered_right(wanted, make_clockwork, monkeypatch):
    done_by_vllm = {"_insert_block_hash": 0, "_maybe_evict_cached_block": 0}
    for name in done_by_vllm:
        own = getattr(BlockPool, name)

        def told(self, *args, name=name, own=own, **more):
            done_by_vllm[name] += 1
            return own(self, *args, **more)

        monkeypatch.setattr(BlockPool, name, told)
    room = {"max_model_len": 2048, "max_num_batched_tokens": 512}
    engine = make_clockwork({"fast_prompts": wanted, "cpu_cache_override_num_blocks": 1000}, blocks=160, **room)
    done_by_vllm.update(dict.fromkeys(done_by_vllm, 0))  # at start they were compared
    for again in range(2):
        for prompt in range(4):  # of 125 blocks, 50 of them shared
            tokens = [*range(200), *range(1000 * prompt, 1000 * prompt + 300)]
            engine.add(f"{prompt} {again}", tokens, 4)
            engine.run()
    engine.check()
    assert engine.onboarded
    assert all((times < 100) is wanted for times in done_by_vllm.values()), done_by_vllm


def test_a_release_that_nobody_has_read_keeps_its_own(monkeypatch):
    monkeypatch.setattr(compat, "release", lambda: (9, 9))
    shortcut_blocks.install()
    shortcut_tokens.install()
    assert not replaced()


def test_an_engine_with_the_other_model_runner_does_not_load_this_one(monkeypatch):
    monkeypatch.delitem(sys.modules, buffers.__name__)
    shortcut_tokens.install()
    assert buffers.__name__ not in sys.modules


@pytest.mark.parametrize("gone", ["vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_manager"])
def test_a_release_that_has_nothing_where_others_have_it_starts_like_any_other(gone, monkeypatch):
    monkeypatch.setitem(sys.modules, gone, None)
    importlib.reload(shortcut_blocks).install()
    assert not replaced()


def keeps_its_tokens(own, kind, least=64):
    def take(self, num_blocks):
        blocks = TAKE(self, num_blocks)
        for block in blocks:
            block._block_hash_num_tokens = 16
        return blocks

    return take


def takes_in_another_order(own, kind, least=64):
    return lambda self, num_blocks: TAKE(self, num_blocks)[::-1]


def forgets_the_last(own, kind, least=64):
    def cache(self, request, blocks, done, full, *more):
        CACHE(self, request, blocks, done, full - 1, *more)

    return cache


def overwrites_a_name(own, kind, least=64):
    def cache(self, request, blocks, done, full, *more):
        CACHE(self, request, blocks, done, full, *more)
        for block in blocks:
            if block.block_hash:
                self.cached_block_hash_to_block._cache[block.block_hash] = block

    return cache


def raises(*_):
    return lambda *_, **__: 1 // 0


def counts_one_more(own):
    return lambda *args: COUNT(*args) + 1


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("taking", keeps_its_tokens),
        ("taking", takes_in_another_order),
        ("taking", raises),
        ("caching", forgets_the_last),
        ("caching", overwrites_a_name),
        ("caching", raises),
        ("counting", counts_one_more),
        ("counting", raises),
    ],
)
def test_where_the_two_leave_other_pools_vllm_has_its_way(name, broken, monkeypatch, caplog):
    monkeypatch.setattr(shortcut_blocks, name, broken)
    with caplog.at_level("INFO"):
        shortcut_blocks.install()
    assert not replaced()
    assert "using vLLM's own" in caplog.text


@pytest.mark.parametrize(
    "broken",
    [lambda data, **_: torch.tensor(data).clamp(max=2**30), lambda data, **options: SEND(data), raises()],
    ids=["other numbers", "another kind", "raises"],
)
def test_where_the_two_send_other_numbers_vllm_has_its_way(broken, monkeypatch, caplog):
    monkeypatch.setattr(shortcut_tokens, "sending", lambda own, least=1: broken)
    with caplog.at_level("INFO"):
        shortcut_tokens.install()
    assert not replaced()
    assert "using vLLM's own" in caplog.text


@pytest.mark.parametrize("place", [(BlockPool, "blocks"), (BlockPool, "cached_block_hash_to_block")])
def test_a_pool_made_in_another_way_is_left_to_vllm(place, monkeypatch):
    """Had the release other fields, the short ways would not know what to do."""
    made = BlockPool.__init__

    def other(self, *args, **more):
        made(self, *args, **more)
        delattr(self, place[1])

    monkeypatch.setattr(BlockPool, "__init__", other)
    shortcut_blocks.install()
    assert not replaced()
