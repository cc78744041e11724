"""Chat and text completions over HTTP: from the body to engine requests, and from their tokens to the answer."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from enginesim.api_errors import bad_request, unknown_model
from enginesim.api_replies import ChatReply, Choice, Head, Reply, TextReply, Usage
from enginesim.api_requests import ChatBody, CompletionBody, GenerateBody, TokenizeBody, decode, split_prompts
from enginesim.engine import Engine
from enginesim.faults import Answer, Faults, cut
from enginesim.request import Request
from enginesim.sampling import content_seed
from enginesim.scheduler import Output
from enginesim.tokenizer import ChatError, Tokenizer

# Long prompts are tokenized off the event loop and hashed in pieces of about a millisecond, since the engine's steps
# must end in time.
ENCODED_INLINE_CHARACTERS = 8_192
HASHED_BLOCKS_BEFORE_A_PAUSE = 512


class Completions:
    """The handlers that generate or tokenize, for one engine under one model name."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        model: str,
        output_tokens_default: int,
        prompt_tokens_details: bool,
        faults: Faults | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._output_tokens_default = output_tokens_default
        self._prompt_tokens_details = prompt_tokens_details
        self._faults = faults or Faults()
        self._ids = itertools.count()

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        arrived_s = asyncio.get_running_loop().time()
        return await self.converse(http, decode(await http.read(), ChatBody), ChatReply, arrived_s)

    async def converse(
        self, http: web.Request, body: ChatBody, shape: type[Reply], arrived_s: float
    ) -> web.StreamResponse:
        """A chat, answered in the given shape."""
        self._check(body)
        prompt = await self._chat_ids(body, body.messages)
        return await self._answer(http, shape, body, [prompt], arrived_s)

    async def text(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`. Each prompt of several is an engine request of its own."""
        arrived_s = asyncio.get_running_loop().time()
        body = decode(await http.read(), CompletionBody)
        self._check(body)
        prompts = [await self._prompt_ids(prompt) for prompt in split_prompts(body.prompt)]
        return await self._answer(http, TextReply, body, prompts, arrived_s)

    async def tokenize(self, http: web.Request) -> web.Response:
        """`POST /tokenize`."""
        body = decode(await http.read(), TokenizeBody)
        self._check_model(body.model)
        if body.messages is not None:
            ids = await self._chat_ids(body, body.messages)
        elif body.prompt is not None:
            ids = await self._encode(body.prompt)
        else:
            raise bad_request("either prompt or messages is needed.", "prompt")
        limit = self._engine.scheduler.settings.longest_request_tokens
        return web.json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})

    def _check(self, body: GenerateBody) -> None:
        body.check()
        self._check_model(body.model)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model:
            raise unknown_model(model)

    async def _chat_ids(self, body: ChatBody | TokenizeBody, messages: Sequence[dict[str, Any]]) -> list[int]:
        if not messages:
            raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
        try:
            text = self._tokenizer.render_chat(
                messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs
            )
        except ChatError as error:
            raise bad_request(str(error), "messages") from error
        return await self._encode(text)

    async def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._encode(prompt)
        if max(prompt) >= self._tokenizer.vocabulary_tokens:
            raise bad_request(f"Token id {max(prompt)} is out of vocabulary")
        return prompt

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= ENCODED_INLINE_CHARACTERS:
            return self._tokenizer.encode(text)
        return await asyncio.get_running_loop().run_in_executor(None, self._tokenizer.encode, text)

    async def _answer(
        self, http: web.Request, shape: type[Reply], body: GenerateBody, prompts: list[list[int]], arrived_s: float
    ) -> web.StreamResponse:
        head = Head(
            f"{shape.id_prefix}{http.headers.get('X-Request-Id') or uuid.uuid4().hex}", int(time.time()), self._model
        )
        limits = [self._output_limit(len(prompt), body) for prompt in prompts]
        requests = [
            await self._make_request(prompt, limit, choice, body)
            for prompt, limit in zip(prompts, limits, strict=True)
            for choice in range(body.choices)
        ]
        details = self._prompt_tokens_details
        call = _Call(self._engine, self._tokenizer, requests, shape(head), body, details, self._faults)
        return await call.stream(http, arrived_s) if body.stream else await call.collect(http, arrived_s)

    def _output_limit(self, prompt_tokens: int, body: GenerateBody) -> int:
        longest = self._engine.scheduler.settings.longest_request_tokens
        if prompt_tokens >= longest:
            raise bad_request(
                f"This model's maximum context length is {longest} tokens. However, your request has {prompt_tokens} "
                "input tokens. Please reduce the length of the input messages.",
                "input_tokens",
            )
        wanted = body.output_tokens
        if wanted is None:
            return min(self._output_tokens_default, longest - prompt_tokens)
        if prompt_tokens + wanted > longest:
            raise bad_request(
                f"This model's maximum context length is {longest} tokens. However, you requested {wanted} output "
                f"tokens and your prompt has {prompt_tokens} input tokens. Please reduce one of them.",
                "max_tokens",
            )
        return wanted

    async def _make_request(self, prompt: list[int], output_limit: int, choice: int, body: GenerateBody) -> Request:
        block_size = self._engine.scheduler.settings.block_size
        request = Request(next(self._ids), list(prompt), output_limit, block_size, body.cache_salt)
        request.lookahead = self._engine.scheduler.lookahead
        for _ in range(len(prompt) // (block_size * HASHED_BLOCKS_BEFORE_A_PAUSE)):
            request.hash_more(HASHED_BLOCKS_BEFORE_A_PAUSE)
            await asyncio.sleep(0)
        request.hash_more()
        request.seed = content_seed(request, choice, body.seed or 0)
        return request


class _Call:
    """One HTTP request on its way: several engine requests that write into one answer, the choices in their order."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        requests: list[Request],
        reply: Reply,
        body: GenerateBody,
        prompt_tokens_details: bool,
        faults: Faults,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._requests = requests
        self._reply = reply
        self._body = body
        self._details = prompt_tokens_details
        self._faults = faults
        self._outputs: asyncio.Queue[Output | None] = asyncio.Queue()

    async def collect(self, http: web.Request, arrived_s: float) -> web.Response:
        """A plain answer when everything is there."""
        settings = self._faults.now
        if settings.delay_s:
            await asyncio.sleep(settings.delay_s)
        unfinished = self._submit(arrived_s)
        try:
            while unfinished:
                output = await self._outputs.get()
                if output is None:
                    cut(http)
                else:
                    unfinished -= output.finish_reason is not None
        finally:
            self._abort()
        choices = [self._choice(request) for request in self._requests]
        response = web.Response(body=self._reply.whole(choices, self._usage()), content_type="application/json")
        if settings.gzip:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def stream(self, http: web.Request, arrived_s: float) -> web.StreamResponse:
        """An event for each token. Headers come at once, before anything is queued, as vLLM does it; from SGLang
        together with the first token."""
        answer = Answer(http, self._faults)
        begun = self._engine.family == "vllm"
        try:
            if begun:
                await answer.begin()
            unfinished = self._submit(arrived_s)
            indexes = {request: index for index, request in enumerate(self._requests)}
            while unfinished:
                events = bytearray()
                outputs = await self._waiting_outputs()
                if not begun:
                    await answer.begin()
                    begun = True
                for output in outputs:
                    if output is None:
                        cut(http)
                    else:
                        events += self._events(output, indexes[output.request])
                        unfinished -= output.finish_reason is not None
                await answer.write(bytes(events))
            await answer.write(self._reply.closing(self._usage(), self._body.wants_usage))
        except ConnectionResetError:
            pass  # the client has gone; aborting below is all there is to do
        finally:
            self._abort()
        return await answer.end()

    def _submit(self, arrived_s: float) -> int:
        for request in self._requests:
            self._engine.submit(request, self._outputs.put_nowait, arrived_s)
        return len(self._requests)

    def _abort(self) -> None:
        for request in self._requests:
            self._engine.abort(request)

    async def _waiting_outputs(self) -> list[Output | None]:
        outputs = [await self._outputs.get()]
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        return outputs

    def _events(self, output: Output, index: int) -> bytes:
        request = output.request
        events = self._reply.token(index, self._tokenizer.decode([output.token_id]), output.finish_reason)
        if output.position:
            return events
        echo = request.token_ids[: request.prompt_tokens] if self._body.return_token_ids else None
        return self._reply.opening(index, echo) + events

    def _choice(self, request: Request) -> Choice:
        prompt, output = request.token_ids[: request.prompt_tokens], request.token_ids[request.prompt_tokens :]
        return Choice(prompt if self._body.return_token_ids else [], output, self._tokenizer.decode(output), "length")

    def _usage(self) -> Usage:
        """Each prompt counts once, however many answers it got, and its first answer tells what was cached."""
        firsts = self._requests[:: self._body.choices]
        block_size = firsts[0].block_size
        cached = sum(request.cached_tokens or 0 for request in firsts)
        full = sum(request.prompt_tokens // block_size * block_size for request in firsts)
        told = self._faults.cached_tokens(cached)
        tells_created = self._engine.family == "vllm" and not isinstance(self._reply, TextReply)
        return Usage(
            prompt_tokens=sum(request.prompt_tokens for request in firsts),
            completion_tokens=sum(request.output_tokens for request in self._requests),
            cached_tokens=told if self._details else None,
            # vLLM tells this of chats only, SGLang never.
            created_cache_tokens=max(0, full - told) if tells_created else None,
        )
