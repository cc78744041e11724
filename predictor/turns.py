"""What has passed of a worker whose prefill and decode steps take turns, as SGLang's do.

All who decode have had the same decode steps since their first tokens. How many there were is counted by what a step is
predicted to take, so it drifts; whoever ends tells how many there were in his own time. That puts the count right, and
everybody else's with it: each by the part of the error that fell into the time they had in common.

The times of those who decode together overlap, and so would what each of their ends tells: one prefill that was missed
would be in the samples of all of them, and a dozen samples that agree look like a worker that has become slower. So of
each stretch of time one sample is a witness, and the others are marked as `told_before`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from predictor.engines.vllm import Step
from predictor.step_sample import StepSample

# A witness tells of so much time at most of which an earlier one has told.
_TOLD_BEFORE = 0.5
# How many changes in the number of those who decode are remembered, for steps that are taken back.
_STRETCHES = 256


@dataclass(slots=True)
class _Mark:
    """Where a request's decoding began, on the counts as they are by now."""

    at_s: float
    decode_steps: float
    decoding: float
    prefill_steps: int
    new_tokens: int
    squares: int
    most: int  # that have decoded together since
    whole: bool = True  # it has decoded ever since


class Turns:
    """Counts since the beginning. Of decodes they are of what is known by now, and need not be whole numbers."""

    def __init__(self) -> None:
        self._decode_steps = 0.0
        self._decoding = 0.0  # summed over those steps
        self._prefill_steps = self._new_tokens = self._squares = 0
        self._marks: dict[str, _Mark] = {}
        self._stretches: deque[list[int]] = deque([[0, 0]], _STRETCHES)  # sequences, and decode steps of so many
        self._told_until_s = float("-inf")  # witnesses have told of the time up to then

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._marks

    @property
    def decoding(self) -> int:
        """Requests that are known to have begun and not to have ended."""
        return len(self._marks)

    def begins(self, seq_id: str, now_s: float) -> None:
        """It has had its first token."""
        present = len(self._marks) + 1
        for mark in self._marks.values():
            mark.most = max(mark.most, present)
        self._marks[seq_id] = _Mark(
            now_s, self._decode_steps, self._decoding, self._prefill_steps, self._new_tokens, self._squares, present
        )

    def breaks(self, seq_id: str) -> None:
        """It was retracted: decode steps pass that it has no part in."""
        mark = self._marks.get(seq_id)
        if mark is not None:
            mark.whole = False

    def ends(self, seq_id: str) -> None:
        self._marks.pop(seq_id, None)

    def passed(self, step: Step, times: int = 1) -> None:
        """So many steps like this one have ended. With mixed chunks one may be of both kinds: it counts as a decode
        step, with tokens."""
        if step.decodes or not step.chunks:
            self.decoded(times)
        else:
            self._prefill_steps += times
        self._new_tokens += times * step.new_tokens
        self._squares += times * step.squares

    def decoded(self, steps: int) -> None:
        """So many decode steps there were; fewer than counted if negative."""
        self._decode_steps += steps
        self._decoding += self._passed_together(steps)
        if steps < 0:
            for mark in self._marks.values():
                if mark.decode_steps >= self._decode_steps:  # nothing has passed since it began
                    mark.decode_steps, mark.decoding = self._decode_steps, self._decoding
            self._order_marks()

    def _order_marks(self) -> None:
        """What is summed up to a mark is no more than what is up to now."""
        for mark in self._marks.values():
            mark.decoding = min(mark.decoding, self._decoding)

    def _passed_together(self, steps: int) -> int:
        """Of so many steps, summed, how many sequences decoded in each."""
        stretches, decoding = self._stretches, 0
        while steps < 0 and len(stretches) > 1 and stretches[-1][1] <= -steps:
            sequences, counted = stretches.pop()
            steps += counted
            decoding -= counted * sequences
        if steps > 0 and stretches[-1][0] != len(self._marks):
            stretches.append([len(self._marks), 0])
        stretches[-1][1] = max(0, stretches[-1][1] + steps)
        return decoding + steps * stretches[-1][0]

    def generated(self, seq_id: str) -> int | None:
        """Tokens that have left the engine, of one that has decoded ever since its first."""
        mark = self._marks.get(seq_id)
        return None if mark is None or not mark.whole else 1 + round(self._decode_steps - mark.decode_steps)

    def learn(self, seq_id: str, output_tokens: int, now_s: float) -> StepSample | None:
        """It has just ended, and so many tokens there were. What that says of what steps take, if it says anything."""
        own = self._marks.get(seq_id)
        if own is None or not own.whole:
            return None
        counted, steps = self._decode_steps - own.decode_steps, output_tokens - 1
        # Counts that were put right again and again may be of more than ever decoded together.
        beside = (self._decoding - own.decoding) / counted if counted >= 1 else float(len(self._marks))
        decoding = steps * min(max(1.0, beside), own.most)
        if abs(counted - steps) > 0.5:
            factor = steps / counted if counted >= 1 else 0.0
            for mark in self._marks.values():
                if mark.decode_steps > own.decode_steps:
                    mark.decode_steps = own.decode_steps + (mark.decode_steps - own.decode_steps) * factor
                    mark.decoding = own.decoding + (mark.decoding - own.decoding) * factor
            self._decode_steps = own.decode_steps + steps
        self._decoding = own.decoding + decoding
        self._order_marks()
        told_before = self._told_until_s - own.at_s > _TOLD_BEFORE * (now_s - own.at_s)
        if not told_before:
            self._told_until_s = now_s
        return StepSample(
            now_s - own.at_s,
            self._new_tokens - own.new_tokens,
            self._squares - own.squares,
            round(decoding),
            steps + self._prefill_steps - own.prefill_steps,
            told_before=told_before,
        )
