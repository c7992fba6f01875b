"""The life of a request, by the same rules under every engine that drives a leader.

::

    lookup -> decide -> load    the engine asks what a tier holds of a prompt, and makes room for what it is offered
    completed -> store          a step completes blocks
    finished -> touch           the request has ended

An adapter translates its engine's callbacks, requests and block tables into these calls and the answers back; no type
of an engine comes here. All calls come from the engine's thread, except where a method says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

import kvbm
from kvbm.config import Config, split_shares
from kvbm.core.clock import OperationClock
from kvbm.core.cost import FORCED, MIN_PATIENCE_SECONDS, RECOMPUTE, Amount, CostModel, Decision, Prices
from kvbm.core.counts import Counts, add
from kvbm.core.keys import Key
from kvbm.core.manager import BlockManager
from kvbm.core.match import Match
from kvbm.core.policy import COMMON, NO_HINTS, Turn
from kvbm.engines.guard import Faults
from kvbm.observe.observer import Observer, settings_given
from kvbm.observe.requests import Admission, looked_up
from kvbm.observe.snapshot import ON_DEVICE, SKIPPED, TOO_SHORT, Identity
from kvbm.plans import Hello, LoadPlan, Report, StorePlan, TierName
from kvbm.runtime.leader import Leader
from kvbm.runtime.steps import StepTimes
from kvbm.runtime.tiers import agreed_weights, connect, open_manager
from kvbm.tiers import registry
from kvbm.tiers.base import Fingerprint, Store

logger = logging.getLogger("kvbm")

DYNAMO_SALT = "dynamo-cache-salt:"  # Dynamo puts this in front of a caller's salt

# The reason of a load that the engine allows in no other place.
OUTSIDE_ONLY = "loaded outside of the step (the only place with this engine or model)"


class Lookup(NamedTuple):
    """The result of the last lookup for a request, and the decision."""

    prompt_tokens: int
    device_tokens: int
    outcome: str = ""  # when nothing was looked up
    limit: int = 0  # the lookup asked for blocks up to this one
    found: Match | None = None
    decision: Decision | None = None
    prices: Prices | None = None  # of the decision, if it is recorded


class RequestState:
    """The lifecycle's record of one request. Adapters add what their engine needs."""

    __slots__ = (
        "deadline_seconds", "declined", "found", "in_step", "is_held", "keep", "lookup", "match", "name", "stored",
        "tenant", "turn",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.lookup: Lookup | None = None  # the last one, until the engine admits the request
        self.match: Match | None = None  # offered to the engine, which has not made room for it yet
        self.is_held = False  # the match's slots are pinned
        self.in_step = False  # the offered load happens in the step
        self.deadline_seconds = 0.0  # of a load from a staged tier; 0: none
        self.declined = False  # a refusal of this request has been counted
        self.keep = True  # False: its blocks may depend on KV that is gone or wrong, and are not stored
        self.stored = 0  # blocks from the front that need no store
        self.found: int | None = None  # blocks that it did not have to compute when it was first scheduled
        self.tenant = COMMON  # as tenant_of says
        self.turn = NO_HINTS  # what the caller says of the request


class Completed(NamedTuple):
    """Blocks of a request that a step completes."""

    state: RequestState
    keys: Sequence[Key]  # all of the request
    first: int
    end: int
    computed: int  # tokens, before the step


class Ended(NamedTuple):
    """A request that is over for the engine."""

    name: str
    output_tokens: int
    keys: Sequence[Key]  # of all its full blocks, those of its answer included
    stored: int  # blocks from the front that a tier has, or had
    found: int  # blocks from the front that it did not have to compute
    turn: Turn = NO_HINTS  # what its caller says of it
    tenant: int = COMMON


def _front(keys: Sequence[Key], blocks: int) -> Sequence[Key]:
    return keys[:blocks]


class Session:
    """``engine``: its name in logs. ``step_tokens``: the most tokens that it computes in a step. ``hidden_size`` of the
    model, None if unknown. ``layers_from``: see :class:`CostModel`. ``outside_only``: no load can happen in a step.
    ``used``: which blocks a request uses that has come so far, the front first; None: all of them."""

    def __init__(
        self,
        engine: str,
        config: Config,
        faults: Faults,
        block_size: int,
        step_tokens: int,
        hidden_size: int | None,
        layers_from: float = inf,
        outside_only: bool = False,
        used: Callable[[Sequence[Key], int], Sequence[Key]] | None = None,
    ) -> None:
        self.clock = OperationClock()
        self.leader: Leader | None = None  # until the workers have said how much room they have
        self.counts = Counts()
        self.manager: BlockManager | None = None  # open until :meth:`close`, also after KVBM was disabled
        self.block_bytes = 0  # of the rank that has the most to move
        self.kept_bytes = 0  # of a block, by all ranks together
        self.packed = 1.0  # bytes of a block in a slot, by those in the engine's memory
        self.uses = 0  # requests that found blocks and have ended: edges may have new work
        self.ended: list[Ended] = []  # requests that wait for finalize
        self.cost = CostModel(
            registry.priors(),
            step_tokens=step_tokens,
            layers_from=layers_from,
            attention_span=4 * hidden_size if hidden_size else inf,
            mode="async" if outside_only else config.onboard,
            load=config.load,
        )
        self.steps = StepTimes(self.cost)
        self.observer = Observer(config, faults.counts)
        self._engine = engine
        # The policy for conversations takes a request for a prefix of the next one.
        self._config = config.with_policy("session" if used is None else "lru")
        self._faults = faults
        self.block_size = block_size
        self._outside_only = outside_only
        self._is_shared = False  # ranks with the same KV keep it once
        self._used = used or _front
        self._tenant_names = ["", *split_shares(config.tenant_shares)]
        self._tenants = {name: number for number, name in enumerate(self._tenant_names) if name}

    # -- start and end ------------------------------------------------------------------------------------------------

    def begin(self, hellos: Sequence[Hello], cache: Fingerprint | None, manager: BlockManager | None = None) -> Leader:
        """Every rank has its memory: the leader begins.

        ``cache``: describes the KV for tiers that outlive the engine, all but the weights; None where none may.
        ``manager``: of a simulation, whose tiers have no bytes.
        """
        config = self._config
        sizes = [hello.block_bytes for hello in hellos]
        self.block_bytes = max(sizes)
        self.kept_bytes = round(sum(hello.block_bytes / hello.shared_by for hello in hellos))
        self._is_shared = self.kept_bytes < sum(sizes)
        self.packed = sum(sizes) / sum(hello.raw_bytes or hello.block_bytes for hello in hellos)
        if cache is not None:
            weights = agreed_weights(hellos)
            cache = {**cache, "weights": weights} if weights else None
        self.manager = manager = open_manager(config, hellos, cache) if manager is None else manager
        self.clock = manager.clock
        log, pending = self.observer.log, config.max_pending_offloads
        leader = Leader(manager, len(hellos), pending, sizes, self.cost, log, self.kept_bytes)
        leader.unpackable.remember(config, hellos)
        connect(config, hellos, leader, self.cost)
        for catalog in manager.catalogs.values() if config.load == "auto" else ():
            catalog.break_even = lambda: self.block_bytes * self.cost.prefill_tokens_per_second / self.block_size
        self.leader, self.counts = leader, leader.counts
        return leader

    def show(
        self,
        package: str,
        version: str,
        model: str,
        engine_blocks: int,
        hashes: str,
        who: str,
        replica: int = 0,
        device: str = "GPU",
    ) -> None:
        """Log the sizes and start the observer. ``package`` and ``version``: of the engine. ``hashes``: the keys are
        made from these, in words. ``who``, ``replica``: see :meth:`Observer.start`. ``device``: of the engine."""
        assert self.leader is not None
        catalogs, ranks, size = self.leader.manager.catalogs, self.leader.ranks, self.kept_bytes
        slots = {name: catalog.size for name, catalog in catalogs.items() if catalog.is_bounded}
        host = next(iter(slots.values()))
        logger.info(
            "KVBM is ready: %s of %d tokens (%.2f GB over %d rank%s%s), keys from %s",
            " and ".join(f"{count} {name} blocks" for name, count in slots.items()), self.block_size,
            sum(slots.values()) * size / 1e9,
            ranks, "" if ranks == 1 else "s", ", which keep their common KV once" if self._is_shared else "", hashes
        )  # fmt: skip
        if not registry.NEAR.is_wanted(self._config):
            logger.warning(
                "There is no host tier, and blocks go to disk through %d host blocks. This is experimental: KVBM "
                "skips blocks that the disk cannot take at once. A larger KVBM_DISK_BOUNCE_MB skips fewer.",
                host,
            )
        elif host < engine_blocks:
            engine_gb, needed_gb = (engine_blocks * size / packed / 1e9 for packed in (self.packed, 1))
            logger.warning(
                "The host tier (%.2f GB, %d blocks) is smaller than %s's own cache (%.2f GB, %d blocks): everything "
                "is offloaded as it is computed, so it will rarely hold what %s has dropped. "
                "Set DYN_KVBM_CPU_CACHE_GB to at least %.2f.",
                host * size / 1e9, host, self._engine, engine_gb, engine_blocks, self._engine, needed_gb
            )  # fmt: skip
        about = Identity(
            kvbm=kvbm.__version__,
            engine=package,
            engine_version=version,
            model=model,
            ranks=ranks,
            block_tokens=self.block_size,
            block_bytes=size,
            packed=self.packed,
            engine_blocks=engine_blocks,
            device=device,
            settings=settings_given(self._config),
        )
        self.observer.start(about, lambda: self.leader, self.cost, who=who, replica=replica)

    def note_faults(self, reports: Iterable[Report]) -> None:
        for report in reports:
            for reason, times in report.faults.items():
                self._faults.note(f"rank {report.rank}: {reason}", times)

    def switch_off(self, error: Exception) -> None:
        """An exception has left the bookkeeping inconsistent: drop the leader and all of its plans."""
        self._faults.record("taking in reports", error)
        if self.leader is not None:
            logger.error("KVBM disabled: inconsistent state. %s goes on without it.", self._engine)
            self.leader = None

    def reset(self, states: Iterable[RequestState]) -> None:
        """Forget every block. Running requests store nothing more: their KV may depend on the old weights."""
        self.finalize()
        self.clock.tick()
        for state in states:
            state.keep = False
        if self.leader is not None:
            self.leader.reset()
        self.observer.log.reset()

    def close(self, seconds: float | None = None) -> None:
        """``seconds``: how long the catalogs may take to end."""
        try:
            self.finalize()
            self.observer.close()
        finally:  # else the next engine would miss the last blocks of the index
            if self.manager is not None:
                self.manager.close(seconds)

    def tenant_of(self, salt: object) -> int:
        """The tenant of requests with this cache salt; the common one unless it has a share (KVBM_TENANT_SHARES)."""
        if not self._tenants or not isinstance(salt, str):
            return COMMON
        return self._tenants.get(salt.removeprefix(DYNAMO_SALT), COMMON)

    # -- lookup, decide, load -----------------------------------------------------------------------------------------

    def skip(self, state: RequestState, tokens: int, computed: int) -> None:
        """The request gets no lookup: it needs every token computed, or no block of it may be loaded."""
        state.lookup = Lookup(tokens, computed, SKIPPED)

    def wanted(self, state: RequestState, tokens: int, computed: int) -> tuple[int, int] | None:
        """(first, end) of the blocks to look up for a prompt of which the engine has ``computed`` tokens; None when
        there are none."""
        start = computed // self.block_size
        # One token at least is left to compute: the engine needs its logits.
        limit = (tokens - 1) // self.block_size
        if computed % self.block_size or limit <= start:
            state.lookup = Lookup(tokens, computed, ON_DEVICE if start else TOO_SHORT)
            return None
        return start, limit

    def decide(self, found: Match, tokens: int, others: bool, whole: bool = False, moved: int = 0) -> Decision:
        """How much of a match to load, and where. ``others``: requests that a long step would delay. ``moved``: blocks
        that are moved for the match, if that is another number."""
        computed = found.start * self.block_size
        size = self.block_bytes * (moved or found.blocks) // max(found.blocks, 1)
        decision = self.cost.decide(found, size, self.block_size, computed, tokens - computed, others, whole=whole)
        if self._outside_only and decision.reason == FORCED:
            return decision._replace(reason=OUTSIDE_ONLY)
        return decision

    def consider(self, state: RequestState, found: Match, decision: Decision, tokens: int, limit: int) -> bool:
        """Record a decision, and count refused blocks once for each request. Returns whether it loads anything."""
        prices = self.cost.prices if self.observer.log.is_recording else None
        state.lookup = Lookup(tokens, found.start * self.block_size, "", limit, found, decision, prices)
        if decision.blocks < found.blocks and not state.declined:
            state.declined = True
            self.cost.observe_refusal(found.beyond(decision.blocks))
            reason = RECOMPUTE if decision.blocks else decision.reason
            add(self.counts.refused_load_blocks, reason, found.blocks - decision.blocks)
        return bool(decision.blocks)

    def offer(self, state: RequestState, found: Match, decision: Decision, in_step: bool, hold: bool = False) -> None:
        """Offer the engine the decided blocks. ``hold``: pin the slots until the engine makes room, in a later call."""
        state.match, state.in_step = found.cut(decision.blocks), in_step
        state.deadline_seconds = self.deadline(decision)
        if hold:
            assert self.leader is not None
            self.leader.manager.hold(state.match)
            state.is_held = True

    def deadline(self, decision: Decision) -> float:
        """Seconds that a load from a staged tier may take; 0 for no deadline.

        As long as computing takes: after that the request is slower than without a cache. It also detects tiers that
        deliver too slowly. KVBM_DISK_LOAD_TIMEOUT_SECS is independent of it: the worker ends loads of a tier that
        delivers nothing for that time, whose 3 s are many times the prefill of a short prompt. A load that the user
        forces (KVBM_LOAD=always) has that timeout only.
        """
        return max(decision.recompute_seconds, MIN_PATIENCE_SECONDS) if self._config.load == "auto" else 0.0

    def stall(self, match: Match) -> float:
        """Seconds without a block from the staged tiers of a match after which its load is given up; 0: as the stores
        say. A store reads a chunk at a time, and not only for this load."""
        if self._config.load != "auto" or self.leader is None:
            return 0.0
        found: dict[TierName, Amount] = {}
        for tier, slots, alone in match.runs:
            found[tier] = found.get(tier, Amount()).plus(len(slots), self.block_bytes, alone)
        found.pop(self.leader.manager.near_tier, None)
        wait, least = self.cost.patience_seconds, Store.chunk_bytes
        return sum(wait(tier, max(size, least), alone) for tier, (size, alone) in found.items())

    def withdraw(self, state: RequestState) -> None:
        """The offer has become a load, or is void: let its slots be evicted again."""
        match, state.match = state.match, None
        if state.is_held and match is not None and self.leader is not None:
            self.leader.manager.release(match)
        state.is_held = False

    def add_last_block(self, state: RequestState, keys: Sequence[Key], tokens: int) -> None:
        """Add the last block of a prompt to a match that leaves out nothing else, if it lies in the same tier.

        For a load beside decoding requests. The engine then computes only the last token again, in a step as long as a
        decode step; computing a whole block makes it a prefill step, three times as long. A request that runs alone
        computes its last block, as vLLM does after a hit in GPU memory, so its answers are bit-identical. Beside other
        requests answers depend on the batch in any case.
        """
        assert self.leader is not None
        assert state.match is not None
        assert state.lookup is not None
        last = state.match.start + state.match.blocks
        if (last + 1) * self.block_size != tokens:
            return
        more = self.leader.manager.lookup(keys, last, last + 1).runs
        if more and more[0].tier == state.match.runs[-1].tier:
            state.match = state.match.extended(more[0], keys)
            state.lookup = state.lookup._replace(limit=last + 1, found=state.match)

    def load(
        self,
        state: RequestState,
        match: Match,
        targets: Sequence[int],
        blocks: int,
        layered: bool = False,
        left: int = 0,
    ) -> LoadPlan:
        """The engine has allocated ``targets`` for the first ``blocks`` blocks of the offer: plan to fill them.

        ``left``: tokens that the request has to compute afterwards. Raises, and leaves the offer as it is, when the
        match is out of date. Every rank must get the plan.
        """
        assert self.leader is not None
        self._begin_operation(state)
        plan = self.leader.onboard(
            match,
            state.name,
            targets,
            state.in_step,
            layered,
            left,
            state.deadline_seconds,
            state.tenant,
            self.stall(match),
        )
        self.withdraw(state)
        self.counts.matched_tokens += blocks * self.block_size
        for copy in plan.copies:
            add(self.counts.matched_blocks, copy.tier, len(copy.slots))
        return plan

    def admit(self, state: RequestState, plan: LoadPlan | None = None, loaded: int = 0) -> None:
        """The engine admits a request with so many loaded blocks: log it once for each lookup. Belongs to the operation
        that has made ``plan``, if there is one."""
        lookup, state.lookup = state.lookup, None
        if lookup is None:
            return
        if plan is None:
            self._begin_operation(state)
        admission = self._admission(state.name, lookup, loaded)
        self.observer.log.admitted(admission, None if plan is None else plan.id, lookup.prices)

    def _begin_operation(self, state: RequestState) -> None:
        if any(ended.name == state.name for ended in self.ended):
            self.finalize()  # the log goes by names, and knows one request of a name at a time
        self.clock.tick()

    def _admission(self, name: str, lookup: Lookup, loaded: int) -> Admission:
        tokens, computed, size = lookup.prompt_tokens, lookup.device_tokens, self.block_size
        found, decision = lookup.found, lookup.decision
        if found is None or decision is None:
            return Admission(name, tokens, computed, 0, None, {}, 0, size, lookup.outcome)
        return looked_up(name, tokens, computed, lookup.limit, found, loaded, size)._replace(
            why=decision.reason if found.runs else "",
            in_step=decision.in_step,
            others_running=decision.others_running,
            compute_seconds=self.cost.prefill_seconds(computed, loaded * size),
            expected_seconds=decision.seconds,
            recompute_seconds=decision.recompute_seconds,
        )

    # -- completed, store ---------------------------------------------------------------------------------------------

    def completed(self, state: RequestState, computed: int, scheduled: int, prompt_tokens: int) -> int:
        """Where the blocks end that a step completes and that are to be kept; they begin at ``state.stored``.

        A request may step back: after a failed load it computes, and stores, the blocks behind it once more.
        """
        first, end = computed // self.block_size, (computed + scheduled) // self.block_size
        if first < state.stored:
            state.stored = first
        return end if self._config.offload_decode else min(end, prompt_tokens // self.block_size)

    def store(
        self,
        parts: Sequence[Completed],
        keys: Sequence[Key],
        blocks: Sequence[int],
        counts: Sequence[int] | None = None,
    ) -> StorePlan | None:
        """Plan to store the engine's ``blocks`` under ``keys``, which are those of all the parts; None when no plan is
        needed, or the leader refuses one. ``counts``: how many of the keys each part has, if not one for each block."""
        assert self.leader is not None
        self.clock.tick()
        pool = self.leader.manager.near
        if pool.free < len(keys):
            # The store evicts other blocks, but not those in front of its own.
            for part in parts:
                pool.touch(self._used(part.keys, part.first))
        tenants = None
        if self._tenants:
            counts = counts or [part.end - part.first for part in parts]
            tenants = [part.state.tenant for part, count in zip(parts, counts, strict=True) for _ in range(count)]
        plan = self.leader.offload(keys, blocks, tenants)
        for part in parts:
            part.state.stored = part.end
        if self.observer.log.is_recording:
            planned = 0 if plan is None else plan.id
            self.observer.log.stores_planned([(part.state.name, part.first, part.end) for part in parts], planned)
        return plan

    # -- finished, touch ----------------------------------------------------------------------------------------------

    def finish(self, state: RequestState, output_tokens: int, keys: Sequence[Key], later: bool = False) -> None:
        """A request has ended. ``later``: another call finalizes it, when the engine's thread has time."""
        self.withdraw(state)
        stored, found = (state.stored, state.found or 0) if keys else (0, 0)
        self.ended.append(Ended(state.name, output_tokens, keys, stored, found, state.turn, state.tenant))
        if not later:
            self.finalize()

    def finalize(self) -> None:
        """Touch the blocks of requests that have ended, and log the requests. A failure costs one request."""
        ended, self.ended = self.ended, []
        if ended:
            self.clock.tick()
        for name, output_tokens, keys, stored, found, turn, tenant in ended:
            try:
                if stored and self.leader is not None:
                    # All blocks that it used are recent now, wherever they were; its last ones are evicted first.
                    turn = turn._replace(found=found, output_tokens=output_tokens)
                    self.leader.touch(self._used(keys, stored), turn, self._used is _front)
                    if found:
                        goes_on = self._config.disk_filter == "session" and 2 * found >= stored
                        self.leader.used(self._used(keys, stored if goes_on else found))
                        self.uses += 1
                if self.observer.log.is_recording:
                    self.observer.log.told(name, turn, self._tenant_names[tenant])
                self.observer.log.finished(name, output_tokens, keys, found)
            except Exception as error:
                self._faults.record("the end of a request", error)
