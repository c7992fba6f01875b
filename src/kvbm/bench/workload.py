"""Workloads: which user sends which prompt, and when.

The runner polls a workload for the requests that are due. A workload uses no clock and no network. There are two:

:class:`MultiRound` is LMBenchmark's synthetic multi-round QA, with its parameters. Each user has a long history
of their own behind a system prompt that all share, and asks ``num_rounds`` questions, one every ``num_users / qps``
seconds. New users join as others leave. At the start, users are spread over their rounds, as in a steady state. As in
LMBenchmark, users leave after ``num_rounds - 1`` gaps, so the real rate is a little above ``qps``: by a twentieth with
20 rounds.

:class:`Replay` sends the requests of a trace in Mooncake's format at their own times.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvbm.bench.client import Answer, Prompt

QUESTION_WORDS = 14
BLOCK = 512  # tokens for each hash id of a Mooncake trace


class Ask(NamedTuple):
    """A request that is due. The runner calls ``done`` with its answer."""

    prompt: Prompt
    max_tokens: int
    user: int
    round: int
    done: Callable[[Answer], None]
    due: float  # the time at which it should be sent


class Workload(Protocol):
    def due(self, now: float) -> list[Ask]:
        """The requests to send now; ``now`` is in seconds since the start."""
        ...

    def over(self, now: float) -> bool:
        """Whether no further request will be due."""
        ...

    @property
    def seconds(self) -> float:
        """The duration, for a progress bar."""
        ...

    @property
    def longest(self) -> int:
        """About how many tokens the longest request has, its answer included."""
        ...


_MAX_USERS, _MAX = 100_000, 10_000_000  # more users, words or seconds than any run can have


class Shape(NamedTuple):
    """Parameters of the multi-round workload. Lengths are in words, which most tokenizers turn into one token each. The
    defaults are those of LMBenchmark's long_input_short_output_run.sh, which guides to KVBM use."""

    num_users: int = 15
    num_rounds: int = 20
    shared_system_prompt: int = 1000
    user_history_prompt: int = 20_000
    answer_len: int = 100
    time: float = 100.0

    def check(self) -> None:
        for name, value in self._asdict().items():
            least = 1 if name in ("num_users", "num_rounds", "answer_len") else 0
            most = _MAX_USERS if name == "num_users" else _MAX
            if not least <= value <= most or (name == "time" and not value):  # or NaN
                above = "above 0" if name == "time" else f"of at least {least}"
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected a number {above} and up to {most:,}")


def opening(user: int, shape: Shape) -> str:
    """The beginning of a user's conversation: the part that all users share, then the user's own part."""
    shared = " ".join(["hi"] * shape.shared_system_prompt)
    own = " ".join(["hi"] * shape.user_history_prompt)
    # The user's number comes first in the user's own part, so no block after it is shared.
    return f"Here is what everybody is told: {shared}. User {user} has said before: {own}."


class _Session:
    """One user. ``asked``: rounds so far, including those that are assumed at the start."""

    def __init__(self, user: int, shape: Shape, gap: float) -> None:
        self.user = user
        self.asked = 0
        self.next = 0.0  # time of the next question
        self.waiting = False
        self.late = 0  # questions sent after their time, because the previous answer came late
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
        # A failed request leaves an empty answer, so that the conversation goes on.
        self._history.append({"role": "assistant", "content": answer.text})
        self.waiting = False

    @property
    def over(self) -> bool:
        return self.asked >= self._shape.num_rounds and not self.waiting


class MultiRound:
    """``first_user``: number of the first user. A number of an earlier run would find its prompts in the cache."""

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
        if shape.num_rounds == 1:  # every user asks once and leaves
            self._between_users = 1 / qps
            return
        lifetime = self._gap * (shape.num_rounds - 1)
        self._between_users = lifetime / shape.num_users
        for i in range(shape.num_users):
            self._spread(lifetime - i * self._between_users)

    @property
    def seconds(self) -> float:
        return self.shape.time

    @property
    def longest(self) -> int:
        shape = self.shape
        rounds = min(shape.num_rounds, int(shape.time / self._gap) + 1)
        return shape.shared_system_prompt + shape.user_history_prompt + rounds * (shape.answer_len + QUESTION_WORDS)

    def _spread(self, age: float) -> None:
        """Add a user that joined ``age`` seconds ago."""
        session = self._join()
        session.asked = int(age / self._gap) + 1
        # The user asked at every full gap so far, and asks again at the next one.
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
        """Questions sent more than a second after their time: the server cannot sustain the rate."""
        return self.late + sum(session.late for session in self._sessions)


class Line(NamedTuple):
    """A request of a trace."""

    at: float  # seconds
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceError(ValueError):
    """The file is not a valid trace; the text names the line and the reason."""


def read_trace(path: Path, most: int | None = None) -> list[Line]:
    """Read a trace in Mooncake's format. Lines of a KVBM record that are not requests are skipped."""
    try:
        texts = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(f"{path} cannot be read: {reason}") from error
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
                f"{path}, line {number}: {error or type(error).__name__}; expected an object with timestamp (in ms), "
                "input_length, output_length and hash_ids"
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
    """The requests of a trace, each at its time. ``speed`` 2 sends them in half the time; ``scale`` 0.1 makes prompts,
    answers and blocks a tenth as long. Prompts are tokens: equal hash ids give equal tokens."""

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

    @property
    def longest(self) -> int:
        return max(round((line.input_length + line.output_length) * self._scale) for line in self._lines)

    def due(self, now: float) -> list[Ask]:
        asks = []
        while self._next < len(self._lines):
            line = self._lines[self._next]
            at = (line.at - self._start) / self._speed
            if at > now:
                break
            self._next += 1
            most = max(1, round(line.output_length * self._scale))
            asks.append(Ask(Prompt(tokens=self.tokens(line)), most, 0, self._next, lambda answer: None, at))
        return asks

    def over(self, now: float) -> bool:
        return self._next >= len(self._lines)

    def tokens(self, line: Line) -> list[int]:
        length = max(1, round(line.input_length * self._scale))
        tokens: list[int] = []
        for number in line.hash_ids:
            tokens += self._draw(f"block {number}", self._block)
        if len(tokens) < length:  # tokens after the last full block are unique
            tokens += self._draw(f"rest {self._next}", length - len(tokens))
        return tokens[:length]

    def _draw(self, seed: str, count: int) -> list[int]:
        source = random.Random(seed)
        return [100 + source.randrange(self._vocabulary - 100) for _ in range(count)]


def warm_up(count: int = 10) -> Iterable[Prompt]:
    """Short conversations, before the measurement."""
    for i in range(count):
        content = f"Just to warm up: user {i} says " + " ".join(["hi"] * 100)
        yield Prompt(messages=[{"role": "user", "content": content}])
