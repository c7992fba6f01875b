"""Random conversations: prompts that begin alike, go on from earlier answers, and are cancelled at random.

What is asked depends on the seed and on earlier answers alone, never on time: two engines that answer alike are asked
alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from trtllm_sim.model import VOCABULARY
from trtllm_sim.request import Prompt


@dataclass
class Work:
    requests: int = 200
    seed: int = 1
    conversations: int = 12
    prefixes: int = 3  # that conversations begin with
    prefix_tokens: int = 40
    turn_tokens: int = 14  # at most
    answer_tokens: int = 8
    cancel: float = 0.0  # share of the requests
    loras: int = 0
    salts: int = 0
    priority: int | None = None


class Workload:
    """Lives on rank 0: says what to submit and to cancel, iteration by iteration."""

    def __init__(self, work: Work, max_length: int) -> None:
        self._work = work
        self._max_length = max_length
        self._random = random.Random(work.seed)
        self._prefixes = [self._tokens(work.prefix_tokens) for _ in range(work.prefixes)]
        self._turns = [random.Random(f"{work.seed}/{i}") for i in range(work.conversations)]
        self._histories: list[list[int]] = [[] for _ in self._turns]
        self._idle = list(range(work.conversations))
        self._running: dict[int, tuple[int, list[int], int | None]] = {}  # -> conversation, prompt, when to cancel
        # Shared out beforehand: who asks how often is no matter of time either.
        self._left = [len(range(i, work.requests, work.conversations)) for i in range(work.conversations)]
        self.cancelled: set[int] = set()
        self.prompts: dict[int, int] = {}

    @property
    def done(self) -> bool:
        return not self._running and not any(self._left)

    def next(self, iteration: int, ended: dict[int, list[int]]) -> tuple[list[Prompt], set[int]]:
        """(what to submit, what to cancel), given the answers of what has ended."""
        for number, answer in ended.items():
            conversation, prompt, cancel_at = self._running.pop(number)
            # What a cancelled request had answered by then is a matter of time, so nobody goes on from it.
            self._histories[conversation] = prompt if cancel_at is not None else prompt + answer
            self._idle.append(conversation)
        prompts: list[Prompt] = []
        for conversation in sorted(self._idle):
            if self._left[conversation]:
                prompts.append(self._ask(conversation, iteration))
        self._idle.clear()
        return prompts, {n for n, (_, _, at) in self._running.items() if at is not None and iteration >= at}

    def _ask(self, conversation: int, iteration: int) -> Prompt:
        work, chance = self._work, self._turns[conversation]
        history = self._histories[conversation]
        turn = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, work.turn_tokens))]
        if not history or len(history) + len(turn) + work.answer_tokens > self._max_length or chance.random() < 0.15:
            prefix = chance.choice(self._prefixes)
            history = prefix[: chance.randint(1, len(prefix))] if chance.random() < 0.3 else list(prefix)
        prompt = history + turn
        # The number names the turn and not the order of arrival, which is a matter of time.
        number = 1000 * (conversation + 1) + self._left[conversation]
        cancel_at = iteration + chance.randint(0, 8) if chance.random() < work.cancel else None
        self._running[number] = conversation, prompt, cancel_at
        self.prompts[number] = len(prompt)
        self._left[conversation] -= 1
        if cancel_at is not None:
            self.cancelled.add(number)
        return Prompt(
            number=number,
            tokens=prompt,
            max_new_tokens=chance.randint(1, work.answer_tokens),
            salt=f"tenant {conversation % work.salts}" if work.salts else None,
            lora=1 + conversation % work.loras if work.loras else None,
            priority=work.priority,
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]
