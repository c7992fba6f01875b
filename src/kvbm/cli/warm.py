"""`kvbm cache warm`: let a running engine load the prompts of a file from its slower tiers, or compute them.

The engine is asked for one token of each prompt, so it finds the blocks of the bucket and brings them to host memory
as it does for any request. Works with every engine that has an OpenAI endpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.observe.format import printable
from kvbm.observe.terminal import progress

if TYPE_CHECKING:
    from kvbm.bench.client import Prompt

_FORMAT = 'expected text, or JSON: a string, a list of tokens, or an object with "prompt" (one of these) or "messages"'


def add_action(actions: Any) -> None:
    text = "send the prompts of a file to a running engine, so that it loads or computes their blocks"
    sub = actions.add_parser("warm", help=text, description=f"{text}. One prompt a line; {_FORMAT}.")
    sub.add_argument("file", type=Path, help="the prompts; - for standard input")
    sub.add_argument("--url", default="http://localhost:8000", help="of the engine (http://localhost:8000)")
    sub.add_argument("--model", default="", help="as the engine serves it; needed where it serves several")
    sub.add_argument("--api-key", default="", help="of the engine")
    sub.add_argument("--concurrency", type=int, default=4, metavar="N", help="requests at a time (4)")
    sub.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    from kvbm.bench.client import Endpoint, EndpointError

    try:
        prompts = read_prompts(args.file)
        endpoint = Endpoint(args.url, args.model, args.api_key)
        if not args.model:
            served = list(endpoint.models())
            if len(served) != 1:
                raise ValueError(f"{args.url} serves {', '.join(served) or 'nothing'}: name one with --model")
            endpoint.model = served[0]
    except OSError as error:
        print(f"kvbm: {printable(args.file)} cannot be read: {error.strerror or error}", file=sys.stderr)
        return 2
    except (EndpointError, ValueError) as error:
        print(f"kvbm: {printable(error, 1000)}", file=sys.stderr)
        return 2
    began, lock, done = time.monotonic(), threading.Lock(), 0
    with progress("warm") as show, ThreadPoolExecutor(max(1, args.concurrency)) as pool:

        def ask(number: int) -> tuple[int, int, str]:
            nonlocal done
            answer = endpoint.ask(prompts[number], 1, 0, number, began)
            with lock:
                done += 1
                show(done, len(prompts), lambda: f"{done:,} of {len(prompts):,} prompts")
            return answer.prompt_tokens, answer.cached_tokens, answer.error

        answers = list(pool.map(ask, range(len(prompts))))
    failed = [error for _, _, error in answers if error]
    tokens, cached = sum(answer[0] for answer in answers), sum(answer[1] for answer in answers)
    seconds = time.monotonic() - began
    found = f", {cached:,} of them found in a cache" if cached else ""
    print(
        f"{len(answers) - len(failed):,} prompts of {tokens:,} tokens in {seconds:.1f} s{found}; {len(failed):,} failed"
    )
    if failed:
        print(f"  the first because: {printable(failed[0], 500)}")
    return 1 if failed else 0


def read_prompts(path: Path) -> list[Prompt]:
    """Raises ValueError for a line that is no prompt."""
    lines = (sys.stdin.read() if str(path) == "-" else path.read_text()).splitlines()
    found = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path} has no prompts: {_FORMAT}")
    return found


def _prompt(line: str, where: str) -> Prompt:
    from kvbm.bench.client import Prompt

    try:
        value = json.loads(line) if line.lstrip()[0] in '"[{' else line
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {_FORMAT}") from error
    if isinstance(value, dict):
        messages = value.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return Prompt(messages=messages)
        value = value.get("prompt")
    is_tokens = isinstance(value, list) and value and all(type(token) is int for token in value)
    if not is_tokens and not (isinstance(value, str) and value):
        raise ValueError(f"{where}: {_FORMAT}")
    return Prompt(tokens=value)
