"""Prompts made exact beside the event loop, or estimated when that would take too long."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from extproc.apis import LlmRequest, openai_chat, openai_completions
from extproc.model_files import load_pool_text
from extproc.prompt_reader import Estimated, PoolText, PromptReader, ReadPrompt
from predictor.prompt import BlockHasher, HashFamily, Namespace, as_tokens
from tests.fakes.encoders import BrokenTokenizer, HeldTokenizer, OneTokenAByte
from tests.fakes.waiting import until

MODEL = Path(__file__).parents[2] / "enginesim" / "model"


BY_16 = HashFamily(16)


class Readers:
    """Makes readers and closes them; collects their late faults."""

    def __init__(self) -> None:
        self.hasher = BlockHasher(np.random.default_rng(3))
        self.faults: list[BaseException] = []
        self._made: list[PromptReader] = []

    def make(self, threads: int = 1, max_pending: int = 8, deadline_s: float = 20.0) -> PromptReader:
        reader = PromptReader(self.hasher, threads, max_pending, deadline_s, self.faults.append)
        self._made.append(reader)
        return reader

    def close(self) -> None:
        for reader in self._made:
            reader.close()


@pytest.fixture
def readers() -> Iterator[Readers]:
    made = Readers()
    yield made
    made.close()


def completion(prompt: object = "x" * 40, **fields: object) -> LlmRequest:
    return openai_completions.read(msgspec.json.encode({"model": "m", "prompt": prompt, **fields}))


def chat(messages: bytes = b'[{"role":"user","content":"hi"}]') -> LlmRequest:
    return openai_chat.read(b'{"model":"m","messages":' + messages + b"}")


async def test_an_exact_prompt_has_its_tokens_and_the_hashes_of_every_block_size(readers: Readers) -> None:
    read = await readers.make().read(PoolText(OneTokenAByte(), None), completion("abcd" * 10), [HashFamily(8), BY_16])
    assert read.estimated is None
    assert (read.prompt.token_count, read.prompt.exact) == (40, True)
    tokens = as_tokens(list(b"abcd" * 10))
    for family, hashes in read.prompt.hashes.items():
        assert hashes.tolist() == readers.hasher.prompt_hashes(tokens, family, Namespace()).tolist()
    assert list(read.prompt.hashes) == [HashFamily(8), BY_16]
    assert [len(hashes) for hashes in read.prompt.hashes.values()] == [5, 2]


async def test_the_cache_salt_is_part_of_the_hashes(readers: Readers) -> None:
    text, reader = PoolText(OneTokenAByte(), None), readers.make()
    salted = await reader.read(text, completion(cache_salt="s"), [BY_16])
    plain = await reader.read(text, completion(), [BY_16])
    assert salted.prompt.hashes[BY_16].tolist() != plain.prompt.hashes[BY_16].tolist()


async def test_a_request_that_reads_no_cache_has_no_hashes(readers: Readers) -> None:
    read = await readers.make().read(PoolText(OneTokenAByte(), None), completion(prompt_logprobs=1), [BY_16])
    assert (read.prompt.exact, read.prompt.hashes) == (True, {})


async def test_token_ids_need_no_tokenizer(readers: Readers) -> None:
    read = await readers.make().read(PoolText(None, None), completion([5] * 32), [BY_16])
    assert (read.estimated, read.prompt.token_count, len(read.prompt.hashes[BY_16])) == (None, 32, 2)


async def test_a_chat_is_rendered_and_tokenized_as_the_model_does_it(readers: Readers) -> None:
    text = load_pool_text(MODEL)
    assert text.template is not None
    assert text.tokenizer is not None
    read = await readers.make().read(text, chat(), [BY_16])
    rendered = text.template.render([{"role": "user", "content": "hi"}])
    assert read.prompt.token_count == len(text.tokenizer.encode(rendered, add_special_tokens=False))


@pytest.mark.parametrize(
    ("text", "request_", "why"),
    [
        (PoolText(None, None), completion(), Estimated.NO_TOKENIZER),
        (PoolText(None, None), chat(), Estimated.NO_TOKENIZER),
        (PoolText(OneTokenAByte(), None), chat(), Estimated.NO_TEMPLATE),
        (PoolText(OneTokenAByte(), None), completion(["a", "b"]), Estimated.OPAQUE),
        (PoolText(OneTokenAByte(), None), completion({"prompt_embeds": "x"}), Estimated.OPAQUE),
        (PoolText(OneTokenAByte(), None), completion(""), Estimated.OPAQUE),
        (PoolText(OneTokenAByte(), None), completion([]), Estimated.OPAQUE),
    ],
)
async def test_what_cannot_be_told_is_estimated_with_its_reason(
    readers: Readers, text: PoolText, request_: LlmRequest, why: Estimated
) -> None:
    read = await readers.make().read(text, request_, [BY_16])
    assert read == ReadPrompt(read.prompt, why)
    assert (read.prompt.exact, read.prompt.hashes) == (False, {})
    assert read.prompt.token_count == max(1, round(request_.body_bytes / 4))


@pytest.mark.parametrize(
    "messages",
    [
        b'[{"role":"user","content":"\xff\xfe"}]',
        b'["text"]',
        b'"text"',
        b"{}",
        b"null",
        b'[{"role":1}]',
        b'[{"content":"x"}]',
        b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]',
        b'[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]",
    ],
)
async def test_messages_that_only_the_engine_can_judge_are_opaque_and_no_fault_of_ours(
    readers: Readers, messages: bytes
) -> None:
    read = await readers.make().read(load_pool_text(MODEL), chat(messages), [BY_16])
    assert read.estimated is Estimated.OPAQUE


async def test_a_late_prompt_is_estimated_while_the_loop_goes_on(readers: Readers) -> None:
    tokenizer, reader = HeldTokenizer(), readers.make(deadline_s=0.2)
    started_s = time.monotonic()
    reading = asyncio.create_task(reader.read(PoolText(tokenizer, None), completion(), [BY_16]))
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0.005)
    read = await reading
    assert read.estimated is Estimated.LATE
    assert not read.prompt.exact
    assert 0.19 <= time.monotonic() - started_s < 5
    assert turns >= 5
    assert reader.pending == 1  # the thread is still at it
    tokenizer.let_go()
    await until(lambda: reader.pending == 0)
    assert (await reader.read(PoolText(tokenizer, None), completion(), [BY_16])).estimated is None


async def test_who_may_take_longer_is_waited_for_longer(readers: Readers) -> None:
    tokenizer = HeldTokenizer()
    reader = PromptReader(readers.hasher, 1, 8, 0.05, readers.faults.append, patient_deadline_s=20)
    text = PoolText(tokenizer, None)
    assert (await reader.read(text, completion(), [BY_16])).estimated is Estimated.LATE
    patient = asyncio.create_task(reader.read(text, completion(), [BY_16], patient=True))
    await asyncio.sleep(0.2)
    assert not patient.done()
    tokenizer.let_go()
    assert (await patient).prompt.exact
    reader.close()


async def test_no_more_than_the_bound_are_read_at_a_time(readers: Readers) -> None:
    tokenizer, reader = HeldTokenizer(), readers.make(max_pending=2)
    text = PoolText(tokenizer, None)
    first = [asyncio.create_task(reader.read(text, completion(), [BY_16])) for _ in range(2)]
    await until(lambda: reader.pending == 2)
    busy = await asyncio.wait_for(reader.read(text, completion(), [BY_16]), 1)
    assert busy.estimated is Estimated.BUSY
    assert busy.prompt.token_count == max(1, round(completion().body_bytes / 4))
    tokenizer.let_go()
    assert [(await read).estimated for read in first] == [None, None]
    assert reader.pending == 0
    assert (await reader.read(text, completion(), [BY_16])).estimated is None


async def test_late_threads_keep_their_places(readers: Readers) -> None:
    tokenizer, reader = HeldTokenizer(), readers.make(max_pending=1, deadline_s=0.3)
    text = PoolText(tokenizer, None)
    assert (await reader.read(text, completion(), [BY_16])).estimated is Estimated.LATE
    assert (await reader.read(text, completion(), [BY_16])).estimated is Estimated.BUSY
    tokenizer.let_go()
    await until(lambda: reader.pending == 0)


async def test_a_caller_that_leaves_frees_its_place_when_the_thread_ends(readers: Readers) -> None:
    tokenizer, reader = HeldTokenizer(), readers.make()
    reading = asyncio.create_task(reader.read(PoolText(tokenizer, None), completion(), [BY_16]))
    await until(lambda: reader.pending == 1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert reader.pending == 1
    tokenizer.let_go()
    await until(lambda: reader.pending == 0)
    assert readers.faults == []


async def test_a_fault_is_raised_to_whoever_waits(readers: Readers) -> None:
    tokenizer, reader = BrokenTokenizer(), readers.make()
    tokenizer.let_go()
    with pytest.raises(ZeroDivisionError):
        await reader.read(PoolText(tokenizer, None), completion(), [BY_16])
    assert reader.pending == 0
    assert readers.faults == []


async def test_a_late_fault_is_reported_once(readers: Readers) -> None:
    tokenizer, reader = BrokenTokenizer(), readers.make(deadline_s=0.3)
    assert (await reader.read(PoolText(tokenizer, None), completion(), [BY_16])).estimated is Estimated.LATE
    tokenizer.let_go()
    await until(lambda: reader.pending == 0)
    assert [str(fault) for fault in readers.faults] == ["the tokenizer is broken"]


async def test_a_fault_after_the_caller_left_is_reported(readers: Readers) -> None:
    tokenizer, reader = BrokenTokenizer(), readers.make()
    reading = asyncio.create_task(reader.read(PoolText(tokenizer, None), completion(), [BY_16]))
    await until(lambda: reader.pending == 1)
    reading.cancel()
    await asyncio.wait({reading})
    tokenizer.let_go()
    await until(lambda: reader.pending == 0)
    assert [type(fault) for fault in readers.faults] == [ZeroDivisionError]


def test_estimates_scale_with_the_bytes_per_token_that_were_seen() -> None:
    text = PoolText(None, None)
    request = completion("x" * 1000)
    assert text.estimate(request).token_count == round(request.body_bytes / 4)
    for _ in range(200):
        text.learn_size(2000, 1000)
    assert text.estimate(request).token_count == pytest.approx(request.body_bytes / 2, rel=0.01)


@pytest.mark.parametrize(("body_bytes", "tokens"), [(10**12, 1), (1, 10**12), (0, 5), (5, 0), (5, -1)])
def test_one_odd_report_does_not_spoil_the_scale(body_bytes: int, tokens: int) -> None:
    text = PoolText(None, None)
    text.learn_size(body_bytes, tokens)
    assert 3.5 <= text.bytes_per_token <= 4.7
