"""Load or recompute: loads as much of a match as is expected to come back sooner than the engine would compute it.

The leader's thread owns a :class:`CostModel` and tells it how long things took; the model has no clock of its own::

    observe_load     when a load is over on every rank: how much of one rank, seconds of the slowest. Loads of one tier
                     only; 0 seconds (the copier does not know) are ignored
    observe_prefill  after a step that computed prompt tokens
    observe_step     after a step that only decoded
    decide           when a request's match is known, before its blocks are allocated; changes nothing, so it may be
                     asked again
    observe_refusal  once for each request whose match was refused

The model expects, in seconds:

- *Loading* costs the fixed seconds of each tier that is touched, once, and its seconds a byte. Tiers count one after
  the other: reading a slow tier while the bus is busy would be faster, so this errs on the side of recomputing. Blocks
  that take a read of their own where others come several in one (``Run.alone``) cost seconds a block instead.
- *Computing* costs a step, and a price for every token that grows with its position, because attention reads all that
  came before. A layer of width h has about 12 h² weights, two operations each, and attention 4 h operations for each
  token of context: they are equal at a context of 6 h, and at about 4 h in time, as attention kernels reach two thirds
  of the speed of matrix products. So a token at position p costs ``1 + p / (4 h)`` times the first one; with h = 4,096
  the last 8k of 32k tokens cost 2.2 times the first 8k. One rate for all of them, learned from long prompts, would load
  short prefixes that are sooner computed.
- *In the step*, blocks of the near tier come layer by layer under the forward pass: the longer of the load and the
  computation of that step. Where layers cannot wait for their own blocks it is the sum.
- *Outside of the step* the request waits for the load and then about one step until it is scheduled again. Other
  requests do not wait.

A load goes into the step when no other request is running or when the load is short (``HOLD_UP`` of a step). Otherwise
it stays outside, unless waiting there would cost more than recomputing: then the step is the better place for all
requests, because recomputing would make it longer still. Staged tiers always stay outside: a slow tier may cost a hit,
not a step. ``sync`` and ``async`` force the place of near blocks, never the load; ``always`` and ``never`` force the
load at any cost, and leave its place to the model.

Consecutive blocks in one tier are taken together or not at all, up to the end of such a run that is best for the
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Literal, NamedTuple

from kvbm.core.match import Match
from kvbm.core.rate import Rate
from kvbm.plans import TierName

Mode = Literal["auto", "sync", "async"]
Load = Literal["auto", "always", "never"]

# The longest load, as a part of a step, that goes into a step with other requests: even if none of it is hidden under
# the computation, their tokens come at most this much later.
HOLD_UP = 0.2

# Staged tiers are expected to take at least so many times what they took so far: they vary, and a load that turns out
# slower than computing is worse than one that was not taken.
CAUTION = 1.15
# And what they took so far plus so many mean deviations, as far as loads have shown how much they vary: in normal noise
# one load in a hundred takes longer. TCP waits four for a packet. Up to a bound: loads that are under way together take
# longer than alone, and so would computing them.
MAX_DEVIATIONS = 3.0
MAX_CAUTION = 1.5

# Ends of runs at which a load may stop. Looking at one takes 2.5 µs, and a prefix may change tiers at every block.
_MAX_ENDS = 64

# A request waits for a staged tier that delivers nothing no longer than so many times the seconds that are expected of
# it. Estimates of milliseconds are not exact enough to give up earlier than after the least.
MAX_LATENESS = 4.0
MIN_PATIENCE_SECONDS = 0.1

# A prior counts as one observation. Later ones count for at least this much, so that about the last ten matter.
_MIN_WEIGHT = 0.2
# A sample is limited to this many times the present estimate, or this part of it. A first load that waits for a kernel
# to be compiled, or a step in which the machine did other work, is noise; a tier that is really slow is slow again.
_MAX_OUTLIER = 4.0
# How fast the longest step is forgotten, with every step that computes prompts.
_SHRINK = 0.9998
# How far a refusal moves a tier's estimate back to its prior: a disk that was slow once is tried again after a hundred
# refusals or so, and a disk that is always slow costs one request in a hundred some time.
_FORGET = 1 / 256
# Reads that are under way at a time, until a block that takes a read of its own is measured: so many share the fixed
# seconds.
_READS_AT_ONCE = 8

NOTHING_FOUND = "nothing found"
RECOMPUTE = "recomputing is faster"
ALONE = "loaded in the step (no other requests running)"
SHORT = "loaded in the step (short)"
NO_TIME_TO_WAIT = "loaded in the step (waiting outside would take longer)"
OUTSIDE = "loaded outside of the step (other requests running)"
SLOW_TIER = "loaded outside of the step (not from host memory alone)"
FORCED = "as configured"
NEVER = "configured never to load"


PRIOR_TOKENS_PER_SECOND = 10_000.0
PRIOR_STEP_SECONDS = 0.02


class Decision(NamedTuple):
    """What to do with a match."""

    blocks: int  # how many of the match's first blocks to load; 0: compute everything
    in_step: bool
    reason: str  # one of the few sentences above, so that it can be counted
    seconds: float  # expected until the prompt is computed, if this is done
    recompute_seconds: float  # the same if nothing is loaded; never less than ``seconds`` unless the load is forced
    others_running: bool = False  # as the caller said


class Amount(NamedTuple):
    """How much one rank loads from one tier."""

    size: int = 0  # bytes of the blocks that take no read of their own
    alone: int = 0  # blocks that do

    def plus(self, blocks: int, block_bytes: int, alone: bool) -> Amount:
        return Amount(self.size, self.alone + blocks) if alone else Amount(self.size + blocks * block_bytes, self.alone)


class TierPrices(NamedTuple):
    byte: float
    fixed: float  # of a load whatever its size
    alone: float = 0.0  # of a block that takes a read of its own


class Prices(NamedTuple):
    """All estimates of a cost model, in seconds: equal prices give equal decisions. Those of staged tiers include how
    much more they vary than all are expected to."""

    step: float
    token: float  # at position 0
    tiers: dict[TierName, TierPrices]


class Terms(NamedTuple):
    """The engine's terms, which never change; None stands for infinity, which JSON does not have."""

    step_tokens: int
    layers_from: float | None
    attention_span: float | None


class CostModel:
    """Not thread-safe, like all of ``core``.

    ``step_tokens``: the most tokens that the engine computes in a step. ``layers_from``: the fewest tokens that a
    request must have left to compute for its load to come layer by layer; infinite where layers cannot wait.
    ``attention_span``: the position at which a token costs twice what the first one does, about four times the model's
    hidden size; infinite takes all for equal. ``priors``: the rate of each tier until it is measured, the near tier
    first. Rather too fast than too slow: a tier that is never tried is never measured. ``tokens_per_second``: the speed
    of prefill until it is measured.
    """

    def __init__(
        self,
        priors: Mapping[TierName, Rate],
        step_tokens: int = 8192,
        layers_from: float = 1,
        attention_span: float = inf,
        mode: Mode = "auto",
        load: Load = "auto",
        tokens_per_second: float = PRIOR_TOKENS_PER_SECOND,
    ) -> None:
        if step_tokens < 1 or not attention_span > 0:
            raise ValueError(f"step_tokens={step_tokens} and attention_span={attention_span} must both be positive")
        self._step_tokens = step_tokens
        self._layers_from = layers_from
        self._span = attention_span
        self._mode: Mode = mode
        self._load: Load = load
        self._tiers = {tier: _TierRate(rate) for tier, rate in priors.items()}
        self._near = next(iter(priors))
        self._token = _Average(1 / tokens_per_second)  # seconds of a token at position 0
        self._step = _Average(PRIOR_STEP_SECONDS)
        self._most_work = 0.0  # of a step, of the last thousands: see observe_prefill

    # -- measurements -------------------------------------------------------------------------------------------------

    def start_from(self, tier: TierName, rate: Rate) -> None:
        """Take a measurement at start in place of the prior. It counts as one load."""
        self._tiers[tier] = _TierRate(rate)

    def observe_load(self, tier: TierName, size: int, seconds: float, alone: int = 0) -> None:
        """A load of ``size`` bytes and of ``alone`` blocks with a read of their own, all of one tier, took this long.
        Of one rank, as in :meth:`decide`."""
        if (size > 0 or alone > 0) and 0 < seconds < inf:
            self._tiers[tier].observe(Amount(size, alone), seconds)

    def observe_prefill(self, tokens: int, seconds: float, computed_tokens: int = 0) -> None:
        """A step computed ``tokens`` prompt tokens that came after ``computed_tokens`` others.

        With several prompts in the step: their tokens together, their computed tokens on average. A step that hardly
        took longer than one which only decodes bounds the price of its tokens from above, and does not give it.

        A step is never exactly as long as the last, and the fewer tokens it computes, the more of that difference each
        of them seems to cost. So a short step counts for little beside longer ones, by the square of its work as in a
        least-squares fit. Otherwise requests that load all but one block, and whose steps are interrupted now and then,
        would make computing look ever more expensive.
        """
        step = self._step.value
        if not tokens > 0 or not 0 < seconds < inf:
            return
        work = self._work(computed_tokens, tokens)
        self._most_work = max(work, self._most_work * _SHRINK)
        at_most = max(seconds - step, step) / work
        if at_most < self._token.value:
            self._token.observe(at_most)
        elif seconds >= 2 * step:
            self._token.observe(at_most, (work / self._most_work) ** 2)

    def observe_step(self, seconds: float) -> None:
        """A step that only decoded took this long."""
        if 0 < seconds < inf:
            self._step.observe(seconds)

    def observe_refusal(self, match: Match) -> None:
        """A request goes without this match. The estimates of its tiers age, so that a slow tier is tried again."""
        for tier in {run.tier for run in match.runs}:
            self._tiers[tier].forget()

    def assume(self, prices: Prices) -> None:
        """Take these estimates in place of the present ones, for a simulation."""
        self._step.value, self._token.value = prices.step, prices.token
        for tier, (byte, fixed, alone) in prices.tiers.items():
            if (known := self._tiers.get(tier)) is not None:
                known.byte.value, known.fixed.value, known.alone.value = byte, fixed, alone
                known.deviation.value = 0.0

    # -- expectations -------------------------------------------------------------------------------------------------

    def rate(self, tier: TierName) -> Rate:
        """The present estimate."""
        known = self._tiers[tier]
        return Rate(1 / known.byte.value, known.fixed.value)

    @property
    def terms(self) -> Terms:
        finite = (None if value == inf else value for value in (self._layers_from, self._span))
        return Terms(self._step_tokens, *finite)

    @property
    def prices(self) -> Prices:
        tiers = {tier: known.prices(tier == self._near) for tier, known in self._tiers.items()}
        return Prices(self._step.value, self._token.value, tiers)

    def load_seconds(self, tier: TierName, size: int, alone: int = 0) -> float:
        """To load ``size`` bytes and ``alone`` blocks with a read of their own, of one rank."""
        return self._tiers[tier].seconds(Amount(size, alone))

    def patience_seconds(self, tier: TierName, size: int, alone: int = 0) -> float:
        """How long a request waits for so much of a staged tier while none of it comes."""
        return max(MIN_PATIENCE_SECONDS, MAX_LATENESS * self.load_seconds(tier, size, alone))

    def is_measured(self, tier: TierName) -> bool:
        """Whether :meth:`rate` comes from loads that were seen."""
        return self._tiers[tier].is_measured

    @property
    def prefill_is_measured(self) -> bool:
        return self._token.count > 1

    def prefill_seconds(self, computed_tokens: int, tokens: int) -> float:
        """What ``tokens`` that come after ``computed_tokens`` others add to the steps they are computed in."""
        return self._token.value * self._work(computed_tokens, tokens)

    @property
    def step_seconds(self) -> float:
        return self._step.value

    @property
    def prefill_tokens_per_second(self) -> float:
        """Of the first tokens of a prompt; later ones take longer."""
        return 1 / self._token.value

    def compute_seconds(self, computed_tokens: int, tokens: int) -> float:
        """To compute ``tokens`` that come after ``computed_tokens`` others, in one step or several."""
        return self._step.value + self._token.value * self._work(computed_tokens, tokens)

    def is_worth_asking(self, tier: TierName, answer_seconds: float, size: int, computed: int, tokens: int) -> bool:
        """Whether a request gains if it waits for a tier's answer, finds ``size`` bytes there and loads them, beside
        computing ``tokens`` after ``computed`` others."""
        if self._load != "auto":
            return self._load == "always"
        loaded = answer_seconds + self._tiers[tier].cautious_seconds(Amount(size)) + self._step.value
        return loaded < self.compute_seconds(computed, tokens)

    def decide(
        self,
        match: Match,
        block_bytes: int,
        block_size: int,
        computed_tokens: int,
        remaining_tokens: int,
        others_running: bool,
        whole: bool = False,
    ) -> Decision:
        """How much of a match to load, and where.

        ``block_bytes`` and ``block_size`` are bytes (on one rank) and tokens of a block. ``computed_tokens`` are on the
        device already: those before the match. ``remaining_tokens`` are all after them, the match included: the engine
        computes them if nothing is loaded. ``whole``: load the whole match or nothing.
        """
        recompute = self.compute_seconds(computed_tokens, remaining_tokens)
        best = Decision(0, False, RECOMPUTE if match.runs else NOTHING_FOUND, recompute, recompute, others_running)
        if self._load == "never" and match.runs:
            return best._replace(reason=NEVER)
        amounts: dict[TierName, Amount] = {}
        blocks = 0
        every = -(-len(match.runs) // _MAX_ENDS)
        for left, (tier, slots, alone) in zip(range(len(match.runs) - 1, -1, -1), match.runs, strict=True):
            blocks += len(slots)
            amounts[tier] = amounts.get(tier, Amount()).plus(len(slots), block_bytes, alone)
            if left % every or (whole and left):
                continue
            loaded = blocks * block_size
            rest = max(remaining_tokens - loaded, 0)
            in_step, reason, seconds = self._place(amounts, computed_tokens + loaded, rest, others_running, recompute)
            if seconds < best.seconds if self._load == "auto" else not left:
                best = Decision(blocks, in_step, reason, seconds, recompute, others_running)
        return best

    def _place(
        self, amounts: Mapping[TierName, Amount], computed: int, rest: int, others_running: bool, recompute: float
    ) -> tuple[bool, str, float]:
        """(in the step, why, expected seconds) of a load that leaves ``rest`` tokens behind ``computed`` ones."""
        near = self._tiers[self._near].seconds(amounts.get(self._near, Amount()))
        slow = sum(self._tiers[tier].cautious_seconds(amount) for tier, amount in amounts.items() if tier != self._near)
        outside = near + slow + self._step.value + self.compute_seconds(computed, rest)
        # Only this step's share of the rest is computed while the layers come in.
        now = min(rest, self._step_tokens)
        step = self.compute_seconds(computed, now)
        later = self._token.value * self._work(computed + now, rest - now)
        inside = (max(near, step) if rest >= self._layers_from else near + step) + later
        if slow:
            return False, SLOW_TIER, outside
        if self._mode != "auto":
            return (True, FORCED, inside) if self._mode == "sync" else (False, FORCED, outside)
        if not others_running:
            return True, ALONE, inside
        if near <= HOLD_UP * self._step.value:
            return True, SHORT, inside
        if outside < recompute:
            return False, OUTSIDE, outside
        return True, NO_TIME_TO_WAIT, inside

    def _work(self, computed: int, tokens: int) -> float:
        """What ``tokens`` after ``computed`` others cost, counted in tokens at position 0."""
        return tokens * (1 + (computed + tokens / 2) / self._span)


class _Average:
    """An estimate that follows the samples: at first the mean of all, later of the last few; never in leaps."""

    __slots__ = ("count", "prior", "value")

    def __init__(self, prior: float) -> None:
        self.prior = self.value = prior
        self.count = 1

    def observe(self, sample: float, weight: float = 1.0) -> None:
        """``weight``: beside that of others, at most 1."""
        self.count += 1
        if self.value > 0:
            sample = min(max(sample, self.value / _MAX_OUTLIER), self.value * _MAX_OUTLIER)
        self.value += (sample - self.value) * max(1 / self.count, _MIN_WEIGHT) * weight

    def forget(self) -> None:
        """Go back a little towards the prior, if that is the more hopeful number."""
        self.value += min(0.0, self.prior - self.value) * _FORGET


class _TierRate:
    """Fixed seconds, seconds a byte and seconds a block that takes a read of its own, of one tier, told apart by what
    loads consist of; and how far loads are from them: the mean deviation, as a part of what was expected."""

    __slots__ = ("alone", "byte", "deviation", "fixed")

    def __init__(self, prior: Rate) -> None:
        if not (0 < prior.bytes_per_second < inf and 0 <= prior.fixed_seconds < inf):
            raise ValueError(f"{prior} is no rate: expected a bandwidth above 0 and fixed seconds of at least 0")
        self.byte = _Average(1 / prior.bytes_per_second)
        self.fixed = _Average(prior.fixed_seconds)
        self.alone = _Average(prior.fixed_seconds / _READS_AT_ONCE)
        self.deviation = _Average((CAUTION - 1) / MAX_DEVIATIONS)

    def seconds(self, amount: Amount) -> float:
        if not any(amount):
            return 0.0
        return self.fixed.value + amount.size * self.byte.value + amount.alone * self.alone.value

    def cautious_seconds(self, amount: Amount) -> float:
        """What a load hardly ever exceeds."""
        byte, fixed, alone = self.prices()
        return CAUTION * (fixed + amount.size * byte + amount.alone * alone) if any(amount) else 0.0

    def prices(self, is_near: bool = False) -> TierPrices:
        caution = min(max(CAUTION, 1 + MAX_DEVIATIONS * self.deviation.value), MAX_CAUTION)
        more = 1.0 if is_near else caution / CAUTION
        return TierPrices(self.byte.value * more, self.fixed.value * more, self.alone.value * more)

    @property
    def is_measured(self) -> bool:
        return any(each.count > 1 for each in (self.byte, self.fixed, self.alone))

    def observe(self, amount: Amount, seconds: float) -> None:
        expected = self.seconds(amount)
        if self.is_measured and expected:
            self.deviation.observe(abs(seconds / expected - 1))
        # A load teaches what it mostly consists of: a large one the bandwidth, a small one the fixed part, one of many
        # reads the price of each.
        by_size, by_alone = amount.size * self.byte.value, amount.alone * self.alone.value
        if amount.alone and by_alone >= max(by_size, self.fixed.value):
            self.alone.observe(max(seconds - self.fixed.value - by_size, seconds / 2) / amount.alone)
        elif by_size >= self.fixed.value:
            self.byte.observe(max(seconds - self.fixed.value - by_alone, seconds / 2) / amount.size)
        else:
            self.fixed.observe(max(seconds - by_size - by_alone, 0.0))

    def forget(self) -> None:
        for each in (self.byte, self.fixed, self.alone, self.deviation):
            each.forget()
