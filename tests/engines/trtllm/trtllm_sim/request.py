"""A request, as a connector may read and set it back."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_sim.api import LlmRequestState as State


@dataclass
class Prompt:
    """What a client asks for; the same on every rank."""

    number: int
    tokens: list[int]
    max_new_tokens: int
    salt: str | None = None
    lora: int | None = None
    priority: int | None = None


@dataclass
class LlmRequest:
    prompt: Prompt
    generation: str
    state: State = State.CONTEXT_INIT
    tokens: list[int] = field(default_factory=list)
    prepopulated_prompt_len: int = 0
    context_current_position: int = 0
    cancelled: bool = False
    done: bool = False  # it needs no more steps
    # Of the second cache manager: what the connector has offered, until the request is in a batch.
    offer: tuple[int, bool] | None = None
    is_pausing: bool = False  # it gets no more steps until its blocks are taken back

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt.tokens)
        self.request_id = self.py_request_id = self.prompt.number
        self.prompt_len = len(self.prompt.tokens)
        self.max_new_tokens = self.prompt.max_new_tokens
        self.lora_task_id = self.prompt.lora
        self.scope = (self.prompt.salt, self.prompt.lora)
        self.is_generation_only_request = False
        self.multimodal_positions = self.multimodal_hashes = None
        self.computed = 0  # tokens whose KV has been submitted, the executor's own count
        self._chunk = self.prompt_len
        if self.generation == "1.3":
            self.cache_salt = self.prompt.salt
        elif self.generation == "1.2":
            self.cache_salt_id = None if self.prompt.salt is None else hash(self.prompt.salt)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)

    @property
    def asked(self) -> int:
        """Tokens of the client's prompt. What was generated counts as prompt too once the request was taken back."""
        return len(self.prompt.tokens)

    def take_back(self) -> None:
        """Its blocks are gone: everything so far is to be computed again."""
        self.state, self.is_pausing = State.CONTEXT_INIT, False
        self.prompt_len = self._chunk = len(self.tokens)
        self.prepopulated_prompt_len = self.context_current_position = self.computed = 0

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == self.prepopulated_prompt_len

    @property
    def context_remaining_length(self) -> int:
        self._check_context()
        return self.prompt_len - self.context_current_position

    @property
    def context_chunk_size(self) -> int:
        self._check_context()
        return self._chunk

    @context_chunk_size.setter
    def context_chunk_size(self, size: int) -> None:
        self._chunk = min(size, self.context_remaining_length)

    def _check_context(self) -> None:
        # As in the engine: outside of the context phase these are errors.
        if self.state is not State.CONTEXT_INIT:
            raise RuntimeError(
                f"only possible during the context phase, and request {self.request_id} is {self.state!r}"
            )
