"""Whatever arrives and leaves: blocks are neither lost nor shared by accident, and the events tell the truth."""

from collections import Counter
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enginesim.kv_events import BlockRemoved, BlockStored
from enginesim.request import Phase, Request
from enginesim.scheduler import Scheduler
from enginesim.settings import SchedulerSettings

SETTINGS = SchedulerSettings(
    block_size=2,
    num_gpu_blocks=12,
    max_num_batched_tokens=6,
    max_num_seqs=3,
    long_prefill_token_threshold=4,
    max_model_len=20,
)
STEPS_UNTIL_EVERYTHING_MUST_BE_DONE = 5000


class SchedulerMachine(RuleBasedStateMachine):
    """A tiny engine with few distinct tokens, so that prompts share, collide and push each other out."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Scheduler(SETTINGS, sample=lambda request: request.output_tokens % 2)
        self.requests: list[Request] = []
        self.published: Counter[int] = Counter()
        self.ids = count()

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=15),
        max_tokens=st.integers(1, 8),
        salt=st.sampled_from([None, None, "a"]),
    )
    def arrive(self, token_ids: list[int], max_tokens: int, salt: str | None) -> None:
        request = Request(next(self.ids), token_ids, max_tokens, SETTINGS.block_size, salt)
        request.hash_more()
        self.engine.add(request)
        self.requests.append(request)

    @rule()
    def step(self) -> None:
        batch = self.engine.schedule()
        assert sum(chunk.tokens for chunk in batch.chunks) <= SETTINGS.max_num_batched_tokens
        assert all(chunk.tokens > 0 for chunk in batch.chunks)
        assert bool(batch.chunks) == self.engine.has_work
        for event in self.engine.complete(batch)[1]:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                self.published.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.published[event.block_hash] -= 1
                assert self.published[event.block_hash] >= 0

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.requests)))

    @rule()
    def reset(self) -> None:
        if self.engine.pool.clear():
            self.published.clear()  # its event comes with the next step, before any other

    @invariant()
    def every_block_is_used_or_free(self) -> None:
        pool = self.engine.pool
        users = Counter(block for request in self.engine.running for block in request.block_ids)
        free = set(pool.eviction_order())
        assert pool.used_blocks + pool.free_blocks == pool.total_blocks == SETTINGS.num_gpu_blocks - 1
        assert free.isdisjoint(users)
        assert len(free) + len(users) == pool.total_blocks
        assert all(pool.references(block) == users[block] for block in range(SETTINGS.num_gpu_blocks))

    @invariant()
    def published_stores_less_removals_are_the_cache(self) -> None:
        assert +self.published == Counter(self.engine.pool.hash_counts())

    @invariant()
    def requests_are_where_their_phase_says(self) -> None:
        assert len(self.engine.running) <= SETTINGS.max_num_seqs
        assert all(request.phase is Phase.RUNNING for request in self.engine.running)
        assert all(request.phase is Phase.WAITING and not request.block_ids for request in self.engine.waiting)

    def teardown(self) -> None:
        for _ in range(STEPS_UNTIL_EVERYTHING_MUST_BE_DONE):
            if not self.engine.has_work:
                break
            self.step()
        assert all(request.phase is Phase.FINISHED for request in self.requests)
        assert self.engine.pool.used_blocks == 0


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
