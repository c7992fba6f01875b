"""Sends requests to an OpenAI endpoint and measures the answers.

Time to first token runs from just before the request is sent to the first piece of text that is not empty, as in
LMBenchmark. An answer without text has no time to first token. A value of 0 seconds would be the best of all.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

TIMEOUT = 600.0


class EndpointError(Exception):
    """The endpoint gave no valid answer; the text contains its answer."""


class Prompt(NamedTuple):
    """A conversation (messages of the chat API), or bare tokens or text (the completions API)."""

    messages: list[dict[str, str]] | None = None
    tokens: list[int] | str | None = None


class Sample(msgspec.Struct, kw_only=True):
    """The result of a request. Times are seconds since the start of the run; ``error`` is empty for a full answer."""

    user: int
    round: int
    started: float
    finished: float
    ttft: float | None = None  # None: there was no text
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, where the server reports them
    output_tokens: int = 0
    gaps: list[float] = []  # seconds between two pieces of text, which are single tokens with most servers
    error: str = ""

    @classmethod
    def of(cls, answer: Answer) -> Sample:
        """Without the text."""
        return cls(**{name: getattr(answer, name) for name in cls.__struct_fields__})

    @property
    def generation_seconds(self) -> float | None:
        return None if self.ttft is None else self.finished - self.started - self.ttft


class Answer(Sample, kw_only=True):
    text: str = ""
    tokens: list[int] = []  # where the server tells: vLLM does with ``return_token_ids``


class Endpoint:
    """``url``: with or without /v1 at its end. Every request opens its own connection."""

    def __init__(
        self, url: str, model: str, api_key: str = "", extra: Mapping[str, Any] | None = None, timeout: float = TIMEOUT
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise EndpointError(f"{url!r}: {error}; expected a URL, for example http://localhost:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EndpointError(f"{url!r} is not a URL of an endpoint; expected for example http://localhost:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.model = model
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key or 'EMPTY'}"}
        self._extra = dict(extra or {})
        self._timeout = timeout

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def get(self, path: str, timeout: float = 30.0) -> str:
        connection = self._connect(timeout)
        try:
            connection.request("GET", self._base + path, headers=self._headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise EndpointError(f"{self.url}{path} cannot be reached: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise EndpointError(f"{self.url}{path} answered with {response.status}: {text[:300]}")
        return text

    def models(self) -> dict[str, int | None]:
        """The models, with the tokens of their context if the server tells, as vLLM does."""
        try:
            found = json.loads(self.get("/v1/models"))["data"]
            return {str(model["id"]): _whole(model.get("max_model_len")) for model in found}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EndpointError(f"{self.url}/v1/models gave no list of models: {error!r}") from error

    def ask(self, prompt: Prompt, max_tokens: int, user: int, number: int, epoch: float) -> Answer:
        """Never raises for a fault of the endpoint: the answer contains it. ``epoch``: time.monotonic() at time 0."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        if prompt.messages is not None:
            path, body["messages"] = "/v1/chat/completions", prompt.messages
        else:
            path, body["prompt"] = "/v1/completions", prompt.tokens
        data = json.dumps(body).encode()
        headers = {**self._headers, "x-user-id": str(user)}
        started = time.monotonic()
        answer = Answer(user=user, round=number, started=started - epoch, finished=0.0)
        connection = self._connect(self._timeout)
        try:
            connection.request("POST", self._base + path, data, headers)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._read(connection.getresponse(), answer, started)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        answer.finished = time.monotonic() - epoch
        return answer

    def _read(self, response: http.client.HTTPResponse, answer: Answer, started: float) -> None:
        if response.status != 200:
            answer.error = f"{response.status}: {response.read().decode(errors='replace')[:300]}"
            return
        pieces: list[str] = []
        ended, last = False, 0.0
        while line := response.readline():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                ended = True
                break
            event = json.loads(data)
            if "error" in event:
                answer.error = str(event["error"])[:300]
                return
            if usage := event.get("usage"):
                answer.prompt_tokens = usage.get("prompt_tokens") or 0
                answer.output_tokens = usage.get("completion_tokens") or 0
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in event.get("choices") or ():
                answer.tokens += choice.get("token_ids") or ()
                if text := _text(choice):
                    now = time.monotonic()
                    if answer.ttft is None:
                        answer.ttft = now - started
                    else:
                        answer.gaps.append(round(now - last, 5))
                    last = now
                    pieces.append(text)
        answer.text = "".join(pieces)
        if not ended:
            answer.error = "the stream ended early"


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    # Reasoning counts as text, because the user sees it arrive.
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
