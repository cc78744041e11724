"""Bodies of the requests that generate or tokenize: the fields we need. Others are ignored, as vLLM does."""

import json
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec

from enginesim.api_errors import bad_request, invalid_body

CHOICES_MAX = 128


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common. Everything is optional; null means not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None

    @property
    def output_tokens(self) -> int | None:
        """How many tokens the client wants, None if it did not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """ApiError naming the first field with a value that cannot be served."""
        for name in ("max_tokens", "max_completion_tokens", "n"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise bad_request(f"{name} must be at least 1, got {value}.", name)
        if self.choices > CHOICES_MAX:
            raise bad_request(f"n must be at most {CHOICES_MAX}, got {self.n}.", "n")
        if self.cache_salt == "":
            raise bad_request("cache_salt must be a non-empty string if provided.", "cache_salt")
        if self.stream_options is not None and not self.stream:
            raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")


class ChatBody(GenerateBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerateBody, kw_only=True):
    """`POST /v1/completions`. `prompt` is a string, a list of them, token ids, or a list of lists of token ids."""

    prompt: Any


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class SpeedBody(msgspec.Struct, kw_only=True):
    """`POST /sim/speed`."""

    speed: Any


Body = TypeVar("Body", bound=msgspec.Struct)


def decode(raw: bytes, shape: type[Body]) -> Body:
    """`raw` as `shape`, in any encoding that Python's `json.loads` takes, as FastAPI does. ApiError 400 that names the
    field otherwise."""
    encoding = json.detect_encoding(raw)
    if encoding != "utf-8":
        raw = raw.decode(encoding, "replace").encode()
    try:
        return msgspec.json.decode(raw, type=shape)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid_body(error, len(raw)) from error


def split_prompts(prompt: object) -> list[str | list[int]]:
    """The prompts in `prompt`, one for each engine request. ApiError 400 if it is none of the four forms, or empty."""
    match prompt:
        case str():
            prompts: Sequence[object] = [prompt]
        case [int(), *_]:
            prompts = [prompt]
        case [_, *_]:
            prompts = prompt
        case []:
            raise bad_request("You must pass at least one prompt")
        case _:
            raise _bad_prompt()
    return [_checked(element) for element in prompts]


def _checked(prompt: object) -> str | list[int]:
    match prompt:
        case str() if prompt:
            return prompt
        case [_, *_]:
            try:
                return array("I", cast("Sequence[int]", prompt)).tolist()
            except (TypeError, OverflowError):
                raise _bad_prompt() from None
    raise _bad_prompt()


def _bad_prompt() -> Exception:
    return bad_request("prompt must be a non-empty string or list of token ids, or a list of either.", "prompt")
