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
class SglangSettings(SchedulerSettings):
    """The same of an SGLang engine, whose names for it are others: `block_size` is its page_size, `num_gpu_blocks` one
    more than max_total_num_tokens in pages, `max_num_batched_tokens` its chunked_prefill_size, `max_num_seqs` its
    max_running_requests. `eagle`: keys are pairs of tokens.
    """

    max_prefill_tokens: int = 16_384
    schedule_conservativeness: float = 1.0
    decode_log_interval: int = 40
    eagle: bool = False
    enable_mixed_chunk: bool = False
    prefill_decode_interval: int = 0
    prefill_decode_interval_min_bs: int = 0

    @property
    def longest_request_tokens(self) -> int:
        """As of vLLM; but a request is only admitted where a page more than it may need is free."""
        return min(self.max_model_len, (self.usable_blocks - 2) * self.block_size)

    def __post_init__(self) -> None:
        SchedulerSettings.__post_init__(self)
        if self.usable_blocks < 4:
            raise ValueError(f"max_total_tokens must be at least four pages of {self.block_size}")
        for name in ("max_prefill_tokens", "decode_log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("prefill_decode_interval", "prefill_decode_interval_min_bs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not self.schedule_conservativeness > 0:
            raise ValueError(f"schedule_conservativeness must be above 0, not {self.schedule_conservativeness}")
        if self.max_num_batched_tokens % self.block_size:
            raise ValueError(
                f"chunked_prefill_size must be whole pages of {self.block_size}, not {self.max_num_batched_tokens}"
            )


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
