"""SGLang's own hierarchical cache around its radix cache, on a CPU: its controller, host pool and write policies.

Only the copying is left out. A transfer is through when the scheduler looks for it the next time, a step later.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import absent  # noqa: F401 - before SGLang
import qwen3
import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.l2_transfer import TransferCompletion
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base, common
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

# SGLang asks for ten free gigabytes beside its pools.
_BUDGET_BYTES = 1 << 30


class _Through:
    """A transfer's event: it is through at the second look."""

    def __init__(self) -> None:
        self._looks = 0

    def query(self) -> bool:
        self._looks += 1
        return self._looks > 1

    def synchronize(self) -> None: ...


class _Transfers:
    """In the place of `L2TransferEngine`."""

    def __init__(self, io_backend: str) -> None: ...

    def submit_device_to_host(self, transfers: list[Any]) -> TransferCompletion:
        return TransferCompletion(None, _Through(), False)

    def submit_host_to_device(
        self, transfers: list[Any], *, transfer_layer_id_max: int, start_event: Any = None, on_layer_done: Any = None
    ) -> TransferCompletion:
        for layer in range(transfer_layer_id_max):
            on_layer_done(layer)
        return TransferCompletion(None, _Through(), False)


def device_pool(tokens: int, page_size: int) -> Any:
    """Memory as small as it gets, for the pools of the host to be modelled on."""
    return MHATokenToKVPool(tokens, page_size, torch.bfloat16, 1, 1, 1, "cpu", False)


def attach(cache: Any, parameters: Any, page_size: int, ratio: float, write_policy: str) -> None:
    """From here on the cache has a tier in host memory, `ratio` times as large as the device's."""
    cache_controller.L2TransferEngine = _Transfers
    common._cuda_host_register = base._cuda_host_unregister = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(qwen3.MODEL), encoding="utf-8")
        arguments = ServerArgs(
            model_path=folder,
            device="cpu",
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            random_seed=0,
            page_size=page_size,
            enable_hierarchical_cache=True,
            hicache_ratio=ratio,
            hicache_write_policy=write_policy,
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            log_level="error",
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with base.host_memory_budget_scope(_BUDGET_BYTES):
        cache.init_hicache(arguments, parameters)
