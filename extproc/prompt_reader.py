"""A request's prompt, made exact beside the event loop, or estimated when that would take too long.

Rendering and tokenizing run in a few threads; fastokens releases the GIL there. How many may wait is bounded, and so
is how long one waits: a prompt that is late is estimated from its size and counted, and what a thread still does for
it is not waited for.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from extproc.apis.request import ChatPrompt, CompletionPrompt, LlmRequest, OpaquePrompt
from extproc.completion_prompt import Parts, read_completion_prompt
from predictor.chat import ChatTemplate, NotReproducible
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, Tokens
from predictor.tokenizer import Tokenizer

_BYTES_PER_TOKEN = 4.0
_OBJECTS = msgspec.json.Decoder(list[dict[str, Any]])


class Estimated(enum.Enum):
    """Why a prompt was estimated."""

    LATE = "late"  # the deadline passed
    BUSY = "busy"  # too many are waiting for a thread
    OPAQUE = "opaque"  # it cannot be told from outside the engine
    NO_TOKENIZER = "no_tokenizer"
    NO_TEMPLATE = "no_template"


class ReadPrompt(msgspec.Struct, frozen=True):
    prompt: Prompt
    estimated: Estimated | None  # None: exact


class PoolText:
    """How one pool's engines turn a request into tokens; either part may be missing."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.bytes_per_token = _BYTES_PER_TOKEN

    def tokens(self, request: LlmRequest) -> Tokens | Estimated:
        """Runs in a thread."""
        match request.prompt:
            case ChatPrompt() as chat:
                return self._chat_tokens(chat)
            case CompletionPrompt() as completion:
                return self._completion_tokens(completion)
            case OpaquePrompt():
                return Estimated.OPAQUE

    def estimate(self, request: LlmRequest) -> Prompt:
        """From the body's size; the engines' own counts of past prompts set the scale."""
        return Prompt.estimated(round(request.body_bytes / self.bytes_per_token))

    def learn_size(self, body_bytes: int, prompt_tokens: int) -> None:
        if prompt_tokens > 0:
            seen = min(16.0, max(0.5, body_bytes / prompt_tokens))
            self.bytes_per_token += 0.05 * (seen - self.bytes_per_token)

    def _chat_tokens(self, chat: ChatPrompt) -> Tokens | Estimated:
        if self.tokenizer is None:
            return Estimated.NO_TOKENIZER
        if self.template is None:
            return Estimated.NO_TEMPLATE
        try:
            messages = _OBJECTS.decode(chat.messages)
            if chat.system is not None:
                messages.insert(0, {"role": "system", "content": chat.system})
            tools = _OBJECTS.decode(chat.tools) if chat.tools is not None and chat.tools != b"null" else None
            text = self.template.render(messages, tools, chat.add_generation_prompt, chat.template_variables)
        except (NotReproducible, msgspec.MsgspecError):
            return Estimated.OPAQUE
        return self.tokenizer.encode(text, chat.add_special_tokens)

    def _completion_tokens(self, completion: CompletionPrompt) -> Tokens | Estimated:
        match read_completion_prompt(completion.raw):
            case str() as text if self.tokenizer is not None:
                return self.tokenizer.encode(text, completion.add_special_tokens)
            case str():
                return Estimated.NO_TOKENIZER
            case Parts():
                return Estimated.OPAQUE
            case ids:
                return ids


class PromptReader:
    """`deadline_s` bounds what one request waits for its tokens, `patient_deadline_s` what one waits that may take
    longer; `max_pending` bounds how many are being read.

    Bodies of up to `inline_bytes` are read at once, on the event loop: a thread would take longer to wake up.
    `on_late_fault` is told of faults of ours in a thread that nobody waits for any more.
    """

    def __init__(
        self,
        hasher: BlockHasher,
        threads: int,
        max_pending: int,
        deadline_s: float,
        on_late_fault: Callable[[BaseException], None],
        inline_bytes: int = 0,
        keep_tokens: bool = False,
        patient_deadline_s: float | None = None,
    ) -> None:
        self._hasher = hasher
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="prompt")
        self._max_pending = max_pending
        self._deadline_s = deadline_s
        self._patient_deadline_s = patient_deadline_s or deadline_s
        self._on_late_fault = on_late_fault
        self._inline_bytes = inline_bytes
        self._keep_tokens = keep_tokens
        self._pending = 0

    @property
    def pending(self) -> int:
        return self._pending

    async def read(
        self, text: PoolText, request: LlmRequest, families: Iterable[HashFamily], patient: bool = False
    ) -> ReadPrompt:
        wanted = tuple(families)
        if request.body_bytes <= self._inline_bytes:
            return self._result(self._make(text, request, wanted), text, request)
        if self._pending >= self._max_pending:
            return ReadPrompt(text.estimate(request), Estimated.BUSY)
        loop = asyncio.get_running_loop()
        deadline_s = self._patient_deadline_s if patient else self._deadline_s
        latest_s = loop.time() + deadline_s
        future = loop.run_in_executor(self._executor, self._make_in_time, text, request, wanted, loop.time, latest_s)
        self._pending += 1
        future.add_done_callback(self._release)
        # Not wait_for: a thread cannot be stopped, and cancelling the future would free its place too early.
        try:
            await asyncio.wait({future}, timeout=deadline_s)
        finally:
            if not future.done():
                future.add_done_callback(self._nobody_waits)
        if not future.done():
            return ReadPrompt(text.estimate(request), Estimated.LATE)
        return self._result(future.result(), text, request)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _result(made: Prompt | Estimated, text: PoolText, request: LlmRequest) -> ReadPrompt:
        if isinstance(made, Estimated):
            return ReadPrompt(text.estimate(request), made)
        return ReadPrompt(made, None)

    def _make_in_time(
        self,
        text: PoolText,
        request: LlmRequest,
        families: tuple[HashFamily, ...],
        clock: Callable[[], float],
        latest_s: float,
    ) -> Prompt | Estimated:
        """Nothing is done for a caller that has given up before its turn came: overload must not feed itself."""
        return Estimated.LATE if clock() >= latest_s else self._make(text, request, families)

    def _make(self, text: PoolText, request: LlmRequest, families: tuple[HashFamily, ...]) -> Prompt | Estimated:
        tokens = text.tokens(request)
        if isinstance(tokens, Estimated):
            return tokens
        if not len(tokens):
            return Estimated.OPAQUE
        namespace = Namespace(request.adapter, request.cache_salt)
        hashes = {}
        if request.reads_cache:
            hashes = {family: self._hasher.prompt_hashes(tokens, family, namespace) for family in families}
        return Prompt(len(tokens), exact=True, hashes=hashes, tokens=tokens if self._keep_tokens else None)

    def _release(self, future: asyncio.Future[Prompt | Estimated]) -> None:
        del future
        self._pending -= 1

    def _nobody_waits(self, future: asyncio.Future[Prompt | Estimated]) -> None:
        fault = None if future.cancelled() else future.exception()
        if fault is not None:
            self._on_late_fault(fault)
