"""SGLang's own scheduler in virtual time: that it is driven as a server drives it, and what it does."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from predictor.kv_events import Stored, decode_batch
from tests.engine.forecast_truth import Accuracy, Recording, actual_s, naive_s, record, watching_s

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

EXACT_S = 1e-9


@pytest.fixture(scope="module")
def alone(recordings: Path) -> Recording:
    return record("sglang alone, no overlap", recordings)


@pytest.fixture(scope="module")
def giants(recordings: Path) -> Recording:
    return record("sglang giants", recordings, 60)


@pytest.fixture(scope="module")
def decodes(recordings: Path) -> Recording:
    return record("sglang decodes", recordings, 230)


def times(recording: Recording, kind: str) -> dict[int, float]:
    found = {what: at_s for name, at_s, what in recording.records if name == kind}
    assert len(found) == sum(name == kind for name, _, _ in recording.records)  # each once
    return found


def stored(recording: Recording) -> Iterator[tuple[float, int]]:
    """When so many tokens were told to be in the cache."""
    for kind, at_s, what in recording.records:
        if kind == "kv":
            for event in decode_batch(what).events:
                if isinstance(event, Stored):
                    yield at_s, event.block_size * len(event.hashes)


def first_step(recording: Recording, number: int) -> int:
    return next(at for at, (_, _, chunks, _) in enumerate(recording.steps) if any(of == number for of, _, _ in chunks))


def composed_after(recording: Recording, at_s: float) -> int:
    """The first step that was put together once a request of this time was there. With the overlap schedule that is
    when the step before begins; when nothing runs, at once."""
    starts = [start_s for start_s, _, _, _ in recording.steps]
    before = next(at for at, start_s in enumerate(starts) if start_s >= at_s)
    return before if starts[before] == at_s else before + 1


def test_a_prompt_alone_takes_what_its_steps_cost(alone: Recording) -> None:
    costs, budget = alone.work.costs, alone.work.settings.max_num_batched_tokens
    firsts, ends = times(alone, "first"), times(alone, "end")
    assert any(alone.cached.values())
    for number, arrival in enumerate(alone.work.arrivals):
        tokens, cached = arrival.prompt_tokens, alone.cached[number]
        steps = -(-(tokens - cached) // budget)
        own_s = costs.per_token_s * (tokens - cached) + costs.per_token_squared_s * (tokens**2 - cached**2)
        assert firsts[number] - arrival.at_s == pytest.approx(steps * costs.step_s + own_s, abs=EXACT_S)
        decoded_s = (arrival.output_tokens - 1) * (costs.step_s + costs.per_decode_s)
        assert ends[number] - firsts[number] == pytest.approx(decoded_s, abs=EXACT_S)
    for simple in (naive_s, watching_s):
        assert simple(alone) == pytest.approx(actual_s(alone), abs=EXACT_S)


def test_without_overlap_a_chunk_is_told_of_when_the_next_one_ends(alone: Recording) -> None:
    told = dict(stored(alone))
    chunked = 0
    for number, arrival in enumerate(alone.work.arrivals):
        spans = [
            (end_s, start, end) for _, end_s, chunks, _ in alone.steps for of, start, end in chunks if of == number
        ]
        assert len(spans) == 1 or spans[0][0] not in told
        for (_, start, end), (next_end_s, _, next_end) in itertools.pairwise(spans):
            last = next_end == arrival.prompt_tokens
            whole_end = next_end // alone.work.settings.block_size * alone.work.settings.block_size if last else end
            assert told[next_end_s] == whole_end - start
            chunked += 1
    assert chunked > 20


def test_the_same_workload_gives_the_same_bytes(giants: Recording, recordings: Path, tmp_path: Path) -> None:
    record("sglang giants", tmp_path, 60)
    (again,) = tmp_path.glob("*.msgpack")
    assert again.read_bytes() == (recordings / again.name).read_bytes()


def test_who_comes_behind_a_giant_waits_for_its_last_chunk(giants: Recording) -> None:
    budget, page = giants.work.settings.max_num_batched_tokens, giants.work.settings.block_size

    def full(chunks: list[tuple[int, int, int]]) -> bool:
        return sum(-(-(end - start) // page) * page for _, start, end in chunks) == budget

    behind = 0
    for _, _, chunks, _ in giants.steps:
        unfinished = [of for of, _, end in chunks if end < giants.work.arrivals[of].prompt_tokens]
        # There is one at most, it is the last of its step and takes what is left.
        assert not unfinished or (unfinished == [chunks[-1][0]] and full(chunks))
    for number, arrival in enumerate(giants.work.arrivals):
        if arrival.prompt_tokens < budget:
            step, soonest = first_step(giants, number), composed_after(giants, arrival.at_s)
            assert all(full(chunks) for _, _, chunks, _ in giants.steps[soonest:step])
            behind += step > soonest
    assert behind > 20
    # Adding up the prefills of those ahead explains nearly all of it.
    watching = Accuracy.of(list(zip(watching_s(giants), actual_s(giants), strict=True)))
    assert watching.within_1s == 1.0
    assert watching.median_ratio < 0.05


def test_with_overlap_a_chunk_is_told_of_when_it_ends(giants: Recording) -> None:
    told = set(stored(giants))
    whole = [
        (end_s, end - start)
        for _, end_s, chunks, _ in giants.steps
        for of, start, end in chunks
        if end < giants.work.arrivals[of].prompt_tokens
    ]
    assert len(whole) > 100
    assert told >= set(whole)


def test_a_newcomer_is_prefilled_at_once_while_decodes_stand_still(decodes: Recording) -> None:
    waited = 0
    for number, arrival in enumerate(decodes.work.arrivals):
        step = first_step(decodes, number)
        assert step == composed_after(decodes, arrival.at_s)
        assert decodes.steps[step][3] == 0
        waited += any(beside > 100 for _, _, _, beside in decodes.steps[step - 2 : step])
    assert waited > 20
    assert all(not chunks or not decoding for _, _, chunks, decoding in decodes.steps)


def test_every_request_gets_its_first_token_and_ends(decodes: Recording, giants: Recording) -> None:
    for recording in (decodes, giants):
        firsts, ends = times(recording, "first"), times(recording, "end")
        assert set(firsts) == set(ends) == set(recording.cached) == set(range(len(recording.work.arrivals)))
        assert all(ends[number] >= firsts[number] for number in firsts)
