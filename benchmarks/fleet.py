"""A fleet of engines without a router, from a trace: where its blocks come from, and what finding them costs.

    python benchmarks/fleet.py --trace FILE [--members 64] [--blocks 1000] [--speed 8] [--json FILE] [--check]

Each simulated member has a real pool with LRU eviction (``kvbm.core.pool``) and the real finding code: its key filter,
a copy of the filter of every other member, fed by encoded updates, and the choice of candidates
(``kvbm.tiers.peers.finding.fleet``). Only sockets and engines are left out: a question is a call, and time is that of
the trace, ``--speed`` times as fast. A request goes to a random member, as behind a load balancer. The member takes
what its own pool holds, asks the best candidates for the rest of the prefix in one question each, takes the longest
answer, and computes what is left.

The trace is in Mooncake's format: one JSON object a line with ``timestamp`` in milliseconds and ``hash_ids``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvbm.core.key_filter import KeyFilter
from kvbm.core.keys import KEY_BYTES, Key
from kvbm.core.pool import Pool
from kvbm.tiers.peers.finder import Source
from kvbm.tiers.peers.finding.fleet import MIN_POLL_SECONDS, Fleet

MAX_ASKED = 2  # candidates that get the question


class Request(NamedTuple):
    at: float  # seconds
    keys: list[Key]


class Figures(msgspec.Struct):
    """Of one run. Blocks unless the name says otherwise."""

    requests: int = 0
    blocks: int = 0
    local: int = 0
    peer: int = 0
    recomputed: int = 0
    infinite: int = 0  # that one cache without a limit would have found
    reachable: int = 0  # that the local pool and the best single member held at that moment
    questions: int = 0
    question_bytes: int = 0
    wasted_questions: int = 0  # the answer was: nothing
    polls: int = 0
    update_bytes: int = 0  # of all filters at all members, without the first tables
    table_bytes: int = 0  # of the first tables
    changed_blocks: int = 0  # came to or left the pool of a member
    left_out: int = 0  # keys that found no cell in a filter

    def share(self, part: int) -> float:
        return part / max(1, self.blocks)


class Simulated:
    """One member: pool, own filter, and its view of the fleet."""

    def __init__(self, number: int, blocks: int) -> None:
        self.source = Source(
            f"10.0.{number >> 8}.{number & 255}:23280", f"m{number}", f"machine{number}", "f", f"g{number}"
        )
        self.pool = Pool(blocks)
        self.pool.on_change = self._changed
        self.filter = KeyFilter(blocks, epoch=number + 1)
        self.fleet = Fleet("f")
        self.fleet.set_own(self.source)
        self.changes = 0
        self.is_alive = True

    def _changed(self, keys: Sequence[Key], is_findable: bool | None) -> None:
        if is_findable is not None:
            self.changes += len(keys)
            (self.filter.add if is_findable else self.filter.remove)(keys)

    def keep(self, keys: Sequence[Key]) -> None:
        """The blocks of a request, found or computed: all of them are recent now."""
        self.pool.touch(keys)
        missing = [key for key in keys if key not in self.pool][: self.pool.available]
        slots = self.pool.reserve(missing)
        if slots:
            self.pool.commit(slots)


class Simulation:
    """``death``: (seconds, number) of a member that dies."""

    def __init__(self, members: int, blocks: int, seed: int = 1, death: tuple[float, int] | None = None) -> None:
        self.members = [Simulated(number, blocks) for number in range(members)]
        self.by_address = {member.source.address: member for member in self.members}
        sources = [member.source for member in self.members]
        for member in self.members:
            member.fleet.set_members(sources, 0.0)
        self.figures = Figures()
        self._random = random.Random(seed)
        self._death = death
        self._known: set[Key] = set()
        self._next_poll = 0.0

    def run(self, requests: Iterable[Request]) -> Figures:
        for request in requests:
            self._pass_time(request.at)
            self._serve(request.keys)
        figures = self.figures
        figures.changed_blocks = sum(member.changes for member in self.members)
        figures.left_out = sum(member.filter.left_out for member in self.members)
        return figures

    def _pass_time(self, now: float) -> None:
        while self._next_poll <= now:
            if self._death is not None and self._next_poll >= self._death[0]:
                self.members[self._death[1]].is_alive = False
            for member in self.members:
                if member.is_alive:
                    self._poll(member, self._next_poll)
            self._next_poll += MIN_POLL_SECONDS

    def _poll(self, member: Simulated, now: float) -> None:
        figures = self.figures
        for source, epoch, number in member.fleet.take_due(now):
            other = self.by_address[source.address]
            if not other.is_alive:
                member.fleet.failed(source, now)
                continue
            update = other.filter.since(epoch, number)
            answer = msgspec.msgpack.encode(update)
            figures.polls += 1
            if update is not None and not update.cells:
                figures.table_bytes += len(answer)
            else:
                figures.update_bytes += len(answer)
            member.fleet.answered(source, answer, now)

    def _serve(self, keys: list[Key]) -> None:
        figures = self.figures
        alive = [member for member in self.members if member.is_alive]
        member = self._random.choice(alive)
        local = len(member.pool.match(keys))
        peer = self._ask(member, keys, local) if local < len(keys) else 0
        others = (len(other.pool.match(keys, local)) for other in alive if other is not member)
        best = max(others, default=0) if local < len(keys) else 0
        seen = next((n for n, key in enumerate(keys) if key not in self._known), len(keys))
        self._known.update(keys)
        member.keep(keys)
        figures.requests += 1
        figures.blocks += len(keys)
        figures.local += local
        figures.peer += peer
        figures.recomputed += len(keys) - local - peer
        figures.infinite += seen
        figures.reachable += local + best

    def _ask(self, member: Simulated, keys: list[Key], start: int) -> int:
        """Blocks that the best of the candidates has, from ``start`` on."""
        found = 0
        for source in member.fleet.candidates(keys, start, None)[:MAX_ASKED]:
            other = self.by_address[source.address]
            self.figures.questions += 1
            self.figures.question_bytes += (len(keys) - start) * KEY_BYTES
            held = len(other.pool.match(keys, start)) if other.is_alive else 0
            self.figures.wasted_questions += not held
            found = max(found, held)
        return found


def read_trace(path: Path, speed: float, requests: int | None = None) -> list[Request]:
    found = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            keys = [hashlib.sha256(b"%d" % number).digest() for number in entry["hash_ids"]]
            found.append(Request(entry["timestamp"] / 1000 / speed, keys))
            if len(found) == requests:
                break
    return found


def survive(trace: list[Request], members: int, blocks: int) -> dict[str, float]:
    """One member dies in the middle: what the others still find of what the living hold, before and after."""
    middle = trace[len(trace) // 2].at
    simulation = Simulation(members, blocks, death=(middle, 0))
    simulation.run(request for request in trace if request.at <= middle)
    before = msgspec.structs.replace(simulation.figures)
    dead = set(simulation.members[0].pool.findable)
    others = set().union(*(member.pool.findable for member in simulation.members[1:]))
    simulation.run(request for request in trace if request.at > middle)
    after = simulation.figures
    found, reachable = (getattr(after, name) - getattr(before, name) for name in ("peer", "reachable"))
    local = after.local - before.local
    return {
        "found_of_reachable_before": (before.local + before.peer) / max(1, before.reachable),
        "found_of_reachable_after": (local + found) / max(1, reachable),
        "blocks_that_only_the_dead_held": len(dead - others),
        "blocks_of_the_fleet": len(dead | others),
    }


def grow(trace: list[Request], members: int, blocks: int) -> list[dict[str, float]]:
    """The same trace with larger pools: the bytes of an update follow the changes and not the size."""
    rows = []
    for factor in (1, 4, 16):
        figures = Simulation(members, blocks * factor).run(trace)
        receivers = members - 1
        rows.append({
            "blocks_a_member": blocks * factor,
            "changed_blocks": figures.changed_blocks,
            "update_bytes_a_change_a_receiver": figures.update_bytes / max(1, figures.changed_blocks) / receivers,
            "table_bytes_a_member": figures.table_bytes / members / receivers,
        })  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1000, help="blocks of the trace in a member's pool")
    parser.add_argument("--speed", type=float, default=8.0)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="fail unless the fleet does what it promises")
    args = parser.parse_args(argv)
    began = time.process_time()
    trace = read_trace(args.trace, args.speed, args.requests)
    seconds = trace[-1].at
    figures = Simulation(args.members, args.blocks).run(trace)
    alone = figures.share(figures.local)
    infinite = figures.share(figures.infinite)
    print(f"{args.members} members of {args.blocks} blocks, {figures.requests} requests in {seconds:.0f} s")
    peer, recomputed = figures.share(figures.peer), figures.share(figures.recomputed)
    print(f"  local {alone:.1%}, peer {peer:.1%}, recomputed {recomputed:.1%}")
    print(
        f"  one infinite cache {infinite:.1%}; held by the member or one other {figures.share(figures.reachable):.1%}"
    )
    print(
        f"  questions {figures.questions} ({figures.wasted_questions} in vain), {figures.question_bytes / 1e6:.1f} MB"
    )
    per_member = figures.update_bytes / args.members / seconds
    print(f"  filter updates {figures.update_bytes / 1e6:.1f} MB, {per_member:.0f} bytes a second at each member")
    survival = survive(trace, args.members, args.blocks)
    print("  after a death, found of what the living hold: {found_of_reachable_before:.1%} before, "
          "{found_of_reachable_after:.1%} after".format(**survival))  # fmt: skip
    growth = grow(trace[: len(trace) // 4], args.members, args.blocks)
    for row in growth:
        print("  {blocks_a_member} blocks a member: {update_bytes_a_change_a_receiver:.1f} bytes a change at each "
              "receiver, first table {table_bytes_a_member:.0f} bytes".format(**row))  # fmt: skip
    result = {
        "members": args.members, "blocks_a_member": args.blocks, "seconds": seconds, "trace": args.trace.name,
        "local": alone, "peer": peer, "recomputed": recomputed,
        "infinite": infinite, "reachable": figures.share(figures.reachable), "counts": msgspec.to_builtins(figures),
        "update_bytes_a_second_a_member": per_member, "death": survival, "growth": growth,
        "python": platform.python_version(), "cores": os.cpu_count(), "cpu_seconds": time.process_time() - began,
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.check:
        return report(result)
    return 0


def report(result: dict) -> int:
    """1, with a line for each promise that is not kept."""
    found = result["local"] + result["peer"]
    small, *_, large = result["growth"]
    per_change = [row["update_bytes_a_change_a_receiver"] for row in (small, large)]
    promises = {
        "peers find at least 95 % of what the fleet holds": found >= 0.95 * result["reachable"],
        "a death costs the living nothing": result["death"]["found_of_reachable_after"]
        >= result["death"]["found_of_reachable_before"] - 0.02,
        "an update does not grow with the size": per_change[1] <= 1.5 * per_change[0],
    }
    for promise, is_kept in promises.items():
        if not is_kept:
            print(f"NOT KEPT: {promise}", file=sys.stderr)
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
