"""Who asks what, and when.

A workload is asked again and again what is due; it has no clock and no network. Two of them:

:class:`MultiRound` is that of LMBenchmark's synthetic multi-round QA, with its parameters: users with a long history of
their own behind a system prompt that all share, each asking ``num_rounds`` questions, one every ``num_users / qps``
seconds, while new users join as others leave. At the start it is as if that had been going on for ever: users are
spread over their rounds. As there, users leave after ``num_rounds - 1`` gaps, so that the rate is really a little
higher than ``qps``: by a twentieth with 20 rounds.

:class:`Replay` sends the requests of a trace in Mooncake's format at their own times.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvbm.bench.client import Answer, Prompt

BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for


class Ask(NamedTuple):
    """A request that is due. Whoever sends it calls ``done`` with the answer."""

    prompt: Prompt
    max_tokens: int
    user: int
    round: int
    done: Callable[[Answer], None]
    due: float  # when it should have been sent


class Workload(Protocol):
    def due(self, now: float) -> list[Ask]:
        """What is to be sent now; ``now`` in seconds since the start."""
        ...

    def over(self, now: float) -> bool:
        """Nothing will be due any more."""
        ...

    @property
    def seconds(self) -> float:
        """How long it lasts, for a progress bar."""
        ...


class Shape(NamedTuple):
    """Parameters of the multi-round workload. Lengths are in words, which are tokens for most tokenizers; the defaults
    are those of LMBenchmark's long_input_short_output_run.sh, the benchmark that guides to KVBM name."""

    num_users: int = 15
    num_rounds: int = 20
    shared_system_prompt: int = 1000
    user_history_prompt: int = 20_000
    answer_len: int = 100
    time: float = 100.0

    def check(self) -> None:
        for name, value in self._asdict().items():
            least = 1 if name in ("num_users", "num_rounds", "answer_len") else 0
            if not value >= least or (name == "time" and not value):  # or NaN
                above = "above 0" if name == "time" else f"of at least {least}"
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected a number {above}")


def opening(user: int, shape: Shape) -> str:
    """What a user's conversation begins with: what all users share, then what is this one's alone."""
    shared = " ".join(["hi"] * shape.shared_system_prompt)
    own = " ".join(["hi"] * shape.user_history_prompt)
    # The number comes before the user's own part: behind it nothing is shared with anybody.
    return f"Here is what everybody is told: {shared}. User {user} has said before: {own}."


class _Session:
    """One user. ``asked``: rounds that are behind them, real ones and those they are said to have had."""

    def __init__(self, user: int, shape: Shape, gap: float) -> None:
        self.user = user
        self.asked = 0
        self.next = 0.0  # when the next question is due
        self.waiting = False
        self.late = 0  # questions that could not be asked in time, because the answer before was not there yet
        self._shape = shape
        self._gap = gap
        self._history: list[dict[str, str]] = []

    def ask(self, now: float) -> Ask:
        self.asked += 1
        question = f"Question {self.asked}: please tell me one more long story, and let it end well."
        if not self._history:
            question = f"{opening(self.user, self._shape)} {question}"
        self._history.append({"role": "user", "content": question})
        self.waiting = True
        due, self.next = self.next, now + self._gap
        if now - due > 1.0:
            self.late += 1
        prompt = Prompt(messages=list(self._history))
        return Ask(prompt, self._shape.answer_len, self.user, self.asked, self._answered, due)

    def _answered(self, answer: Answer) -> None:
        # A request that failed leaves an empty answer, so that the conversation can go on.
        self._history.append({"role": "assistant", "content": answer.text})
        self.waiting = False

    @property
    def over(self) -> bool:
        return self.asked >= self._shape.num_rounds and not self.waiting


class MultiRound:
    """``first_user``: users are numbered from here; a number that was used before finds its prompts in the cache."""

    def __init__(self, shape: Shape, qps: float, first_user: int = 0) -> None:
        shape.check()
        if not qps > 0:
            raise ValueError(f"--qps {qps}: expected a number of requests a second above 0")
        self.shape = shape
        self.qps = qps
        self.next_user = first_user
        self._gap = shape.num_users / qps
        self._joins = 0.0
        self._sessions: list[_Session] = []
        self.late = 0
        if shape.num_rounds == 1:  # everybody asks once and leaves
            self._between_users = 1 / qps
            return
        lifetime = self._gap * (shape.num_rounds - 1)
        self._between_users = lifetime / shape.num_users
        for i in range(shape.num_users):
            self._spread(lifetime - i * self._between_users)

    @property
    def seconds(self) -> float:
        return self.shape.time

    def _spread(self, age: float) -> None:
        """A user who has been here for so long."""
        session = self._join()
        session.asked = int(age / self._gap) + 1
        # The last question was asked at the full gap before, the next one comes a gap after it.
        session.next = session.asked * self._gap - age

    def _join(self) -> _Session:
        self.next_user += 1
        session = _Session(self.next_user, self.shape, self._gap)
        self._sessions.append(session)
        return session

    def due(self, now: float) -> list[Ask]:
        if now >= self.shape.time:
            return []
        while self._joins <= now:
            self._join().next = self._joins
            self._joins += self._between_users
        asks = []
        for session in self._sessions:
            if not session.waiting and session.asked < self.shape.num_rounds and session.next <= now:
                asks.append(session.ask(now))
        self.late += sum(session.late for session in self._sessions if session.over)
        self._sessions = [session for session in self._sessions if not session.over]
        return asks

    def over(self, now: float) -> bool:
        return now >= self.shape.time

    @property
    def questions_late(self) -> int:
        """Questions that came more than a second after their time: the server could not keep up with the rate."""
        return self.late + sum(session.late for session in self._sessions)


class Line(NamedTuple):
    """A request of a trace."""

    at: float  # seconds
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceError(ValueError):
    """A file is no trace; the text says which line and why."""


def read_trace(path: Path, most: int | None = None) -> list[Line]:
    """A trace in Mooncake's format; lines of a KVBM record that are no requests are passed over."""
    try:
        texts = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    lines: list[Line] = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            if row.get("event", "request") == "request":
                lines.append(_line(row))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TraceError(
                f"{path}, line {number}: {error!r}; expected an object with timestamp (in ms), input_length, "
                "output_length and hash_ids"
            ) from error
        if len(lines) == most:
            break
    if not lines:
        raise TraceError(f"{path} has no requests")
    return sorted(lines)


def _line(row: dict[str, object]) -> Line:
    at, asked, answered, ids = (row[name] for name in ("timestamp", "input_length", "output_length", "hash_ids"))
    if not isinstance(ids, list) or not all(isinstance(number, int) for number in (asked, answered, *ids)):
        raise TypeError("lengths and hash_ids are whole numbers")
    return Line(float(at) / 1e3, asked, answered, ids)  # type: ignore[arg-type]


class Replay:
    """The requests of a trace, each at its time. ``speed`` 2 sends them in half the time; ``scale`` 0.1 makes prompts
    and answers a tenth as long, and blocks with them. Prompts are tokens: equal hash ids are equal tokens."""

    def __init__(
        self,
        lines: Sequence[Line],
        speed: float = 1.0,
        scale: float = 1.0,
        vocabulary: int = 10_000,
        block: int = BLOCK,
    ) -> None:
        if not speed > 0 or not 0 < scale <= 1 or vocabulary < 200:
            raise ValueError("--speed takes a number above 0, --scale one from 0 to 1, --vocabulary at least 200")
        self._lines = lines
        self._speed = speed
        self._block = max(1, round(block * scale))
        self._scale = scale
        self._vocabulary = vocabulary
        self._start = lines[0].at
        self._next = 0

    @property
    def seconds(self) -> float:
        return (self._lines[-1].at - self._start) / self._speed

    def due(self, now: float) -> list[Ask]:
        asks = []
        while self._next < len(self._lines):
            line = self._lines[self._next]
            at = (line.at - self._start) / self._speed
            if at > now:
                break
            self._next += 1
            most = max(1, round(line.output_length * self._scale))
            asks.append(Ask(Prompt(tokens=self.tokens(line)), most, 0, self._next, _ignore, at))
        return asks

    def over(self, now: float) -> bool:
        return self._next >= len(self._lines)

    def tokens(self, line: Line) -> list[int]:
        length = max(1, round(line.input_length * self._scale))
        tokens: list[int] = []
        for number in line.hash_ids:
            tokens += self._block_of(number)
        if len(tokens) < length:  # what follows the last full block is nobody else's
            tokens += self._draw(f"rest {self._next}", length - len(tokens))
        return tokens[:length]

    def _block_of(self, number: int) -> list[int]:
        return self._draw(f"block {number}", self._block)

    def _draw(self, seed: str, count: int) -> list[int]:
        source = random.Random(seed)
        return [100 + source.randrange(self._vocabulary - 100) for _ in range(count)]


def _ignore(answer: Answer) -> None:
    return


def warm_up(count: int = 10) -> Iterable[Prompt]:
    """Short conversations, before anything is timed."""
    for i in range(count):
        content = f"Just to warm up: user {i} says " + " ".join(["hi"] * 100)
        yield Prompt(messages=[{"role": "user", "content": content}])
