"""The time of an operation."""

from collections.abc import Callable

Clock = Callable[[], float]  # seconds, from any start; never goes back


class OperationClock:
    """Stands still while an operation runs: a load, a store, the planning of moves, the end of transfers or requests.
    So all policies and admission rules see one time, the record writes it, and a replay of the record sees it again, to
    the last bit. 0 until the first operation begins. ``read`` tells the time: core has none of its own."""

    def __init__(self, read: Clock = float) -> None:
        self._read = read
        self._now = 0.0

    def tick(self) -> None:
        """An operation begins."""
        self._now = self._read()

    def __call__(self) -> float:
        return self._now
