"""The digest of loaded weights: equal for equal numbers, and another after any change."""

import threading

import pytest
import torch

from kvbm.engines import weights
from kvbm.engines.weights import Named, UnreadableError, digest_of, fingerprint, gather_in_world, roots, tensors_of


@pytest.fixture(params=["host", "device"])
def digest(request, monkeypatch):
    """The digest of one tensor, with the hash of host memory and with the sums that a device computes."""
    if request.param == "host":
        return lambda tensor: digest_of([Named("a", [tensor])])

    def sums(tensor):
        described = weights._describe(tensor, {})[:3]
        found = weights._Sums(torch.device("cpu"))
        for piece in weights._bytes_of(tensor.detach().permute(described[2])):
            found.add(piece)
        return described, found.collect()

    return sums


KINDS = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.uint8,
    torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint4,
]  # fmt: skip


def random_bytes(count, seed=0):
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def of_kind(dtype, *shape, seed=0):
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return random_bytes(count, seed).gt(127).view(shape)
    return random_bytes(count * dtype.itemsize, seed).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_equal_numbers_have_equal_digests_and_one_changed_byte_has_another(digest, dtype):
    tensor = of_kind(dtype, 7, 13)
    before = digest(tensor)
    assert digest(tensor.view(torch.uint8).clone().view(dtype)) == before
    raw = tensor.view(torch.uint8).reshape(-1)
    for at in (0, 1, len(raw) // 2, len(raw) - 1):
        raw[at] ^= 1
        assert digest(tensor) != before, at
        raw[at] ^= 1
    assert digest(tensor) == before


@pytest.mark.parametrize("count", [1, 3, 4, 5, 4 * weights.LANES - 1, 4 * weights.LANES, 4 * weights.LANES + 7,
                                   4 * weights.LANES * weights.BATCH_ROWS + 4 * weights.LANES + 9])  # fmt: skip
def test_every_length_counts_to_its_last_byte(digest, count):
    tensor = random_bytes(count)
    before = digest(tensor)
    for at in {0, count // 2, count - 1}:
        tensor[at] ^= 128
        assert digest(tensor) != before, at
        tensor[at] ^= 128


@pytest.mark.parametrize("step", [1, 2, 3, 1000, weights.LANES])
def test_two_values_that_trade_places_are_noticed(digest, step):
    """Also where they differ by their sign only, which is the highest bit of a lane."""
    tensor = of_kind(torch.bfloat16, 3 * weights.LANES)
    tensor[1], tensor[1 + step] = 0.5, -0.5
    before = digest(tensor)
    tensor[1], tensor[1 + step] = -0.5, 0.5
    assert digest(tensor) != before


def test_two_changed_signs_do_not_cancel_out(digest):
    tensor = torch.ones(200, dtype=torch.float32)
    before = digest(tensor)
    seen = {str(before)}
    for at in range(1, 200):
        tensor[0] = tensor[at] = -1
        seen.add(str(digest(tensor)))
        tensor[at] = 1
    assert len(seen) == 200


def test_how_a_tensor_lies_in_memory_counts_and_gaps_in_it_do_not(digest, monkeypatch):
    monkeypatch.setattr(weights, "COPY_BYTES", 64)
    base = of_kind(torch.float32, 8, 6)
    assert digest(base.t()) != digest(base)
    wide = torch.zeros(8, 20)
    wide[:, 3:9] = base
    with_gaps = wide[:, 3:9]
    before = digest(with_gaps)
    wide[:, 0] = 7
    assert digest(with_gaps) == before
    wide[7, 8] += 1
    assert digest(with_gaps) != before
    cube = torch.arange(4 * 5 * 6.0).view(4, 5, 6)[:, ::2, 1:5]
    before = digest(cube)
    cube[3, 2, 3] += 1
    assert digest(cube) != before


def test_bytes_that_are_not_aligned_are_read(digest):
    raw = random_bytes(103)
    tensor = raw[1:]
    before = digest(tensor)
    raw[0] ^= 1
    assert digest(tensor) == before
    raw[102] ^= 1
    assert digest(tensor) != before


def test_tensors_without_numbers_count_by_shape_and_type():
    found = [
        digest_of([Named("a", [tensor])])
        for tensor in (
            torch.empty(0), torch.empty(0, 3), torch.empty(0, dtype=torch.int8), torch.empty(3, device="meta"),
            torch.tensor(0.0), torch.tensor(1.0), torch.zeros(1),
        )
    ]  # fmt: skip
    assert len(set(found)) == len(found)


def test_an_expanded_and_a_conjugated_tensor_are_read():
    assert digest_of([Named("a", [torch.ones(1).expand(5)])]) != digest_of([Named("a", [torch.zeros(1).expand(5)])])
    number = torch.tensor([1 + 2j])
    assert digest_of([Named("a", [number.conj()])]) == digest_of([Named("a", [torch.tensor([1 - 2j])])])


def test_a_tensor_of_a_wrapping_class_counts_by_what_it_wraps():
    from torch.testing._internal.two_tensor import TwoTensor

    def of(a, b):
        return digest_of([Named("a", [torch.nn.Parameter(TwoTensor(torch.tensor(a), torch.tensor(b)))])])

    assert of([1.0, 2.0], [3.0, 4.0]) == of([1.0, 2.0], [3.0, 4.0])
    assert len({of([1.0, 2.0], [3.0, 4.0]), of([1.0, 2.5], [3.0, 4.0]), of([1.0, 2.0], [3.0, 4.5])}) == 3


def test_a_tensor_that_cannot_be_read_is_named():
    with pytest.raises(UnreadableError, match=r"^a\.weight: "):
        digest_of([Named("a.weight", [torch.eye(3).to_sparse()])])


# -- modules ----------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("amax_history", torch.zeros(4))


def of_model(model):
    return digest_of(tensors_of([model]))


def test_one_changed_value_of_any_parameter_or_buffer_changes_the_digest():
    model = Model()
    before = of_model(model)
    assert of_model(Model()) == before != of_model(Model(seed=1))
    changed = 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "amax" in name:
            continue
        flat = tensor.detach().view(-1)
        for at in (0, -1):
            kept = flat[at].clone()
            flat[at] = torch.nextafter(kept, torch.tensor(9.0))
            assert of_model(model) != before, (name, at)
            flat[at] = kept
            changed += 1
    assert changed == 14
    assert of_model(model) == before


def test_parameters_of_one_size_that_trade_places_are_noticed():
    model = Model()
    before = of_model(model)
    model.layers[0].weight, model.layers[1].weight = model.layers[1].weight, model.layers[0].weight
    assert of_model(model) != before


def test_what_an_engine_has_calibrated_since_its_start_does_not_count():
    model = Model()
    before = of_model(model)
    model.amax_history += 3
    assert of_model(model) == before


def test_only_a_buffer_of_its_own_name_counts_as_calibrated():
    model = torch.nn.Module()
    model.amax_net = torch.nn.Linear(2, 2)
    model.amax_net.register_buffer("table", torch.zeros(2))
    model.weight_amax = torch.nn.Parameter(torch.zeros(2))
    before = of_model(model)
    for tensor in (model.amax_net.weight, model.amax_net.table, model.weight_amax):
        tensor.data.view(-1)[0] += 1
        assert of_model(model) != before
        before = of_model(model)


def test_a_layer_that_an_adapter_wraps_keeps_its_name():
    class Wrapper(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer
            self.lora_a_stacked = (torch.zeros(3),)

    model = Model()
    before = of_model(model)
    model.layers[0] = Wrapper(model.layers[0])
    assert of_model(model) == before


def test_parts_that_lie_at_one_address_one_after_the_other_all_count():
    """As the columns of a packed layer do, which are read some at a time."""

    def parts(*values):
        place = torch.zeros(4)
        for value in values:
            place.fill_(value)
            yield place

    found = {digest_of([Named("a", parts(1, second, 3))]) for second in (1, 2, 3)}
    assert len(found) == 3


def test_tied_weights_are_noticed():
    model = Model()
    model.head.weight = model.embed.weight
    before = of_model(model)
    model.embed.weight.data[0, 0] += 1
    assert of_model(model) != before


def test_the_outermost_modules_of_given_layers_are_found_and_no_others():
    mine, other = Model(), Model(seed=1)
    found = roots([mine.layers[1], mine.embed])
    assert found == [mine]
    assert roots([other.head, mine.head]) == [other, mine]
    lonely = torch.nn.Linear(1, 1)
    assert roots([lonely]) == [lonely]
    everything = roots()
    assert all(any(model is root for root in everything) for model in (mine, other, lonely))
    assert not any(mine.embed is root for root in everything)


# -- agreement --------------------------------------------------------------------------------------------------------


def test_one_digest_of_all_ranks_depends_on_each_of_them_and_their_order():
    def of(*shards):
        return fingerprint(lambda: "own", lambda own: shards)

    assert of("a", "b") == of("a", "b")
    assert len({of("a", "b"), of("b", "a"), of("a", "c"), of("a"), of("a", "a")}) == 5


def test_a_rank_that_cannot_read_its_weights_tells_the_others():
    told = []

    def read():
        raise UnreadableError("layer 3 is hidden")

    with pytest.raises(UnreadableError, match="layer 3 is hidden"):
        fingerprint(read, lambda own: told.append(own) or [own, "b"])
    assert told == [""]
    with pytest.raises(UnreadableError, match="rank 1 cannot read its weights"):
        fingerprint(lambda: "a", lambda own: [own, ""])

    def lost(own):
        raise TimeoutError("rank 1 did not come")

    with pytest.raises(UnreadableError, match="exchange of digests failed: TimeoutError: rank 1 did not come"):
        fingerprint(lambda: "a", lost)


@pytest.fixture
def world(monkeypatch):
    """Ranks as threads, over a real store. Each calls gather_in_world as a process would."""
    store, place = torch.distributed.HashStore(), threading.local()
    monkeypatch.setattr(weights, "_meetings", {"weights": iter([0] * 8), "packing": iter([0] * 8)})
    monkeypatch.setattr(weights.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(weights.dist, "get_rank", lambda: place.rank)
    monkeypatch.setattr(weights.dist.distributed_c10d, "_get_default_store", lambda: store)

    def run(shards, ranks, seconds=30.0, topic="weights"):
        monkeypatch.setattr(weights.dist, "get_world_size", lambda: ranks)
        found = {}

        def call(rank, shard):
            place.rank = rank
            try:
                found[rank] = gather_in_world(shard, seconds, topic)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=call, args=pair) for pair in shards.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    return run


def test_every_rank_hears_of_all_digests_in_the_order_of_ranks(world):
    assert world({1: "b", 0: "a", 2: ""}, 3) == {rank: ["a", "b", ""] for rank in range(3)}


def test_what_ranks_say_on_one_topic_is_not_taken_for_another(world):
    """One that has failed before it came to the first topic begins with the second."""
    assert isinstance(world({0: "digest"}, 2, seconds=0.2)[0], UnreadableError)
    assert world({0: "", 1: "reason"}, 2, topic="packing") == {rank: ["", "reason"] for rank in range(2)}


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(world):
    found = world({0: "a"}, 2, seconds=0.2)
    assert isinstance(found[0], Exception)


def test_a_rank_that_comes_late_hears_that_another_has_stopped_waiting(world):
    """Else this one would go on with a cache that the other has given up."""
    assert isinstance(world({0: "a"}, 2, seconds=0.2)[0], UnreadableError)
    late = world({1: "b"}, 2)[1]
    assert isinstance(late, UnreadableError)
    assert str(late) == "another rank stopped waiting"


def test_a_rank_that_stops_waiting_as_the_last_one_comes_goes_by_what_the_others_found(world, monkeypatch):
    for meeting in range(20):
        monkeypatch.setattr(weights, "_meetings", {"weights": iter([meeting] * 2)})
        found = world({0: "a", 1: "b"}, 2, seconds=0.001)
        assert len({isinstance(each, Exception) for each in found.values()}) == 1, found


def test_a_single_rank_exchanges_nothing():
    assert gather_in_world("a") == ["a"]
