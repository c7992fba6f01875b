"""One rank's start: what it offers the leader, what it refuses, and a copy through what it has opened."""

import pytest
import torch

from kvbm import config as settings
from kvbm.plans import Copy, LoadPlan, StepPlan, StorePlan
from kvbm.runtime.packing_notes import Note, write_note
from kvbm.runtime.rank import Rank, _spec
from kvbm.tiers.base import fingerprint
from kvbm.tiers.disk.cache_dir import DESCRIPTION, cache_directory
from kvbm.transfer.layout import describe
from kvbm.transfer.packing import pack_layout
from tiernames import HOST


def config(**values):
    return settings.load(extra=values, environ={}, files=[])


def layers(blocks=8):
    pool = torch.arange(blocks * 2 * 2 * 64, dtype=torch.int32).view(blocks, 2, 2, 64)
    return pool, {f"layer {i}": pool[:, i] for i in range(2)}


def test_a_rank_offers_its_share_of_the_host_tier():
    _, tensors = layers()
    rank = Rank(config(cpu_cache_gb=16 * 4 * 1024 / 1e9), rank=1, ranks=4)
    assert rank.hello() is None
    rank.register(tensors, 8)
    hello = rank.open()
    assert (hello.rank, hello.block_bytes, hello.slots) == (1, 1024, {HOST: 16})
    assert hello == rank.hello()
    rank.close()


def test_a_tier_that_holds_no_block_is_refused_with_the_size_of_one():
    _, tensors = layers()
    with pytest.raises(ValueError, match=r"DYN_KVBM_CPU_CACHE_GB=1e-06 holds no block: one block takes 0\.000004 GB"):
        Rank(config(cpu_cache_gb=0.000001), 0, 4).register(tensors, 8)


def test_broadcasts_that_are_asked_for_in_vain_are_mentioned(caplog):
    _, tensors = layers()
    rank = Rank(config(cpu_cache_override_num_blocks=4, nccl_mla_mode=True), 0, 2)
    with caplog.at_level("WARNING", "kvbm"):
        rank.register(tensors, 8)
    assert "DYN_KVBM_NCCL_MLA_MODE changes nothing here" in caplog.text
    rank.close()


def test_what_a_rank_stores_it_brings_back():
    pool, tensors = layers()
    rank = Rank(config(cpu_cache_override_num_blocks=4), 0, 1)
    rank.register(tensors, 8)
    rank.open()
    kept = pool[2].clone()
    store = StepPlan(stores=[StorePlan(1, Copy(HOST, [3], [2]))])
    load = StepPlan(loads=[LoadPlan(2, "r", [Copy(HOST, [3], [5])], in_step=True)], fences=[1])
    for plan in (store, load):
        rank.worker.begin(plan)
        if plan.fences:
            pool[2] = 0
        rank.worker.start_loads(plan)
        rank.worker.start_stores(plan)
    assert torch.equal(pool[5], kept)
    rank.close()


def packable(blocks=8):
    torch.manual_seed(1)
    pool = torch.randn(blocks, 2, 4096).to(torch.bfloat16)
    return pool, {f"layer {i}": pool[:, i] for i in range(2)}


def test_a_host_tier_of_packed_blocks_holds_more_of_them_for_the_same_gigabytes():
    _, tensors = packable()
    hellos = {}
    for pack in ("off", "on"):
        rank = Rank(config(cpu_cache_gb=0.02, pack=pack), 0, 1, cache={"weights": "w"})
        rank.register(tensors, 8)
        hellos[pack] = rank.open()
        rank.close()
    raw, packed = hellos["off"], hellos["on"]
    assert packed.slots[HOST] >= 1.30 * raw.slots[HOST]
    assert packed.block_bytes <= 0.77 * raw.block_bytes
    assert packed.raw_bytes == raw.raw_bytes == raw.block_bytes
    # Part of the fingerprint of every cache that outlives the engine.
    assert packed.layout != raw.layout
    assert "packed 2:4096:128:79" in packed.layout


def test_a_rank_names_the_blocks_that_do_not_fit_and_brings_back_the_others():
    pool, tensors = packable()
    pool[3, 1].view(torch.int16).random_(-32768, 32768)
    pool[4].fill_(1.0)
    values = pool[4].view(-1)
    values[0], values[1:11] = 2.0**-20, 2.0**-60  # the first of them has the second base
    rank = Rank(config(cpu_cache_override_num_blocks=8, pack="on"), 0, 1)
    rank.register(tensors, 8)
    rank.open()
    kept = pool[4].clone()
    store = StepPlan(stores=[StorePlan(1, Copy(HOST, [2, 5, 1], [3, 4, 2]))])
    rank.worker.begin(store)
    rank.worker.start_stores(store)
    stored = []
    while not stored:
        stored = rank.worker.poll().report.stores
    assert [(result.id, result.ok, result.unpackable) for result in stored] == [(1, True, [0])]
    assert stored[0].escapes == 10 / values.numel()
    load = StepPlan(loads=[LoadPlan(2, "r", [Copy(HOST, [5], [7])], in_step=True)])
    rank.worker.begin(load)
    rank.worker.start_loads(load)
    rank.worker.start_stores(load)
    assert torch.equal(pool[7], kept)
    rank.close()


@pytest.mark.parametrize(
    ("pack", "make", "reason"),
    [
        ("on", layers, "its values are int32, not bfloat16"),
        ("auto", packable, "an engine on a CPU gains no time"),
    ],
    ids=["other values", "auto on a CPU"],
)
def test_blocks_that_are_not_packed_are_said_to_be(pack, make, reason, caplog):
    _, tensors = make()
    rank = Rank(config(cpu_cache_override_num_blocks=4, pack=pack), 0, 1)
    with caplog.at_level("INFO", "kvbm"):
        rank.register(tensors, 8)
    assert f"KVBM_PACK={pack}: blocks of this KV cache are not packed: {reason}" in caplog.text
    assert rank.layout.block_bytes == rank.layout.raw_bytes
    rank.close()


class Trial:
    wins = True

    def __call__(self, device, layout, if_it_wins):
        if if_it_wins and not self.wins:
            raise ValueError("the GPU is slow")
        return pack_layout(layout), ": measured"


@pytest.fixture
def home(monkeypatch, tmp_path):
    """For the notes of earlier starts. The CPU is taken for a GPU on which packing wins."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Rank, "_is_on_cpu", False)
    trial = Trial()
    monkeypatch.setattr("kvbm.runtime.rank.pack_slots", trial)
    return trial


def is_packed(caplog, model="m", cache=None, **values):
    """Whether a rank packs its slots, and what it says."""
    caplog.clear()
    rank = Rank(config(cpu_cache_override_num_blocks=4, **values), 0, 1, cache=cache, model=model)
    with caplog.at_level("INFO", "kvbm"):
        rank.register(packable()[1], 8)
    rank.close()
    return rank.layout.block_bytes < rank.layout.raw_bytes, caplog.text


def note_of(model="m"):
    rank = Rank(config(cpu_cache_override_num_blocks=4, pack="on"), 0, 1, model=model)
    rank.register(packable()[1], 8)
    name = rank.open().packing_note
    rank.close()
    return name


def test_a_model_that_did_not_fit_packed_slots_is_packed_only_if_the_user_says_so(home, caplog):
    assert is_packed(caplog, pack="auto")[0]
    path = write_note(config(), note_of(), Note(200, 100))
    packed, text = is_packed(caplog, pack="auto")
    assert not packed
    assert f"too many of this model's blocks did not fit packed slots before; remove {path} to forget that" in text
    packed, text = is_packed(caplog, pack="on")
    assert packed
    assert "WARNING" in text
    assert "KVBM_PACK=on packs blocks, although too many of this model's blocks did not fit" in text
    assert is_packed(caplog, model="another", pack="auto")[0]
    path.unlink()
    assert is_packed(caplog, pack="auto")[0]


@pytest.mark.parametrize("pack", ["off", "auto"])
def test_raw_ranks_offer_no_name_of_a_note(home, pack):
    home.wins = False
    rank = Rank(config(cpu_cache_override_num_blocks=4, pack=pack), 0, 1, model="m")
    rank.register(packable()[1], 8)
    assert rank.open().packing_note == ""
    rank.close()


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_auto_keeps_to_the_blocks_of_the_cache_that_is_there(home, caplog, tmp_path, tier):
    values = {"disk_cache_override_num_blocks": 4, "disk_cache_dir": str(tmp_path / "tier")}
    if tier == "host":
        values = {"host_persist": True, "host_persist_dir": str(tmp_path / "tier")}
    cache = {"model": "m", "weights": "w"}
    layout = describe([_spec(name, tensor) for name, tensor in packable()[1].items()], 8)

    def leave(description):
        folder = cache_directory(tmp_path / "tier", fingerprint(cache, description))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DESCRIPTION).touch()

    assert is_packed(caplog, cache=cache, pack="auto", **values)[0]
    leave(layout.description)
    packed, text = is_packed(caplog, cache=cache, pack="auto", **values)
    assert not packed
    assert "a cache of unpacked blocks is there from before; KVBM_PACK=on starts another one" in text
    assert is_packed(caplog, cache={**cache, "weights": "v"}, pack="auto", **values)[0]  # not its own
    assert is_packed(caplog, cache=cache, pack="on", **values)[0]
    leave(pack_layout(layout).description)
    assert is_packed(caplog, cache=cache, pack="auto", **values)[0]


def test_auto_keeps_to_packed_blocks_although_the_gpu_is_slower_than_it_was(home, caplog, tmp_path):
    values = {"pack": "auto", "disk_cache_override_num_blocks": 4, "disk_cache_dir": str(tmp_path / "tier")}
    cache = {"model": "m", "weights": "w"}
    layout = describe([_spec(name, tensor) for name, tensor in packable()[1].items()], 8)
    home.wins = False
    packed, text = is_packed(caplog, **values)
    assert not packed
    assert "the GPU is slow" in text
    folder = cache_directory(tmp_path / "tier", fingerprint(cache, pack_layout(layout).description))
    folder.mkdir(parents=True)
    (folder / DESCRIPTION).touch()
    assert is_packed(caplog, cache=cache, **values)[0]
    assert not is_packed(caplog, cache={**cache, "weights": "v"}, **values)[0]


def test_auto_does_not_pack_what_other_engines_read(home, caplog):
    packed, text = is_packed(caplog, pack="auto", peers_enabled=True)
    assert not packed
    assert "engines that share blocks must all pack them, with KVBM_PACK=on, or none" in text


class Gathering:
    """What ranks say to each other, one after another: the others have said ``others``."""

    def __init__(self, *others):
        self.others, self.said = others, []

    def __call__(self, own):
        self.said.append(own)
        if isinstance(self.others[0], Exception):
            raise self.others[0]
        return [own, *self.others]


def of_two_ranks(caplog, gather, **values):
    caplog.clear()
    rank = Rank(config(cpu_cache_override_num_blocks=4, **{"pack": "auto", **values}), 0, 2, model="m", gather=gather)
    with caplog.at_level("INFO", "kvbm"):
        rank.register(packable()[1], 8)
    note = rank.open().packing_note
    rank.close()
    is_packed = rank.layout.block_bytes < rank.layout.raw_bytes
    assert bool(note) == is_packed
    return is_packed, caplog.text


def test_all_ranks_pack_or_none(home, caplog):
    gather = Gathering("")
    packed, text = of_two_ranks(caplog, gather)
    assert packed
    assert "blocks are packed to 77 %: measured" in text
    assert gather.said == [""]
    packed, text = of_two_ranks(caplog, Gathering("the trial on the GPU failed"))
    assert not packed
    assert "blocks are packed" not in text
    assert "not packed: of another rank: the trial on the GPU failed" in text


def test_a_rank_that_does_not_pack_says_why_to_the_others(home, caplog):
    write_note(config(), note_of(), Note(200, 100))
    gather = Gathering("")
    assert not of_two_ranks(caplog, gather)[0]
    assert "too many of this model's blocks did not fit" in gather.said[0]


@pytest.mark.parametrize("gather", [None, Gathering(TimeoutError("rank 1 is late"))], ids=["no way", "a late rank"])
def test_ranks_that_cannot_agree_do_not_pack(home, caplog, gather):
    packed, text = of_two_ranks(caplog, gather)
    assert not packed
    assert ("no way to agree" if gather is None else "could not agree on it: rank 1 is late") in text


@pytest.mark.parametrize(("pack", "packed"), [("on", True), ("off", False)])
def test_ranks_that_are_told_what_to_do_ask_no_other(home, caplog, pack, packed):
    gather = Gathering("reason")
    assert of_two_ranks(caplog, gather, pack=pack)[0] is packed
    assert not gather.said


def test_a_rank_that_cannot_decide_starts_with_raw_blocks_and_says_so(home, caplog, monkeypatch):
    def broken(*arguments):
        raise PermissionError(13, "Permission denied", "/cache")

    monkeypatch.setattr("kvbm.runtime.rank.find_note", broken)
    gather = Gathering("")
    packed, text = of_two_ranks(caplog, gather)
    assert not packed
    assert gather.said == ["Permission denied"]
    assert "not packed: Permission denied" in text
    assert not of_two_ranks(caplog, gather, pack="on")[0]


def test_ranks_on_a_cpu_ask_no_other(caplog):
    gather = Gathering("")
    assert not of_two_ranks(caplog, gather)[0]
    assert not gather.said
