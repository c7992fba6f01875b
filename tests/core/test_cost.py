"""Load or recompute, with numbers that were measured: an H200 behind PCIe 5, and a CPU engine."""

import pytest

from kvbm.core.cost import (
    ALONE,
    CAUTION,
    FORCED,
    NEVER,
    NO_TIME_TO_WAIT,
    NOTHING_FOUND,
    OUTSIDE,
    RECOMPUTE,
    SHORT,
    SLOW_TIER,
    CostModel,
    Rate,
)
from kvbm.core.match import Match, Run
from tiernames import DISK, HOST, OBJECT, PRIORS

# Qwen3-8B in bf16: 36 layers of 64 KiB a block of 16 tokens.
BLOCK = 36 * (64 << 10)
PROMPT = 32_768
WHOLE = PROMPT // 16 - 1  # the last block is left to compute


def match(*runs: tuple[str, int]) -> Match:
    return Match(0, [Run(tier, list(range(blocks))) for tier, blocks in runs], False, [])


def taught(model: CostModel, *, step: float, prefill: list[tuple[int, float, int]], **gigabytes: float) -> CostModel:
    """A model that has seen enough for its priors to be forgotten."""
    for _ in range(30):
        model.observe_step(step)
    for _ in range(30):
        for tokens, seconds, computed in prefill:
            model.observe_prefill(tokens, seconds, computed)
        for tier, rate in gigabytes.items():
            model.observe_load(tier.lower(), 4_830_000_000, 4.83 / rate)
    return model


def h200(mode="auto", **gigabytes: float) -> CostModel:
    """32k tokens in 1.3 s, four steps of 8k; a decoding step takes 10 ms."""
    # Shares of the four steps as attention makes them: what the model below is told, in the proportions it expects.
    prefill = [(8192, 1.305 * share, 8192 * i) for i, share in enumerate((0.155, 0.217, 0.282, 0.346))]
    model = CostModel(PRIORS, step_tokens=8192, attention_span=4 * 4096, mode=mode)
    return taught(model, step=0.010, prefill=prefill, **(gigabytes or {"HOST": 51, "DISK": 2.9}))


def decide(model: CostModel, *runs: tuple[str, int], others: bool = False, computed: int = 0, prompt: int = PROMPT):
    return model.decide(match(*runs), BLOCK, 16, computed, prompt - computed, others)


# -- an H200 ----------------------------------------------------------------------------------------------------------


def test_a_long_prompt_comes_from_host_memory_in_the_step():
    decision = decide(h200(), (HOST, WHOLE))
    assert decision[:3] == (WHOLE, True, ALONE)
    assert decision.seconds == pytest.approx(0.095, abs=0.002)
    assert decision.recompute_seconds == pytest.approx(1.305, rel=0.03)


def test_while_others_decode_it_comes_outside_of_the_step():
    decision = decide(h200(), (HOST, WHOLE), others=True)
    assert decision[:3] == (WHOLE, False, OUTSIDE)
    assert decision.seconds == pytest.approx(0.115, abs=0.003)


def test_a_short_load_is_not_worth_a_wait_outside():
    assert decide(h200(), (HOST, 30), others=True, prompt=1000)[:3] == (30, True, SHORT)


def test_a_slow_disk_is_refused_whole_and_in_part():
    model = h200()
    for blocks in (1, 16, 256, 1024, WHOLE):
        assert decide(model, (DISK, blocks))[:3] == (0, False, RECOMPUTE)


def test_a_fast_disk_is_taken_outside_of_the_step():
    assert decide(h200(HOST=51, DISK=12), (DISK, WHOLE))[:3] == (WHOLE, False, SLOW_TIER)


def test_of_a_mixed_match_the_part_that_pays_is_taken():
    assert decide(h200(), (HOST, 1024), (DISK, 1023))[:2] == (1024, True)


def test_a_match_that_cannot_be_parted_is_taken_whole_or_not_at_all():
    for host, taken in ((1024, WHOLE), (500, 0)):
        found = match((HOST, host), (DISK, WHOLE - host))
        assert decide(h200(), *((run.tier, len(run.slots)) for run in found.runs)).blocks == host
        assert h200().decide(found, BLOCK, 16, 0, PROMPT, False, whole=True).blocks == taken


def test_a_few_slow_blocks_are_taken_for_what_is_behind_them():
    assert decide(h200(), (HOST, 1000), (DISK, 8), (HOST, 1039))[:2] == (WHOLE, False)


def test_a_match_that_changes_tiers_at_every_block_is_taken_to_its_end():
    runs = [(HOST if i % 2 else DISK, 1) for i in range(WHOLE)]
    assert decide(h200(HOST=51, DISK=12), *runs).blocks == WHOLE
    assert decide(h200(HOST=51, DISK=1), *runs).blocks == 0
    half = decide(h200(), *[(HOST, 1)] * 1000, *[(DISK, 1)] * 1000).blocks
    assert 1000 - 2000 // 64 <= half <= 1000


def test_tiers_count_one_after_the_other():
    model = h200(HOST=12, DISK=12)
    mixed = decide(model, (HOST, 1000), (DISK, 1000), others=True).seconds
    cautious = (CAUTION - 1) * 1000 * BLOCK / 12e9
    assert mixed == pytest.approx(decide(model, (HOST, 2000), others=True).seconds + cautious, abs=0.005)


def test_a_disk_must_be_faster_than_computing_by_more_than_it_varies():
    """Whole prompts of 32k tokens: 1.3 s to compute, and to read at 3.8 GB/s."""
    assert decide(h200(HOST=51, DISK=4.0), (DISK, WHOLE)).blocks == 0
    assert decide(h200(HOST=51, DISK=4.6), (DISK, WHOLE)).blocks == WHOLE


def noisy(factors: tuple[float, ...], rate: float = 4.6) -> CostModel:
    """Loads that take these multiples of what they should, in turn."""
    model = h200(HOST=51, DISK=rate)
    for _ in range(20):
        for factor in factors:
            model.observe_load(DISK, 4_830_000_000, factor * 4.83 / rate)
    return model


def test_a_tier_that_varies_more_must_be_faster_by_more():
    """The mean is the same; a third of the noisy loads take longer than computing does."""
    steady, varied = noisy((1.0, 1.0, 1.0)), noisy((1.3, 1.0, 0.7))
    assert varied.rate(DISK).bytes_per_second == pytest.approx(4.6e9, rel=0.1)
    assert decide(steady, (DISK, WHOLE)).blocks == WHOLE
    assert decide(varied, (DISK, WHOLE)).blocks == 0
    assert decide(noisy((1.3, 1.0, 0.7), rate=12), (DISK, WHOLE)).blocks == WHOLE


def test_a_tier_that_varies_wildly_is_used_where_it_is_clearly_faster():
    assert decide(noisy((4.0, 1.0, 0.2), rate=12), (DISK, WHOLE)).blocks == WHOLE


def test_a_tier_that_varied_for_a_while_is_used_again():
    model = noisy((1.3, 1.0, 0.7))
    for _ in range(20):
        model.observe_load(DISK, 4_830_000_000, 4.83 / 4.6)
    assert decide(model, (DISK, WHOLE)).blocks == WHOLE


def test_a_request_does_not_wait_for_the_answer_of_a_tier_that_varies():
    size = WHOLE * BLOCK
    assert h200(HOST=51, DISK=4.6).is_worth_asking(DISK, 0.001, size, 0, PROMPT)
    assert not noisy((1.3, 1.0, 0.7)).is_worth_asking(DISK, 0.001, size, 0, PROMPT)


def test_a_simulation_with_the_prices_of_a_tier_that_varies_decides_the_same():
    model, other = noisy((1.3, 1.0, 0.7), rate=12), noisy((0.2, 3.0))
    other.assume(model.prices)
    for blocks in range(100, WHOLE, 100):
        assert decide(other, (HOST, 50), (DISK, blocks)) == decide(model, (HOST, 50), (DISK, blocks))


def test_a_simulation_knows_the_price_of_a_read():
    model, other = grouped(), grouped(each=1e-4)
    other.assume(model.prices)
    for blocks in range(1, GROUPED):
        request = found((blocks, True)), SMALL, 32, 0, 1024, False
        assert other.decide(*request) == model.decide(*request)


def test_only_what_is_computed_in_that_step_hides_a_load():
    """0.5 s to load half a prompt, 0.5 s to compute the other half: in one step under each other, in many hardly."""
    seconds = {}
    for step_tokens in (1024, 65_536):
        model = taught(CostModel(PRIORS, step_tokens=step_tokens), step=0.01, prefill=[(8192, 0.26, 0)], HOST=4.83)
        seconds[step_tokens] = decide(model, (HOST, 1024)).seconds
    assert seconds[65_536] == pytest.approx(0.51, abs=0.02)
    assert seconds[1024] == pytest.approx(0.98, abs=0.02)


def test_a_slow_front_is_not_taken_for_little_behind_it():
    assert decide(h200(), (DISK, 1500), (HOST, 100)).blocks == 0


def test_later_tokens_are_worth_more():
    """At 3.8 GB/s the disk beats the computation of a prompt's second half, and not of its first."""
    model = h200(HOST=51, DISK=3.8)
    assert decide(model, (DISK, 1000), prompt=16_384).blocks == 0
    assert decide(model, (DISK, 1000), computed=16_384).blocks == 1000


def test_where_a_wait_outside_would_not_pay_the_step_is_the_better_place():
    """A small model, which computes 300,000 tokens a second: a load of 1 ms is neither short nor worth a step."""
    model = taught(CostModel(PRIORS), step=0.004, prefill=[(8192, 8192 / 3e5 + 0.004, 0)], HOST=51)
    decision = model.decide(match((HOST, 64)), 1 << 20, 16, 0, 2000, others_running=True)
    assert decision[:3] == (64, True, NO_TIME_TO_WAIT)


def test_a_load_that_no_layer_waits_for_adds_to_the_step():
    hidden, in_front = CostModel(PRIORS, layers_from=1), CostModel(PRIORS, layers_from=100)
    for model in (hidden, in_front):
        taught(model, step=0.010, prefill=[(8192, 0.3, 0)], HOST=1)
    assert model.compute_seconds(0, 170) < 0.02
    arguments = (match((HOST, 10)), 800_000, 16, 0, 170, False)  # 8 ms to load, 6 to compute
    assert hidden.decide(*arguments)[:2] == (10, True)
    assert in_front.decide(*arguments)[:3] == (0, False, RECOMPUTE)


# -- a CPU engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(
    "runs", [[(HOST, 15)], [(DISK, 15)], [(OBJECT, 15)], [(HOST, 4), (DISK, 1), (HOST, 5), (OBJECT, 5)], [(OBJECT, 1)]]
)
def test_a_slow_engine_takes_everything(runs, others):
    """150 tokens a second; the slowest store brings a block of 128 tokens in 0.2 s."""
    model = CostModel(PRIORS, step_tokens=2048, attention_span=4 * 576)
    taught(model, step=0.05, prefill=[(128, 0.9, 0)], HOST=3, DISK=0.4, OBJECT=0.03)
    decision = model.decide(match(*runs), 5_900_000, 128, 0, 2048, others)
    assert decision.blocks == sum(blocks for _, blocks in runs)


# -- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "in_step"), [("sync", True), ("async", False)])
@pytest.mark.parametrize("others", [False, True])
def test_a_forced_mode_decides_where(mode, in_step, others):
    assert decide(h200(mode), (HOST, WHOLE), others=others)[:3] == (WHOLE, in_step, FORCED)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_mode_brings_a_slower_tier_into_the_step(mode):
    assert decide(h200(mode, HOST=51, DISK=12), (DISK, WHOLE))[:3] == (WHOLE, False, SLOW_TIER)
    assert decide(h200(mode, HOST=51, DISK=12), (HOST, 1), (DISK, WHOLE - 1))[:3] == (WHOLE, False, SLOW_TIER)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_forced_mode_does_not_force_a_slow_load(mode):
    assert decide(h200(mode), (DISK, WHOLE)).reason == RECOMPUTE


def test_a_forced_load_is_taken_whole_and_where_it_belongs():
    model = CostModel(PRIORS, load="always")
    taught(model, step=0.010, prefill=[(8192, 0.3, 0)], HOST=51, DISK=0.01)
    assert decide(model, (DISK, WHOLE))[:3] == (WHOLE, False, SLOW_TIER)
    assert decide(model, (HOST, 3), (DISK, 1), (HOST, 2))[:3] == (6, False, SLOW_TIER)
    assert decide(model, (HOST, WHOLE))[:3] == (WHOLE, True, ALONE)
    assert decide(model, (HOST, WHOLE), others=True)[:3] == (WHOLE, False, OUTSIDE)
    assert decide(model)[:3] == (0, False, NOTHING_FOUND)


def test_a_forbidden_load_is_never_taken():
    model = CostModel(PRIORS, load="never")
    for tier in (HOST, DISK, OBJECT):
        assert decide(model, (tier, WHOLE))[:3] == (0, False, NEVER)
    assert decide(model).reason == NOTHING_FOUND


def test_nothing_found():
    assert decide(h200())[:3] == (0, False, NOTHING_FOUND)


# -- learning ---------------------------------------------------------------------------------------------------------


def test_what_nothing_is_known_of_is_tried():
    model = CostModel(PRIORS)
    for tier in (HOST, DISK, OBJECT):
        assert decide(model, (tier, WHOLE)).blocks == (0 if tier is OBJECT else WHOLE)


def test_rates_measured_at_start_replace_the_priors():
    model = CostModel({**PRIORS, DISK: Rate(0.1e9, 0.01)})
    assert model.rate(DISK) == pytest.approx((0.1e9, 0.01))
    assert decide(model, (DISK, WHOLE)).blocks == 0
    assert decide(model, (HOST, WHOLE)).blocks == WHOLE


def test_a_measurement_at_start_counts_like_one_load():
    model = CostModel(PRIORS)
    model.start_from(DISK, Rate(0.5e9, 0.001))
    assert decide(model, (DISK, WHOLE)).blocks == 0
    for _ in range(20):
        model.observe_load(DISK, 4_830_000_000, 0.1)
    assert decide(model, (DISK, WHOLE)).blocks == WHOLE


def test_large_loads_teach_the_bandwidth_and_small_ones_the_fixed_part():
    model = CostModel(PRIORS)
    for _ in range(60):
        model.observe_load(DISK, 16_000_000, 0.004 + 0.008)
        model.observe_load(DISK, 4096, 0.004)
    assert model.rate(DISK) == pytest.approx((2e9, 0.004), rel=0.02)


GROUPED, SMALL = 31, 64 << 10  # blocks of a prompt, and bytes of a block


def grouped(seconds=0.009, each=0.001, loads=30) -> CostModel:
    """An engine that computes 1,024 tokens in 27 ms. It has loaded 31 small blocks out of one object, and out of 31."""
    model = cpu_engine()
    model.start_from(OBJECT, Rate(0.4e9, 0.002))
    for _ in range(loads):
        model.observe_load(OBJECT, GROUPED * SMALL, seconds)
        model.observe_load(OBJECT, 0, 0.002 + GROUPED * each, alone=GROUPED)
    return model


def found(*runs: tuple[int, bool]) -> Match:
    return Match(0, [Run(OBJECT, list(range(blocks)), alone) for blocks, alone in runs], False, [])


def test_blocks_that_take_a_read_each_are_loaded_only_where_that_is_faster():
    model = grouped()
    assert model.decide(found((GROUPED, False)), SMALL, 32, 0, 1024, False).blocks == GROUPED
    assert model.decide(found((GROUPED, True)), SMALL, 32, 0, 1024, False).blocks == 0
    assert grouped(each=1e-4).decide(found((GROUPED, True)), SMALL, 32, 0, 1024, False).blocks == GROUPED
    assert model.load_seconds(OBJECT, GROUPED * SMALL) == pytest.approx(0.009, rel=0.1), "they teach it apart"
    assert model.load_seconds(OBJECT, 0, GROUPED) == pytest.approx(0.033, rel=0.1)


def test_the_first_load_of_many_reads_shows_what_a_read_costs():
    model = cpu_engine()
    model.start_from(OBJECT, Rate(0.4e9, 0.002))
    loads = 0
    while model.decide(found((GROUPED, True)), SMALL, 32, 0, 1024, False).blocks:
        model.observe_load(OBJECT, 0, 0.033, alone=GROUPED)
        loads += 1
    assert 1 <= loads <= 3
    assert model.decide(found((GROUPED, False)), SMALL, 32, 0, 1024, False).blocks == GROUPED


def test_what_comes_in_one_read_is_loaded_and_what_takes_a_read_each_is_computed():
    assert grouped().decide(found((GROUPED, False), (16, True)), SMALL, 32, 0, 1536, False).blocks == GROUPED


def test_one_outlier_does_not_change_the_picture():
    model = h200()
    model.observe_load(HOST, 4_830_000_000, 2.0)
    assert decide(model, (HOST, WHOLE)).blocks == WHOLE


@pytest.mark.parametrize("seconds", [0.5, 10.0, 1e4])
def test_a_first_load_that_waits_for_something_else_does_not_shut_the_host_tier(seconds):
    """A kernel is compiled, the machine swaps: whatever it was, it says nothing about host memory."""
    for blocks in (1, 64, WHOLE):
        model = CostModel(PRIORS, step_tokens=8192, attention_span=4 * 4096)
        model.observe_load(HOST, blocks * BLOCK, seconds)
        assert decide(model, (HOST, WHOLE)).blocks == WHOLE
        assert decide(model, (HOST, 16), prompt=300).blocks == 16
        assert decide(model, (HOST, WHOLE), others=True).blocks == WHOLE


def test_a_first_step_that_took_forever_does_not_shut_the_host_tier():
    model = CostModel(PRIORS, step_tokens=8192, attention_span=4 * 4096)
    model.observe_step(20.0)
    model.observe_prefill(8192, 0.05)
    assert decide(model, (HOST, 64), prompt=1100).blocks == 64


def test_a_tier_that_is_slow_is_found_out_by_a_few_loads():
    model = h200(HOST=51, DISK=12)
    loads = 0
    while decide(model, (DISK, WHOLE)).blocks:
        model.observe_load(DISK, WHOLE * BLOCK, WHOLE * BLOCK / 0.4e9)
        loads += 1
    assert loads <= 6


def test_a_tier_that_was_slow_for_a_while_is_tried_again():
    model = h200(HOST=51, DISK=12)
    for _ in range(10):
        model.observe_load(DISK, 4_830_000_000, 8.0)
    assert decide(model, (DISK, WHOLE)).blocks == 0
    for _refusals in range(2000):
        if decide(model, (DISK, WHOLE)).blocks:
            break
        model.observe_refusal(match((DISK, WHOLE)))
    assert 50 < _refusals < 1500
    assert model.rate(HOST).bytes_per_second == pytest.approx(51e9, rel=0.01)


def test_a_tier_whose_prior_is_too_slow_stays_refused():
    model = h200()
    for _ in range(3000):
        model.observe_refusal(match((OBJECT, WHOLE)))
    assert decide(model, (OBJECT, WHOLE)).blocks == 0


def test_a_step_that_hardly_took_longer_with_a_prompt_in_it_shows_how_cheap_that_was():
    """A tiny model: 4,096 tokens in 1.5 times what a decoding step takes cost at most a step, whatever was believed."""
    model = CostModel(PRIORS)
    for _ in range(40):
        model.observe_step(0.002)
        model.observe_prefill(4096, 0.003)
    assert model.prefill_tokens_per_second == pytest.approx(4096 / 0.002, rel=0.1)


def test_a_step_with_few_prompt_tokens_teaches_nothing_about_prompts():
    model = h200()
    before = model.prefill_tokens_per_second
    for _ in range(100):
        model.observe_prefill(17, 0.012, 32_000)
    assert model.prefill_tokens_per_second == before


def cpu_engine() -> CostModel:
    """1,024 tokens in 27 ms, a decoding step in 6."""
    model = CostModel(PRIORS, step_tokens=8192, attention_span=4 * 4096)
    return taught(model, step=0.006, prefill=[(1024, 0.027, 0)])


def test_interrupted_steps_of_requests_that_load_all_but_a_block_do_not_make_computing_look_expensive():
    """Every tenth step takes three times as long, because another program had the core."""
    model = cpu_engine()
    before = model.compute_seconds(0, 1024)
    for i in range(1000):
        model.observe_prefill(32, 0.007 * (1 if i % 10 else 3), 992)
    assert model.compute_seconds(0, 1024) == pytest.approx(before, rel=0.15)


def test_an_engine_that_has_become_slower_is_found_out_by_whole_prompts_and_by_short_ones_in_the_end():
    for tokens, most in ((1024, 10), (600, 40), (200, 400)):
        model = cpu_engine()
        prompts = 0
        while model.compute_seconds(0, 1024) < 0.8 * (0.006 + 4 * 0.021) and prompts <= most:
            model.observe_prefill(tokens, 0.006 + max(0.006, 4 * 0.021 * tokens / 1024), 0)
            prompts += 1
        assert prompts <= most, tokens


def test_an_engine_whose_prompts_are_all_short_is_measured_by_them():
    model = CostModel(PRIORS, step_tokens=8192)
    for _ in range(10):
        model.observe_step(0.001)
        model.observe_prefill(32, 0.001 + 32 * 1e-3)
    assert model.prefill_tokens_per_second == pytest.approx(1000, rel=0.3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_ignored(seconds):
    model = CostModel(PRIORS)
    before = (model.rate(HOST), model.step_seconds, model.prefill_tokens_per_second)
    model.observe_load(HOST, 1 << 30, seconds)
    model.observe_load(HOST, 0, 1.0)
    model.observe_prefill(8192, seconds)
    model.observe_prefill(0, 1.0)
    model.observe_step(seconds)
    assert (model.rate(HOST), model.step_seconds, model.prefill_tokens_per_second) == before


@pytest.mark.parametrize(
    "wrong",
    [{"step_tokens": 0}, {"attention_span": 0}, {"attention_span": float("nan")}, {"priors": {HOST: Rate(0, 0)}}],
)
def test_impossible_numbers_are_refused_at_once(wrong):
    with pytest.raises(ValueError):
        CostModel(**{"priors": PRIORS, **wrong})
