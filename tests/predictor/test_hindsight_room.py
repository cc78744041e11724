"""Whether a refused request would have found space, where those in flight share a long beginning."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.admission import Refusal
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Wish, WorkerSpec
from predictor.hindsight import Verdict
from predictor.kv_events import Batch, Stored, Tier
from predictor.prefill_cost import StepCost
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens

BLOCK = 16


@pytest.mark.parametrize(("refused_tokens", "verdict"), [(320, Verdict.FALSE_ALARM), (3200, Verdict.RIGHT)])
def test_a_beginning_that_many_share_takes_its_space_once(refused_tokens: int, verdict: Verdict) -> None:
    """Of 1,000 blocks 400 are shared by three, whose prompts together would fill 1,200; the queue takes 563 more."""
    rng = np.random.default_rng(3)
    hasher = BlockHasher(rng)
    fleet = Fleet([PoolPolicy("m")], hasher, rng)
    settings = Settings(block_size=BLOCK, num_gpu_blocks=1001, max_num_batched_tokens=20_000)
    fleet.join("m", WorkerSpec("w", "10.0.0.1:80", settings))
    fleet.know_cost("w", StepCost(0.0, 0.0, 0.005, 1e-3, 0.0, 0.0))

    def place(name: str, start: int, count: int, now_s: float, bound_s: float | None = None) -> Grant | Refusal:
        tokens = as_tokens(tuple(range(start, start + count)))
        hashes = hasher.prompt_hashes(tokens, HashFamily(BLOCK), Namespace())
        prompt = Prompt(count, True, {HashFamily(BLOCK): hashes})
        decision = fleet.place("m", prompt, Wish(name, now_s, max_queue_wait_s=bound_s, max_tokens=1000), now_s)
        assert isinstance(decision, Grant | Refusal)
        return decision

    now_s = 0.0
    for number in range(3):
        place(f"sharing {number}", 0, 6416, now_s)
        now_s += 7.0 if not number else 0.1
        if not number:
            names, tokens = tuple(range(401)), as_tokens(tuple(range(6416)))
            stored = Stored(names, None, tokens, BLOCK, Tier.DEVICE, None, None)
            fleet.apply("w", Batch(now_s, (stored,), None), now_s)
        fleet.first_token(f"sharing {number}", None, now_s)
    place("queue", 100_000, 9000, now_s)
    refusal = place("refused", 200_000, refused_tokens, now_s, bound_s=5.0)
    assert isinstance(refusal, Refusal)
    fleet.first_token("queue", None, now_s + 3.0)
    (review,) = (review for _, review in fleet.take_reviews(now_s + 6.0))
    assert review.verdict is verdict
