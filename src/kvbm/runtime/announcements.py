"""Loads that the engine hears of before they are over.

vLLM with overlapping steps takes in the report of a step after it has planned and submitted the next one. A load that
ends right after a report is told of a step later, and its request waits for one step more. So a rank announces a load
outside of the step in the report after which the engine plans one more step without it, if the load should be over by
then. Every later step waits on the device for the announced load: it reads no block too early, however late the load.

Only a load that cannot fail any more is announced: blocks of the near tier alone, all with the copier, and a copier
that orders them on the device. The leader says which announcements the engine has not heard of
(``StepPlan.unheard``). A step whose plan does not say so waits for the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvbm.plans import StepPlan
from kvbm.runtime.loads import Load
from kvbm.transfer.base import Copier


class Announcements:
    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        # The least part of a step that passes between a report and the first step that is planned with it; 0: the
        # engine hears of every load when it is over.
        self.steps_ahead = 0.0
        self._announced: set[int] = set()  # loads under way
        self._block_seconds = 0.0  # what a block took in the last load outside of the step

    def __contains__(self, load: Load) -> bool:
        return load.plan.id in self._announced

    def due(self, plan: StepPlan, loads: Mapping[int, Load]) -> list[Load]:
        """Loads that this step waits for: it may compute on them, or on their blocks as those of another request."""
        return [loads[id] for id in self._announced.difference(plan.unheard) if id in loads]

    def hold(self, load: Load) -> None:
        """The step that begins waits for this load."""
        self._copier.hold_step([part.ticket for part in load.parts])

    def ended(self, load: Load) -> bool:
        """Whether the engine has been told already that this load has arrived."""
        was_announced = load in self
        self._announced.discard(load.plan.id)
        if not load.plan.in_step and load.is_submitted:
            self._block_seconds = load.block_seconds
        return was_announced

    def make(self, loads: Iterable[Load], step_seconds: float) -> set[str]:
        """Announce what should be over in time; returns the requests."""
        requests: set[str] = set()
        if not self.steps_ahead or not self._copier.can_hold_steps:
            return requests
        blocks = 0
        for load in loads:
            try:
                blocks += load.blocks_left  # the copier brings one load after the other
                seconds = blocks * max(load.block_seconds, self._block_seconds)
            except Exception:
                break  # the load itself shows what is wrong with its tickets
            if load.plan.in_step or load in self or not load.is_submitted or not load.parts:
                continue
            if (seconds or not blocks) and seconds <= self.steps_ahead * step_seconds:
                self._announced.add(load.plan.id)
                requests.add(load.plan.request)
        return requests
