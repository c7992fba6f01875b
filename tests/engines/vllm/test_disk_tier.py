"""The disk tier under vLLM: what it holds is there after a restart, and whatever it does, no token changes for it.

The first part runs vLLM's scheduler over a model made of clockwork (see clockwork.py), the second a real vLLM.
"""

from __future__ import annotations

import contextlib
import errno
import random
import subprocess
import time

import pytest
from engines import EngineFailedError, do, generate, numbers, prompt

from tiernames import DISK

pytestmark = pytest.mark.engine

BLOCK = 4


@pytest.fixture
def make_engine(make_clockwork, tmp_path):
    disk = {
        "disk_cache_override_num_blocks": 200,
        "disk_cache_dir": str(tmp_path),
        "disable_disk_offload_filter": True,
    }
    return lambda kvbm=None, **options: make_clockwork({**disk, **(kvbm or {})}, heir=True, **options)


PROMPT = numbers(1, 42)


def from_disk(engine) -> int:
    return engine.counts.onboarded_blocks.get(DISK, 0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
def test_what_was_kept_comes_from_disk_after_a_restart(overlap, ranks, make_engine):
    first = make_engine(overlap=overlap, ranks=ranks)
    first.add("first", PROMPT)
    first.run()
    first.check()
    assert sum(first.counts.moved_blocks.values()) == first.counts.offloaded_blocks > 0
    first.close()
    second = make_engine(overlap=overlap, ranks=ranks)
    assert second.pool.published == 0
    second.add("second", PROMPT)
    second.run()
    second.check()
    assert from_disk(second) == second.counts.promoted_blocks == 10
    second.forget()
    second.add("third", PROMPT)
    second.run()
    second.check()
    assert second.onboarded == 10  # it has stayed in host memory
    second.check_idle()


@pytest.mark.parametrize("faults", ["load", "load:every=7"], ids=["no block arrives", "some do not"])
def test_what_never_arrives_is_computed_in_the_end(faults, make_engine):
    """The blocks on disk are good: it is the way from host memory to the engine that fails, every time."""
    first = make_engine()
    first.add("first", PROMPT)
    first.run()
    first.close()
    second = make_engine({"inject_faults": faults, "cpu_cache_override_num_blocks": 14})
    second.add("second", PROMPT)
    second.run()
    second.check()
    second.check_idle()


def test_what_host_memory_has_no_room_for_comes_from_disk(make_engine):
    engine = make_engine({"cpu_cache_override_num_blocks": 14})
    prompts = [numbers(10 + i, 42) for i in range(4)]
    for name in ("first", "second", "third"):
        for i, tokens in enumerate(prompts):
            engine.add(f"{name}{i}", tokens, 2)
            engine.run()
        engine.forget()
    engine.check()
    assert from_disk(engine) >= 40
    engine.check_idle()


def test_with_the_filter_only_what_was_found_again_is_on_disk(make_engine):
    engine = make_engine({"disable_disk_offload_filter": False})
    for name in ("first", "second"):
        engine.add(name, PROMPT, 1)
        engine.run()
        assert sum(engine.counts.moved_blocks.values()) == (10 if name == "second" else 0)
        engine.forget()
    engine.check()
    engine.check_idle()


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_host_tier_blocks_go_straight_to_disk(ranks, make_engine):
    kvbm = {"cpu_cache_override_num_blocks": 0, "disk_bounce_mb": 1, "disable_disk_offload_filter": False}
    engine = make_engine(kvbm, ranks=ranks)
    engine.add("first", PROMPT)
    engine.run()
    engine.check()
    assert sum(engine.counts.moved_blocks.values()) == engine.counts.offloaded_blocks > 0
    engine.close()
    engine = make_engine(kvbm, ranks=ranks)
    engine.add("second", PROMPT)
    engine.run()
    engine.check()
    assert from_disk(engine) == 10
    engine.check_idle()


def test_many_requests_with_one_prefix_read_it_once(make_engine):
    first = make_engine()
    first.add("first", PROMPT)
    first.run()
    first.close()
    engine = make_engine({"inject_faults": "disk-slow-read:seconds=0.1"})
    for i in range(6):
        engine.add(f"r{i}", PROMPT + numbers(20 + i, 9))
    engine.run()
    engine.check()
    assert from_disk(engine) == 10
    engine.check_idle()


def test_whoever_has_waited_long_enough_for_another_reads_for_itself(make_engine, monkeypatch, stall):
    monkeypatch.setattr("kvbm.engines.vllm.deferral.PATIENCE_SECONDS", 0.25)
    first = make_engine()
    first.add("first", PROMPT)
    first.run()
    first.close()
    engine = make_engine({"inject_faults": "disk-slow-read"})
    for name in ("one", "two"):
        engine.add(name, PROMPT)
    deadline = time.monotonic() + 60
    while not all(state.loads for state in engine.adapter._requests.values()):
        assert time.monotonic() < deadline
        engine.turn()
    stall.over.set()
    engine.run()
    engine.check()
    assert from_disk(engine) == 20
    engine.check_idle()


def test_a_cleared_cache_is_not_found_by_the_next_engine(make_engine):
    first = make_engine()
    first.add("first", PROMPT)
    first.run()
    first.scheduler.reset_prefix_cache(reset_connector=True)
    first.add("second", PROMPT)
    first.run()
    first.check()
    assert sum(first.counts.moved_blocks.values()) > 10
    first.close()
    second = make_engine()
    second.add("third", PROMPT)
    second.run()
    second.check()
    assert from_disk(second) == 0


@pytest.mark.parametrize("size", [20, 60])
def test_another_size_of_the_disk_keeps_what_fits(size, make_engine):
    first = make_engine()
    for i in range(4):
        first.add(f"r{i}", numbers(30 + i, 42), 1)
    first.run()
    first.check()
    first.close()
    second = make_engine({"disk_cache_override_num_blocks": size})
    second.check_pool()
    assert second.adapter.leader.manager.catalogs[DISK].published == min(size, 40)
    for i in range(4):
        second.add(f"r{i}", numbers(30 + i, 42), 1)
    second.run()
    second.check()
    assert from_disk(second) > 0


FAULTS = (
    "",
    "disk-read:every=3",
    "disk-flip:every=4",
    "disk-write:every=3",
    "disk-torn:every=3",
    "disk-slow-read:every=5:seconds=0.3",
    "disk-slow-write:every=3:seconds=0.3",
    "disk-read:every=4,disk-write:every=5,load:every=9,store:every=7,slow:every=5",
)


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(16, 48))])
def test_random_histories_with_a_disk_end_with_the_right_tokens(seed, make_engine):
    """As in test_overlap.py, over engines that come one after the other, with a disk that fails and hangs."""
    source = random.Random(seed)
    ranks, overlap = source.choice((1, 1, 2)), source.random() < 0.7
    families = [numbers(seed * 10 + i, 60) for i in range(3)]
    served = 0
    faults = FAULTS[seed % len(FAULTS)]
    kvbm = {
        "inject_faults": faults,
        "cpu_cache_override_num_blocks": source.choice((0, 12, 30)),
        "disk_cache_override_num_blocks": source.choice((30, 200)),
        "disk_load_timeout_secs": 0.1 if faults else 60,
        "disk_bounce_mb": 1,
        "disable_disk_offload_filter": not faults or source.random() < 0.7,
        "onboard": "async" if overlap and "load" in faults else "auto",
        "load": "always" if not faults else source.choice(("always", "auto")),
    }
    for life in range(3):
        engine = make_engine(
            kvbm,
            blocks=source.choice((24, 40, 80)),
            ranks=ranks,
            overlap=overlap,
            second_runner=source.random() < 0.5,
        )
        running: list[str] = []
        for i in range(source.randrange(8, 14)):
            family, length = source.choice(families), source.randrange(1, 60)
            tokens = family[:length] + numbers(seed * 1000 + life * 100 + i, source.choice((0, 1, 9)))
            engine.add(f"r{i}", tokens, source.choice((1, 5, 20)), cache_salt=source.choice((None, None, "salt")))
            running.append(f"r{i}")
            for _ in range(source.randrange(12)):
                engine.turn()
            chance = source.random()
            if chance < 0.15:
                engine.abort(running.pop(source.randrange(len(running))))
            elif chance < 0.4:
                engine.scheduler.reset_prefix_cache()
            elif chance < 0.43:
                engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.run()
        engine.check()
        served += from_disk(engine)
        engine.close()
    if not faults:
        assert served > 0


# -- a real vLLM ------------------------------------------------------------------------------------------------------

PROMPTS = [prompt(40 + i, 400) for i in range(4)]  # of twelve blocks and a bit
RANKS = {"engine": {"tensor_parallel_size": 2}, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
GIVEN_UP = 5  # seconds; a request that computes takes a fraction of one here


def settings(folder, host=512, **more):
    return {
        "cpu_cache_override_num_blocks": host,
        "disk_cache_override_num_blocks": 256,
        "disk_cache_dir": str(folder),
        "disable_disk_offload_filter": True,
        **more,
    }


@pytest.mark.parametrize(
    ("end", "ranks"), [("stop", 1), ("kill", 1), ("stop", 2), pytest.param("kill", 2, marks=pytest.mark.long)]
)
def test_prompts_come_back_from_disk_after_the_end_of_an_engine(end, ranks, run_scenario, baseline, tmp_path):
    wanted = baseline(PROMPTS)
    options = RANKS if ranks == 2 else {}
    kvbm = settings(tmp_path)
    first = [generate(*PROMPTS, name="cold"), do("drain"), do("state", "end")]
    if end == "kill":
        with pytest.raises(EngineFailedError, match="status -9"):
            run_scenario([*first, do("wait_for_index"), do("kill")], kvbm, **options)
    else:
        story = run_scenario(first, kvbm, **options)
        assert story.tokens("cold") == wanted
        assert story["end"]["spilled"] == story["end"]["offloaded"] >= 48
    steps = [generate(*PROMPTS, name="again"), do("drain"), do("state", "end"), do("metrics", "metrics")]
    story = run_scenario(steps, kvbm, **options)
    assert story.tokens("again") == wanted
    assert story["end"]["from_disk"] == story["metrics"]["kvbm_onboard_blocks_d2d"] == 48
    assert story["end"]["faults"] == {}
    assert not story["end"]["busy"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_disk_that_fails_costs_time_and_no_token(ranks, run_scenario, baseline, tmp_path):
    """Host memory for little more than one prompt: the others have to come from a disk whose every other call fails."""
    options, rank = (RANKS, ":rank=1") if ranks == 2 else ({}, "")
    faults = f"disk-read{rank}:every=2,disk-write{rank}:every=5:errno=EIO"
    cold = [[generate(each, name=f"cold {i}"), do("drain")] for i, each in enumerate(PROMPTS)]
    steps = [
        *(step for each in cold for step in each),
        do("reset"),
        *(generate(each, name=f"again {i}") for i, each in enumerate(PROMPTS)),
        do("drain"),
        do("state", "end"),
        do("metrics", "metrics"),
    ]
    story = run_scenario(steps, settings(tmp_path, host=20, inject_faults=faults), **options)
    for name in ("cold", "again"):
        assert [story.tokens(f"{name} {i}")[0] for i in range(4)] == baseline(PROMPTS)
    end, metrics = story["end"], story["metrics"]
    assert end["failed_load_blocks"] == metrics["kvbm_transfer_failed_blocks disk device"] > 0
    assert end["failed_spill_blocks"] == metrics["kvbm_transfer_failed_blocks host disk"] > 0
    assert metrics["kvbm_failures"] == sum(end["faults"].values()) > 0
    assert len(story.said("Input/output error")) == 2
    assert (end["requests"], end["pinned"], end["writing"], end["busy"]) == (0, 0, 0, False)


def test_a_disk_that_hangs_holds_up_nobody(run_scenario, baseline, tmp_path):
    """No call to the disk ends. Whoever waits for a block gives up, and the others go on meanwhile."""
    alone = baseline([*PROMPTS, prompt(50, 300)])
    kvbm = settings(tmp_path)
    steps = [generate(*PROMPTS, name="cold"), do("drain")]
    run_scenario(steps, kvbm)
    kvbm |= {"disk_load_timeout_secs": GIVEN_UP}
    steps = [
        do("hang_disk"),
        do("add", names=["from disk"], prompts=[PROMPTS[0]]),
        do("add", names=["other"], prompts=[prompt(50, 300)]),
        do("finish_timed", "while it hangs"),
        do("state", "given up"),
        generate(PROMPTS[0], PROMPTS[1], name="next"),  # nobody asks a disk that owes a read
        do("mend"),
        do("drain"),
        generate(prompt(51, 300), max_tokens=1),  # the disk has not seen it
        do("drain"),
        do("state", "end"),
    ]
    story = run_scenario(steps, kvbm)
    found = story["while it hangs"]
    assert found["tokens"] == {"from disk": alone[0], "other": alone[4]}
    assert found["slowest"] < GIVEN_UP
    assert found["ends"]["other"] < found["ends"]["from disk"]
    assert found["ends"]["from disk"] >= GIVEN_UP
    assert story["given up"]["missed_load_blocks"] == 12
    assert story.said("gave up waiting for the disk tier: nothing came for 5 s")
    assert story.tokens("next") == alone[:2]
    end = story["end"]
    assert end["spilled"] > 0  # a disk that answers again is written to again
    assert (end["requests"], end["pinned"], end["writing"]) == (0, 0, 0)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_stalls_for_five_seconds_costs_no_token(ranks, run_scenario, baseline, tmp_path):
    """On every rank, every read and every write. Whoever waits for a block gives up after a second."""
    options = RANKS if ranks == 2 else {}
    alone = baseline([*PROMPTS, prompt(50, 300)])
    kvbm = settings(tmp_path)
    run_scenario([generate(*PROMPTS, name="cold"), do("drain")], kvbm, **options)
    kvbm |= {"inject_faults": "disk-slow-read,disk-slow-write", "disk_load_timeout_secs": 1}
    steps = [
        do("add", names=["from disk"], prompts=[PROMPTS[0]]),
        do("add", names=["other"], prompts=[prompt(50, 300)]),
        do("finish_timed", "while it stalls"),
        do("state", "given up"),
        generate(PROMPTS[0], PROMPTS[1], name="next"),  # nobody asks a disk that owes a read
        do("sleep", seconds=4.5),
        generate(PROMPTS[2], max_tokens=1),
        do("drain"),
        do("sleep", seconds=5.5),
        generate(PROMPTS[2], max_tokens=1),
        do("state", "end"),
    ]
    story = run_scenario(steps, kvbm, **options)
    found = story["while it stalls"]
    assert found["tokens"] == {"from disk": alone[0], "other": alone[4]}
    assert found["ends"]["other"] < found["ends"]["from disk"]
    assert story["given up"]["missed_load_blocks"] == 12
    assert story.said("gave up waiting for the disk tier: nothing came for 1 s")
    assert story.tokens("next") == alone[:2]
    end = story["end"]
    assert end["spilled"] > 0  # late, and written all the same
    assert (end["requests"], end["pinned"], end["writing"]) == (0, 0, 0)


def mount_small(kind, folder):
    """A filesystem of 16 MB; skips where that cannot be had."""
    folder.mkdir()
    commands = [["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]]
    if kind == "ext2":
        image = folder.with_suffix(".image")
        with open(image, "wb") as file:
            file.truncate(16 << 20)
        commands = [["mkfs.ext2", "-q", "-F", image], ["mount", "-o", "loop", image, folder]]
    for command in commands:
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no {kind} can be mounted here: {getattr(error, 'stderr', '') or error}")


@pytest.mark.parametrize(("kind", "ranks"), [("tmpfs", 1), pytest.param("ext2", 2, marks=pytest.mark.long)])
def test_a_full_filesystem_costs_hits_and_no_token(kind, ranks, run_scenario, baseline, tmp_path):
    """One that cannot reserve space beforehand, and that somebody else fills meanwhile. ext2 never can."""
    folder = tmp_path / "small"
    mount_small(kind, folder)
    try:
        steps = [
            generate(PROMPTS[0], name="room"),
            do("drain_moves"),
            do("state", "filled"),
            do("fill_up", "ballast", folder=str(folder)),
            generate(*PROMPTS[1:], name="no room"),
            do("drain_moves"),
            do("reset"),
            generate(*PROMPTS, name="again"),
            do("drain_moves"),
            do("state", "end"),
        ]
        kvbm = settings(folder, disk_cache_override_num_blocks=100)
        options = RANKS if ranks == 2 else {}
        patch = {"kvbm.tiers.disk.prealloc:fallocate": {"returns": errno.EOPNOTSUPP}} if kind == "tmpfs" else {}
        story = run_scenario(steps, kvbm, patch=patch, **options)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert [*story.tokens("room"), *story.tokens("no room")] == story.tokens("again") == baseline(PROMPTS)
    assert story["ballast"] > 0
    assert story["filled"]["spilled"] >= 12
    end = story["end"]
    assert end["failed_spill_blocks"] > 0
    assert story.said("ENOSPC")
    # Blocks may wait for the end of the breaker's pause, but no rank owes an answer.
    assert (end["requests"], end["pinned"], end["writing"]) == (0, 0, 0)


def test_more_disk_than_there_is_is_refused_at_start(run_scenario, tmp_path):
    kvbm = settings(tmp_path, disk_cache_override_num_blocks=0, disk_cache_gb=1e8)
    story = run_scenario([], kvbm, refused=True)
    assert "DYN_KVBM_DISK_CACHE_GB" in story.refused


def test_a_filesystem_that_is_full_at_start_costs_this_engine_its_disk_and_the_next_one_nothing(
    run_scenario, baseline, tmp_path
):
    wanted, folder = baseline(PROMPTS)[:1], tmp_path / "full"
    mount_small("tmpfs", folder)
    kvbm = settings(folder, disk_cache_override_num_blocks=100)
    steps = [generate(PROMPTS[0], name="tokens"), do("drain"), do("state", "end")]
    try:
        before = run_scenario(steps, kvbm)
        with open(folder / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        full = run_scenario(steps, kvbm)
        (folder / "ballast").unlink()
        after = run_scenario(steps, kvbm)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert before.tokens("tokens") == full.tokens("tokens") == after.tokens("tokens") == wanted
    assert before["end"]["spilled"] >= 12
    assert full.said("This engine runs without it; blocks on disk are kept for the next start")
    assert (full["end"]["disk_size"], full["end"]["faults"]) == (0, {})
    assert after["end"]["from_disk"] == 12
