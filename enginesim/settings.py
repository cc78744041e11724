"""What one simulated engine is configured with. Names follow vLLM 0.32's SchedulerConfig and CacheConfig."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits of the scheduler and the size of its KV cache, in tokens, blocks and requests.

    One block is the null block that vLLM keeps for itself, so `num_gpu_blocks - 1` blocks can hold tokens.
    `long_prefill_token_threshold` 0 means no cap on a chunk.
    """

    block_size: int = 16
    num_gpu_blocks: int = 8192
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0
    max_model_len: int = 131072

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("num_gpu_blocks", 2),
            ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
            ("long_prefill_token_threshold", 0),
            ("max_model_len", 2),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def usable_blocks(self) -> int:
        """Blocks that can hold tokens."""
        return self.num_gpu_blocks - 1

    @property
    def longest_request_tokens(self) -> int:
        """Prompt plus output that one request may reach. vLLM refuses to start with a smaller cache; we clip."""
        return min(self.max_model_len, self.usable_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class CostSettings:
    """The formula of a step's duration; see `StepTime`. `jitter` is the sigma of a lognormal factor, 0 for none."""

    step_ms: float = 5.0
    prefill_us_per_token: float = 100.0
    prefill_ns_per_token2: float = 1.0
    decode_ms: float = 0.3
    speed: float = 1.0
    jitter: float = 0.0
    seed: int = 0
