"""What has passed on an engine between two step ends that were seen: a sample of what its steps cost."""

from __future__ import annotations

from dataclasses import dataclass

from predictor.engines.vllm import Step
from predictor.prefill_cost import StepCost
from predictor.step_sample import StepSample

# No engine is so many times as fast as it was taken to be.
_FASTEST = 50.0


@dataclass(slots=True)
class StepInterval:
    """Since the last step end that was seen. All counts are sums over the steps."""

    since_s: float
    steps: int = 0
    new_tokens: int = 0
    squares: int = 0
    decoding: int = 0
    arrival_tokens: int | None = None  # it began with the arrival of a prompt of so many, and not with an end
    plain: int = 0  # the last of them, if they were decodes only
    guessed: bool = False  # how many there were is by their predicted cost, and not confirmed

    def add(self, step: Step) -> None:
        self.plain = 0 if step.chunks else self.plain + 1
        self.steps += 1
        self.new_tokens += step.new_tokens
        self.squares += step.squares
        self.decoding += len(step.decodes)

    def add_decodes(self, steps: int, decoding: int) -> None:
        """So many more steps of decodes only, somewhere among them; `decoding`: of so many sequences each."""
        self.steps += steps
        self.decoding += steps * decoding

    def sample(self, now_s: float, cost: StepCost) -> StepSample | None:
        """If it ends now with an end that was seen; None where its steps were guessed or counted wrongly."""
        if not self.steps or self.guessed:
            return None
        duration_s = now_s - self.since_s
        if duration_s < (self.steps * cost.fixed_s + cost.per_token_s * self.new_tokens) / _FASTEST:
            return None  # more than any engine can have done in the time
        return StepSample(duration_s, self.new_tokens, self.squares, self.decoding, self.steps, self.arrival_tokens)

    def computed(self, chunks: int, stored_tokens: int, block_size: int) -> bool:
        """Whether it was one step, and prefilled what was stored: so many chunks of prompts with so many tokens, and
        less than a block more of each."""
        most = stored_tokens + block_size * chunks
        return self.steps == 1 and chunks > 0 and stored_tokens <= self.new_tokens < most
