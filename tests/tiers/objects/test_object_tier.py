"""The object store as a tier of the leader and the ranks, with a real store. No engine."""

import os
import time

import pytest
import torch
from object_blocks import WAIT_SECONDS, random_keys
from object_servers import BUCKET

from kvbm import config as settings
from kvbm.core.cost import CostModel
from kvbm.plans import StepPlan
from kvbm.runtime.leader import Leader
from kvbm.runtime.rank import Rank
from kvbm.runtime.tiers import connect, open_manager
from kvbm.tiers.objects import TIER
from kvbm.tiers.objects.client import Client
from kvbm.tiers.objects.format import object_of
from tiernames import HOST, OBJECT, PRIORS

BLOCKS = 64
ELEMENTS = 32 << 10  # of four bytes: blocks of 128 KiB, so 16 in an object


class Engine:
    """A leader and ranks in one process, with an engine's KV cache made of tensors."""

    def __init__(self, weed, model, ranks=1, **values):
        found = weed.settings()
        values = {
            "cpu_cache_override_num_blocks": 96,
            "disable_disk_offload_filter": True,
            "object_enabled": True,
            "object_bucket": BUCKET,
            "object_endpoint": found.endpoint,
            "object_region": found.region,
            "object_access_key": found.access_key,
            "object_secret_key": found.secret_key,
            "object_timeout_secs": 30.0,
            "object_lookup_secs": 30.0,
            **values,
        }
        config = settings.load(extra=values, environ={}, files=[])
        cache = {"model": model}
        self.caches = [torch.full((BLOCKS, ELEMENTS), -1, dtype=torch.int32) for _ in range(ranks)]
        self.ranks = [Rank(config, rank, ranks, cache=cache) for rank in range(ranks)]
        for rank, tensor in zip(self.ranks, self.caches, strict=True):
            rank.register({"layer": tensor}, BLOCKS)
        self.hellos = [rank.open() for rank in self.ranks]
        sizes = [4 * ELEMENTS] * ranks
        self.leader = Leader(open_manager(config, self.hellos, cache), ranks, block_bytes=sizes)
        connect(config, self.hellos, self.leader, CostModel(PRIORS))

    @property
    def catalog(self):
        return self.leader.manager.catalogs[OBJECT]

    def compute(self, keys):
        """As a prefill does: each block's content follows from its key and rank."""
        for rank, cache in enumerate(self.caches):
            for i, key in enumerate(keys):
                cache[i] = content(key, rank)

    def step(self, **plans):
        plan = StepPlan(**plans, moves=self.leader.plan_moves())
        for rank in self.ranks:
            rank.worker.begin(plan)
            rank.worker.start_loads(plan)
            rank.worker.start_stores(plan)
        outcomes = [rank.worker.poll() for rank in self.ranks]
        self.leader.apply([outcome.report for outcome in outcomes])
        return outcomes

    def run(self):
        deadline = time.monotonic() + WAIT_SECONDS
        bad = set()
        while self.leader.busy:
            assert time.monotonic() < deadline
            bad.update(*(outcome.bad_blocks for outcome in self.step()))
            time.sleep(0.001)
        return bad

    def serve(self, keys):
        """A request: look up, load what is found, compute the rest, keep it. Returns how many blocks were loaded."""
        match = self.lookup(keys)
        if match.blocks:
            plan = self.leader.onboard(match, "r", range(match.blocks), in_step=False)
            bad = set().union(*(outcome.bad_blocks for outcome in self.step(loads=[plan])))
            bad |= self.run()
            assert not bad
            for rank, cache in enumerate(self.caches):
                for i, key in enumerate(keys[: match.blocks]):
                    assert torch.equal(cache[i], torch.full_like(cache[i], content(key, rank))), "wrong KV"
        self.compute(keys)
        if plan := self.leader.offload(keys, range(len(keys))):
            self.step(stores=[plan])
        self.run()
        return match.blocks

    def lookup(self, keys, limit=None):
        deadline = time.monotonic() + WAIT_SECONDS
        while (match := self.leader.manager.lookup(keys, 0, limit)).pending:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return match

    def close(self):
        for rank in self.ranks:
            rank.close()
        self.leader.manager.close()


def wait_until(condition, what):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not yet: {what}"
        time.sleep(0.005)


def content(key, rank):
    return int.from_bytes(key[:3], "big") + rank


@pytest.fixture
def make(weed):
    made = []

    def engine(model, **options):
        made.append(Engine(weed, model, **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.fixture
def model():
    return f"model-{os.urandom(8).hex()}"


@pytest.mark.parametrize(("ranks", "secret"), [(1, ""), (2, "a secret")])
def test_any_instance_finds_what_another_one_wrote(make, weed, model, ranks, secret):
    keys = random_keys(40)
    first = make(model, ranks=ranks, object_encryption_secret=secret)
    assert first.serve(keys) == 0
    assert len(first.catalog.findable) == 40
    assert first.leader.counts.moved_blocks == {OBJECT: 40}
    second = make(model, ranks=ranks, object_encryption_secret=secret)
    other = [*keys[:35], *random_keys(3)]
    assert second.serve(other) == 35
    # Blocks that came back are near now; the others have been written beside them.
    assert set(second.leader.manager.near.findable) >= set(other)
    assert make(model, ranks=ranks, object_encryption_secret=secret).serve(other) == 38
    # Two groups of 16 blocks, eight single blocks of the first prompt, three of the second.
    objects = [listed for listed in Client(weed.settings()).list("kvbm-1/") if _root(listed) == _root_of(first)]
    assert len([listed for listed in objects if listed.name.endswith("-16")]) == 2 * ranks


def _root(listed):
    return "/".join(listed.name.split("/")[:2])


def _root_of(engine):
    return engine.hellos[0].tier(OBJECT).store


def test_the_rate_of_the_store_is_measured_for_the_cost_model(make, model):
    engine = make(model)
    rate, fixed = engine.hellos[0].tier(OBJECT).rate
    assert rate > 1e5
    assert fixed > 0


def test_no_request_waits_for_a_store_that_could_not_be_measured(make, model):
    engine = make(model, object_secret_key="wrong")
    assert engine.hellos[0].tier(OBJECT).rate is None
    assert not engine.leader.manager.lookup(random_keys(4)).pending


def test_a_group_is_found_although_its_last_block_is_not_wanted(make, model):
    """The engine computes the last token of a prompt, so it never asks for a last block that is full."""
    keys = random_keys(32)
    make(model).serve(keys)
    assert make(model).lookup(keys, 31).blocks == 31


def test_another_model_or_another_secret_finds_nothing(make, model):
    keys = random_keys(4)
    assert make(model).serve(keys) == 0
    assert make(model + "x").serve(keys) == 0
    assert make(model, object_encryption_secret="s").serve(keys) == 0
    assert make(model).serve(keys) == 4


def test_blocks_that_are_there_are_not_written_again(make, model):
    keys = random_keys(20)
    make(model).serve(keys)
    engine = make(model)
    engine.serve(keys)
    engine.leader.used(keys)
    engine.run()
    assert engine.leader.counts.moved_blocks.get(OBJECT, 0) == 0


def test_a_block_that_was_damaged_is_recomputed_and_written_anew(make, weed, model):
    keys = random_keys(16)
    first = make(model)
    first.serve(keys)
    client = Client(weed.settings())
    (listed,) = client.list(f"{_root_of(first)}/0/")
    data = weed.stored_bytes(listed.name)
    weed.overwrite(listed.name, data[:-1] + bytes([data[-1] ^ 1]))
    engine = make(model)
    match = engine.lookup(keys)
    assert match.blocks == 16
    plan = engine.leader.onboard(match, "r", range(16), in_step=False)
    bad = set().union(*(outcome.bad_blocks for outcome in engine.step(loads=[plan]))) | engine.run()
    assert bad == set(range(16)), "an object is verified as a whole"
    wait_until(lambda: not engine.catalog._is_suspended, "the store reads back what it is given, and is used again")
    assert engine.lookup(keys).blocks == 0
    assert engine.serve(keys) == 0
    assert make(model).serve(keys) == 16


def test_an_object_of_another_prompt_costs_one_hit(make, weed, model):
    prompts = [random_keys(16) for _ in range(2)]
    first = make(model)
    for keys in prompts:
        first.serve(keys)
    place = first.catalog.find(prompts[0][0])
    name, other = (
        f"{_root_of(first)}/0/{object_of(each) >> 3:014x}-16" for each in (place, first.catalog.find(prompts[1][0]))
    )
    weed.overwrite(name, weed.stored_bytes(other))
    engine = make(model)
    plan = engine.leader.onboard(engine.lookup(prompts[0]), "r", range(16), in_step=False)
    assert set().union(*(outcome.bad_blocks for outcome in engine.step(loads=[plan]))) | engine.run() == set(range(16))
    wait_until(lambda: not engine.catalog._is_suspended, "the store reads back what it is given, and is used again")
    assert engine.serve(prompts[0]) == 0
    assert make(model).serve(prompts[0]) == 16


def test_a_block_that_never_can_be_read_is_asked_for_less_and_less(make, model, monkeypatch):
    engine = make(model)
    keys = random_keys(1)
    engine.serve(keys)
    catalog, now = engine.catalog, time.monotonic()
    monkeypatch.setattr("kvbm.tiers.remote_catalog.time.monotonic", lambda: now)
    pauses = []
    for _ in range(9):
        catalog._publish(keys, [0]) if keys[0] not in catalog._found else None
        catalog.drop(keys)
        pauses.append(catalog._bad[keys[0]][0] - now)
    assert pauses[:3] == [60.0, 120.0, 240.0]
    assert pauses[-1] == catalog.max_bad_seconds


def test_blocks_that_lie_alone_are_told_from_those_in_groups(make, model):
    """16 blocks in one object, and four in as many: what they cost does not follow from their bytes."""
    keys = random_keys(20)
    make(model).serve(keys)
    assert [(len(run.slots), run.alone) for run in make(model).lookup(keys).runs] == [(16, False), (4, True)]


def test_a_group_is_not_torn_by_what_else_is_being_written(make, weed, model):
    """Half of host memory may be under way: 20 blocks of one prompt, and 12 of the 16 of the next."""
    engine = make(model, cpu_cache_override_num_blocks=64)
    first, second = random_keys(20), random_keys(16)
    for keys in (first, second):
        assert engine.lookup(keys).blocks == 0
    engine.compute([*first, *second])
    engine.step(stores=[engine.leader.offload([*first, *second], range(36))])
    engine.run()
    names = [listed.name for listed in Client(weed.settings()).list(f"{_root_of(engine)}/0/")]
    assert sum(name.endswith("-16") for name in names) == 2
    assert make(model).lookup(second).blocks == 16


def test_no_request_pays_for_a_store_that_damages_what_it_sends_but_the_first(make, proxy, model, monkeypatch):
    monkeypatch.setattr("kvbm.core.breaker.MAX_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("kvbm.core.breaker.FIRST_PAUSE_SECONDS", 0.1)
    prompts = [random_keys(16) for _ in range(3)]
    first = make(model)
    for keys in prompts:
        first.serve(keys)
    engine = make(model, object_endpoint=proxy.endpoint)
    assert [engine.lookup(keys).blocks for keys in prompts] == [16, 16, 16]
    proxy.set_fault("flip", "GET")
    plan = engine.leader.onboard(engine.lookup(prompts[0]), "r", range(16), in_step=False)
    engine.step(loads=[plan])
    engine.run()
    asked = len([path for _, path in proxy.requests if "/0/" in path])
    for keys in prompts:
        assert engine.lookup(keys).blocks == 0
    wait_until(lambda: sum("list-type" in path for _, path in proxy.requests) >= 5, "probes go on")
    assert len([path for _, path in proxy.requests if "/0/" in path]) == asked
    assert not engine.catalog.available, "nor is anything written"
    proxy.set_fault("")
    wait_until(lambda: not engine.catalog._is_suspended, "it is used again")
    assert engine.catalog.find(prompts[1][0]) is not None


def test_no_request_but_the_first_waits_for_a_store_that_stalls(make, proxy, model, monkeypatch):
    monkeypatch.setattr("kvbm.core.breaker.MAX_PAUSE_SECONDS", 0.1)
    prompts = [random_keys(16) for _ in range(2)]
    first = make(model)
    for keys in prompts:
        first.serve(keys)
    engine = make(model, object_endpoint=proxy.endpoint)
    assert [engine.lookup(keys).blocks for keys in prompts] == [16, 16]
    proxy.set_fault("stall")
    plan = engine.leader.onboard(engine.lookup(prompts[0]), "r", range(16), in_step=False, stall_seconds=0.1)
    bad = set().union(*(outcome.bad_blocks for outcome in engine.step(loads=[plan]))) | engine.run()
    assert bad == set(range(16))
    assert engine.catalog._is_suspended, "at the first late answer"
    assert engine.catalog.find(prompts[1][0]) is None
    proxy.set_fault("")
    proxy.released.set()
    wait_until(lambda: not engine.catalog._is_suspended, "a probe of the tier's own has found it well")
    assert engine.catalog.find(prompts[1][0]) is not None


def test_an_engine_that_was_reset_leaves_the_bucket_alone(make, model):
    """Its weights have changed: it must not read what the old ones wrote, nor write under the same names."""
    keys = random_keys(4)
    engine = make(model)
    engine.serve(keys)
    engine.leader.reset()
    engine.run()
    assert engine.serve(keys) == 0
    assert not engine.catalog.findable
    assert engine.leader.counts.moved_blocks == {OBJECT: 4}
    assert make(model).serve(keys) == 4


def test_an_engine_starts_and_serves_without_its_store(make, model):
    engine = make(model, object_endpoint="http://127.0.0.1:1", object_timeout_secs=1.0)
    assert OBJECT in engine.leader.manager.catalogs
    keys = random_keys(4)
    assert engine.serve(keys) == 0
    assert engine.serve(keys) == 4, "from host memory"
    assert engine.leader.counts.moved_blocks.get(OBJECT, 0) == 0


def test_settings_that_cannot_work_turn_the_tier_off(make, model, caplog):
    engine = make(model, object_bucket="")
    assert OBJECT not in engine.leader.manager.catalogs
    assert "DYN_KVBM_OBJECT_BUCKET is not set" in caplog.text
    assert engine.serve(random_keys(2)) == 0


def test_the_tier_needs_host_memory_to_stage_through():
    config = settings.load(extra={"object_enabled": True, "disk_cache_gb": 1.0}, environ={}, files=[])
    assert not TIER.is_wanted(config)


def test_blocks_on_disk_go_to_the_bucket_once_a_request_has_found_them(make, model, tmp_path):
    on_disk = {"disk_cache_override_num_blocks": 64, "disk_cache_dir": str(tmp_path)}
    keys = random_keys(8)
    first = make(model, object_enabled=False, **on_disk)
    first.serve(keys)
    first.close()
    second = make(model, **on_disk)
    assert second.serve(keys) == 8
    second.leader.used(keys)
    second.run()
    assert set(second.catalog.findable) == set(keys)
    assert make(model).serve(keys) == 8
    assert HOST in second.leader.manager.catalogs
