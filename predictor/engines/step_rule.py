"""Which engine family's rule composes a step."""

from __future__ import annotations

from typing import Protocol

from predictor.engines import sglang, tensorrt_llm, vllm
from predictor.engines.vllm import Lookup, Queue, Settings, Step


class StepRule(Protocol):
    """Composes the next step of a queue, and moves its sequences to where they are after it."""

    def __call__(self, queue: Queue, settings: Settings, newcomers: int = 0, lookup: Lookup | None = None) -> Step: ...


_RULES: dict[str, StepRule] = {
    "vllm": vllm.schedule,  # and for whoever is not known to be of another family
    "sglang": sglang.schedule,
    "tensorrt_llm": tensorrt_llm.schedule,
}


def rule_of(settings: Settings) -> StepRule:
    return _RULES[settings.family]


def reserved_beside_prompt(settings: Settings, max_tokens: int | None, prompt_tokens: int = 0) -> int:
    """Tokens of KV space that must be free beside a prompt's own before it is admitted."""
    if settings.family == "vllm":
        return 0
    if settings.family == "tensorrt_llm":
        return tensorrt_llm.output_room(prompt_tokens, max_tokens, settings)
    most = sglang.RESERVED_MOST_TOKENS
    return min(most if max_tokens is None else max_tokens, most) + settings.block_size
