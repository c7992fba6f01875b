"""Two writers and four readers of the same prefixes, some of which are killed in the middle of their work.

    python object_racers.py SETTINGS ROUNDS SEED        SETTINGS: JSON of ObjectSettings

Every process is a fork of this one, which makes no request itself: obstore's threads do not survive a fork. The content
of a block follows from its key, so a wrong block shows whatever its checksum says. A writer reports each block through
a pipe once the store has acknowledged it; at the end of a round, and again at the end, all of them must be there.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time

import msgspec
import obstore  # noqa: F401 - before the forks, so that they need not load it
from object_blocks import Blocks, keys_of, open_store

from kvbm.tiers.objects.format import Names, object_id, place_of
from kvbm.tiers.objects.settings import ObjectSettings

SIZE = 16 << 10
BITS = 2
PROMPTS, BLOCKS = 4, 6  # a group of four blocks and two single ones
WRITERS, READERS = 2, 4
_GOOD, _WRONG, _LOST = 0, 41, 42


def payload(key: bytes) -> bytes:
    return hashlib.sha256(key).digest() * (SIZE // 32)


def places(keys: list[bytes]) -> list[int]:
    group = object_id(keys[(1 << BITS) - 1], BITS)
    alone = [place_of(object_id(key, 0), 0) for key in keys[1 << BITS :]]
    return [place_of(group, index) for index in range(1 << BITS)] + alone


class Round:
    def __init__(self, settings: ObjectSettings, names: Names, number: int) -> None:
        self.settings, self.names = settings, names
        # No two prompts share a key: a shared block would lie in the group of one prompt only.
        self.prompts = [keys_of([number * PROMPTS + prompt, *range(BLOCKS - 1)]) for prompt in range(PROMPTS)]

    def write(self, pipe: int) -> int:
        store = open_store(self.settings, self.names, size=SIZE)
        memory = Blocks(BLOCKS, SIZE)
        for keys in random.sample(self.prompts, PROMPTS):
            memory._map.seek(0)
            memory._map.write(b"".join(map(payload, keys)))
            operation = store.write(places(keys), memory.addresses, keys)
            operation.wait()
            done = [key for i, key in enumerate(keys) if i not in operation.bad]
            os.write(pipe, b"".join(done))
        return _GOOD

    def read(self, seconds: float) -> int:
        store = open_store(self.settings, self.names, size=SIZE)
        memory = Blocks(BLOCKS, SIZE)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            keys = random.choice(self.prompts)
            operation = store.read(places(keys), memory.addresses, keys)
            operation.wait()
            if any(memory[i] != payload(key) for i, key in enumerate(keys) if i not in operation.bad):
                return _WRONG
        return _GOOD

    def audit(self, acknowledged: set[bytes]) -> int:
        """All that was acknowledged is there, and right."""
        store = open_store(self.settings, self.names, size=SIZE)
        memory = Blocks(BLOCKS, SIZE)
        for keys in self.prompts:
            operation = store.read(places(keys), memory.addresses, keys)
            operation.wait()
            for i, key in enumerate(keys):
                if i in operation.bad:
                    if key in acknowledged:
                        print(f"lost: {operation.reason}", flush=True)
                        return _LOST
                elif memory[i] != payload(key):
                    return _WRONG
        return _GOOD


def fork(work, *arguments) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        random.seed()
        code = work(*arguments)
    finally:
        os._exit(code)


def end(pid: int, kill: bool) -> int:
    if kill:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(settings: ObjectSettings, rounds: int, seed: int) -> int:
    chance = random.Random(seed)
    names = Names({"model": "race", "seed": seed, "at": time.time_ns()})
    kills = blocks = 0
    history = []
    for number in range(rounds):
        this = Round(settings, names, number)
        out, into = os.pipe()
        readers = [fork(this.read, chance.uniform(0.02, 0.3)) for _ in range(READERS)]
        writers = [fork(this.write, into) for _ in range(WRITERS)]
        os.close(into)
        killed = [pid for pid in writers + readers if chance.random() < 0.4]
        time.sleep(chance.uniform(0, 0.25))
        codes = {pid: end(pid, pid in killed) for pid in writers + readers}
        with os.fdopen(out, "rb") as pipe:
            data = pipe.read()
        acknowledged = {data[at : at + 32] for at in range(0, len(data), 32)}
        codes[0] = end(fork(this.audit, acknowledged), False)
        kills += sum(code == -signal.SIGKILL for code in codes.values())
        blocks += len(acknowledged)
        history.append((this, acknowledged))
        if wrong := [code for code in codes.values() if code not in (_GOOD, -signal.SIGKILL)]:
            print(f"round {number}: exit codes {wrong}", flush=True)
            return 1
    for this, acknowledged in history[:: max(1, rounds // 50)]:
        if end(fork(this.audit, acknowledged), False):
            return 1
    print(f"{rounds} rounds, {kills} kills, {blocks} blocks acknowledged, none wrong, none lost", flush=True)
    return 0 if blocks and kills else 1


if __name__ == "__main__":
    sys.exit(run(msgspec.json.decode(sys.argv[1], type=ObjectSettings), int(sys.argv[2]), int(sys.argv[3])))
