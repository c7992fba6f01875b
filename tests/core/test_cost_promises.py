"""Whatever has been measured and whatever is found, the cost model keeps its word and does not contradict itself."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.cost import CostModel, Rate
from kvbm.core.match import Match, Run
from tiernames import DISK, HOST, OBJECT

TIERS = (HOST, DISK, OBJECT)

bandwidths = st.floats(1e6, 1e12)
fixed = st.floats(0, 1)
# In the order of the tiers: the near one comes first.
each_rate = st.tuples(*(st.builds(Rate, bandwidths, fixed) for _ in TIERS))
rates = each_rate.map(lambda drawn: dict(zip(TIERS, drawn, strict=True)))
runs = st.lists(st.tuples(st.sampled_from(TIERS), st.integers(1, 3000)), max_size=6)
modes = st.sampled_from(["auto", "sync", "async"])


@st.composite
def settings(draw):
    """What a model is made of and what it has seen, apart from prefills."""
    return {
        "step_tokens": draw(st.integers(1, 100_000)),
        "layers_from": draw(st.sampled_from([1, 100, inf])),
        "attention_span": draw(st.floats(1, 1e6) | st.just(inf)),
        "mode": draw(modes),
        "priors": draw(rates),
    }


@st.composite
def requests(draw):
    """A request and what is found of it: the arguments of decide."""
    found = draw(runs)
    size = draw(st.sampled_from([16, 32, 128]))
    rest = draw(st.integers(1, 100_000))
    tokens = sum(blocks for _, blocks in found) * size
    match = Match(0, [Run(tier, [0] * blocks) for tier, blocks in found], False, [])
    return match, draw(st.integers(1, 1 << 26)), size, draw(st.integers(0, 100_000)), tokens + rest, draw(st.booleans())


def build(settings, step=0.01, token=4e-5):
    """A model that believes exactly this of steps and tokens."""
    model = CostModel(**settings)
    model._step.value, model._token.value = step, token
    return model


seconds = st.floats(1e-4, 1)
tokens = st.floats(1e-7, 1e-1)


@given(settings(), requests(), seconds, tokens)
def test_a_decision_is_never_slower_than_recomputing_by_its_own_estimate(settings, request, step, token):
    model = build(settings, step, token)
    decision = model.decide(*request)
    match = request[0]
    assert 0 <= decision.blocks <= match.blocks
    assert decision.recompute_seconds == model.compute_seconds(request[3], request[4])
    if decision.blocks:
        assert decision.seconds < decision.recompute_seconds
        if any(run.tier is not HOST for run in match.cut(decision.blocks).runs):
            assert not decision.in_step
        elif settings["mode"] != "auto":
            assert decision.in_step is (settings["mode"] == "sync")
    else:
        assert decision.seconds == decision.recompute_seconds
        assert not decision.in_step


@given(settings(), requests(), seconds, tokens)
def test_the_estimate_is_that_of_what_is_taken(settings, request, step, token):
    """Taken whole, the part that was decided on costs what was said, and is taken in the same place."""
    model = build(settings, step, token)
    decision = model.decide(*request)
    match, *rest = request
    whole = model.decide(match.cut(decision.blocks), *rest)
    assert (whole.in_step, whole.seconds) == (decision.in_step, decision.seconds)


@given(settings(), requests(), seconds, tokens)
def test_asking_changes_nothing(settings, request, step, token):
    model = build(settings, step, token)
    assert model.decide(*request) == model.decide(*request)


@given(settings(), requests(), seconds, tokens, st.sampled_from(TIERS), st.floats(1, 1000))
def test_a_faster_tier_never_turns_a_load_into_a_refusal(settings, request, step, token, tier, factor):
    slow = build(settings, step, token).decide(*request)
    old = settings["priors"][tier]
    faster = {**settings["priors"], tier: Rate(old.bytes_per_second * factor, old.fixed_seconds / factor)}
    fast = build({**settings, "priors": faster}, step, token).decide(*request)
    assert fast.blocks > 0 or slow.blocks == 0
    if not request[-1]:  # with others running it may be the slower for their sake
        assert fast.seconds <= slow.seconds * (1 + 1e-9)


@given(settings(), requests(), seconds, tokens, st.floats(1, 1000))
def test_a_faster_engine_never_turns_a_refusal_into_a_load(settings, request, step, token, factor):
    slow = build(settings, step, token).decide(*request)
    fast = build(settings, step, token / factor).decide(*request)
    assert slow.blocks > 0 or fast.blocks == 0


@given(settings(), requests(), seconds, tokens, st.integers(0, 100_000))
def test_the_same_blocks_later_in_a_prompt_are_worth_no_less(settings, request, step, token, further):
    model = build(settings, step, token)
    match, block_bytes, size, computed, remaining, others = request
    here = model.decide(*request)
    there = model.decide(match, block_bytes, size, computed + further, remaining, others)
    assert there.blocks > 0 or here.blocks == 0


@given(settings(), requests(), seconds, tokens, st.integers(1, 3000), st.sampled_from(TIERS))
def test_finding_more_never_costs_time(settings, request, step, token, more, tier):
    model = build(settings, step, token)
    match, block_bytes, size, computed, remaining, others = request
    longer = Match(0, [*match.runs, Run(tier, [0] * more)], False, [])
    remaining += more * size
    before = model.decide(match, block_bytes, size, computed, remaining, others)
    assert model.decide(longer, block_bytes, size, computed, remaining, others).seconds <= before.seconds


observations = st.lists(
    st.tuples(st.sampled_from(TIERS), st.integers(1, 1 << 40), st.floats(1e-9, 1e4))
    | st.tuples(st.just("prefill"), st.integers(1, 100_000), st.floats(1e-9, 1e4))
    | st.tuples(st.just("step"), st.just(0), st.floats(1e-9, 1e4))
    | st.tuples(st.just("refusal"), st.just(0), st.just(0.0)),
    max_size=30,
)


@given(settings(), observations, requests())
def test_no_history_makes_it_break_its_word(settings, history, request):
    model = CostModel(**settings)
    for what, size, took in history:
        if what == "prefill":
            model.observe_prefill(size, took, 100)
        elif what == "step":
            model.observe_step(took)
        elif what == "refusal":
            model.observe_refusal(request[0])
        else:
            model.observe_load(what, size, took)
    for tier in TIERS:
        assert 0 < model.rate(tier).bytes_per_second < inf
        assert 0 <= model.rate(tier).fixed_seconds < inf
    decision = model.decide(*request)
    assert (decision.seconds < decision.recompute_seconds) is (decision.blocks > 0)


@given(st.integers(1, 1 << 40), st.floats(1e-6, 1e3), rates)
def test_what_is_believed_of_a_tier_comes_closer_to_what_is_seen(size, took, rates):
    """After a load the next one like it is expected to take something between what was expected and what it took."""
    model = CostModel(rates)

    def expected():
        rate = model.rate(HOST)
        return rate.fixed_seconds + size / rate.bytes_per_second

    before = expected()
    model.observe_load(HOST, size, took)
    low, high = sorted((before, took))
    assert low * (1 - 1e-9) <= expected() <= high * (1 + 1e-9)
