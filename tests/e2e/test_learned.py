"""What a filter has learned and recorded, through restarts of real processes."""

import dataclasses
import signal
from pathlib import Path

import numpy as np

from extproc.recording_file import read_lines
from predictor.accuracy import accuracy
from predictor.backtest import Backtest
from predictor.recording import read_records
from tests.e2e.harness import Bench, chat, quick, running, until, words

ENGINE = quick("a", prefill_us_per_token=150, step_ms=4.0, num_gpu_blocks=3000)


async def basis(bench: Bench) -> str:
    told: str = (await bench.worker("a"))["cost"]["basis"]
    return told


async def restart_filter(bench: Bench) -> None:
    assert bench.stack.filter is not None
    assert await bench.stack.filter.end(signal.SIGTERM) == 0
    # Not asked for anything, from which it would learn.
    await bench.stack.start_filter()
    await bench.stack.filter_seen_healthy()


async def test_a_restarted_filter_knows_its_engine_and_not_another_in_its_place(tmp_path: Path) -> None:
    overrides = {
        "learned": {"folder": str(tmp_path / "learned"), "every_s": 3600},
        "probe": {"interval_s": 0.3},
        "shutdown": {"notice_s": 0, "grace_s": 5},
    }
    async with running([ENGINE], overrides) as bench:
        await bench.learn()
        before = (await bench.worker("a"))["cost"]
        await restart_filter(bench)

        async def known_again() -> bool:
            return await basis(bench) == "curve"

        # The engine has to tell how large its cache is, before it is known for the one that it was.
        await until(known_again, 20, "a recalled cost")
        after = (await bench.worker("a"))["cost"]
        assert after["us_per_token"] == before["us_per_token"] or after["samples"] == before["samples"]
        assert await bench.metric("headway_learned_files_total", result="loaded") >= 2

        # The same name and port, another cache and another speed.
        await bench.stack.engines["a"].end(signal.SIGKILL)
        other = dataclasses.replace(ENGINE, num_gpu_blocks=2000, prefill_us_per_token=600)
        await bench.stack.start_engine(other)

        async def forgotten() -> bool:
            return await basis(bench) == "default"

        await until(forgotten, 20, "a cost that is forgotten")
        answer = await bench.post(chat(words(2000, "first of the other engine")))
        assert answer.status == 200
        for number in range(29):
            if await basis(bench) == "curve":
                break
            await bench.post(chat(words((100, 400, 1600)[number % 3], f"again {number}")))
            await bench.settled()
        assert await basis(bench) == "curve"
        learned = (await bench.worker("a"))["cost"]
        assert learned["us_per_token"] > 450


async def test_a_recording_of_real_processes_is_predicted_as_they_were(tmp_path: Path) -> None:
    overrides = {"recording": {"folder": str(tmp_path)}, "shutdown": {"notice_s": 0, "grace_s": 5}}
    async with running([ENGINE], overrides) as bench:
        await bench.learn(rounds=12)
        await bench.post(chat(words(3000, "long")))
        follow_up = await bench.post(chat(words(3000, "long")))
        assert int(follow_up.headers["x-headway-cached-tokens"]) > 1000
        graded = await bench.metric("headway_predictions_graded_total")
        await bench.settled()
        await restart_filter(bench)
    first = min(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)  # noqa: ASYNC240 - a test may wait
    backtest = Backtest(np.random.default_rng(1))
    backtest.run(read_records(read_lines(first)))
    found = accuracy(backtest.outcomes)
    assert found is not None
    assert found.graded == graded
    assert backtest.outcomes[-1].cached_tokens == int(follow_up.headers["x-headway-cached-tokens"])
    assert all(outcome.cache == "right" for outcome in backtest.outcomes)
    assert backtest.outcomes[-1].learned
