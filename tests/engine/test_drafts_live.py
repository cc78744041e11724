"""Speculative decoding as a real vLLM tells of it on its metrics page."""

from pathlib import Path

import pytest

from extproc.engine_pages import read_vllm_metrics
from predictor.drafts import Drafts
from tests.engine.harness import MODEL, EngineSettings, RealEngine

pytestmark = [pytest.mark.engine, pytest.mark.alone]

_ANSWERS, _TOKENS = 3, 200
# Words that go on as they began: what was drafted by looking them up is right, sooner or later.
_PROMPT = "a b c d " * 32


def test_how_many_tokens_a_step_gives_is_read_from_a_real_engine_that_drafts(log_folder: Path) -> None:
    with RealEngine(log_folder, EngineSettings(num_speculative_tokens=3)) as engine:
        ask = {"model": MODEL, "prompt": _PROMPT, "max_tokens": _TOKENS, "ignore_eos": True, "temperature": 0}
        for _ in range(_ANSWERS):
            status, answer = engine.request("/v1/completions", ask)
            assert status == 200, answer
        counts = read_vllm_metrics(engine.request("/metrics")[1].encode())[0].drafts
    assert counts is not None
    assert counts.generated == _ANSWERS * _TOKENS
    drafts = Drafts()
    assert drafts.count(counts)
    assert 1.0 < drafts.drafting.gain <= 4.0
    assert drafts.drafting.gain - 1.0 <= drafts.drafting.drafted <= 3.0
