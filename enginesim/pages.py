"""The pages of a vLLM engine that routers and operators read: models, version, metrics, sources of events, settings."""

import logging
import time
from typing import Any

from aiohttp import web

from enginesim.engine import Engine
from enginesim.metrics import CONTENT_TYPE, ENGINE_INDEX, cache_labels, render

VLLM_VERSION = "0.32.0"

logger = logging.getLogger(__name__)


class Pages:
    """The handlers that only read, and the one that clears the cache."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/kv_event_sources", self.kv_event_sources),
            web.get("/server_info", self.server_info),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def models(self, http: web.Request) -> web.Response:
        """`GET /v1/models`."""
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._model,
            "parent": None,
            "max_model_len": self._engine.scheduler.settings.longest_request_tokens,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def version(self, http: web.Request) -> web.Response:
        """`GET /version`."""
        return web.json_response({"version": VLLM_VERSION})

    async def health(self, http: web.Request) -> web.Response:
        """`GET /health`: an empty 200."""
        return web.Response()

    async def metrics(self, http: web.Request) -> web.Response:
        """`GET /metrics`."""
        engine = self._engine
        page = render(self._model, engine.scheduler.settings, engine.gauges, engine.scheduler.totals, engine.ttft_s)
        return web.Response(body=page.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def kv_event_sources(self, http: web.Request) -> web.Response:
        """`GET /kv_event_sources`, by data parallel rank. The host is a wildcard, as a real engine reports it."""
        return web.json_response({ENGINE_INDEX: self._kv_events_config()})

    async def server_info(self, http: web.Request) -> web.Response:
        """`GET /server_info`: JSON with `config_format=json`, else a text that lacks the scheduler, as in vLLM."""
        if http.query.get("config_format") == "json":
            return web.json_response({"vllm_config": self._config(), "vllm_env": {}})
        return web.json_response({"vllm_config": f"model={self._model!r}, enable_prefix_caching=True", "vllm_env": {}})

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        """`POST /reset_prefix_cache`: 200 either way; blocks in use prevent it. The event leaves with the next step."""
        if not self._engine.scheduler.pool.clear():
            logger.warning("prefix cache not reset: blocks are in use")
        return web.Response()

    def _kv_events_config(self) -> dict[str, Any]:
        publisher = self._engine.publisher
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": _on_any_host(publisher.endpoint),
            "replay_endpoint": _on_any_host(publisher.replay_endpoint),
            "buffer_steps": publisher.buffer_steps,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": publisher.topic,
        }

    def _config(self) -> dict[str, Any]:
        settings = self._engine.scheduler.settings
        scheduler = {
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_num_scheduled_tokens": None,
            "max_num_seqs": settings.max_num_seqs,
            "long_prefill_token_threshold": settings.long_prefill_token_threshold,
            "long_prefill_token_threshold_adaptive": False,
            "scheduler_reserve_full_isl": True,
            "watermark": 0.0,
            "policy": "fcfs",
            "async_scheduling": False,
            "enable_chunked_prefill": True,
        }
        cache = {
            "block_size": settings.block_size,
            "num_gpu_blocks": settings.num_gpu_blocks,
            "kv_cache_size_tokens": int(cache_labels(settings)["kv_cache_size_tokens"]),
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256",
            "cache_dtype": "auto",
            "sliding_window": None,
        }
        return {
            "model_config": {"model": self._model, "max_model_len": settings.longest_request_tokens},
            "scheduler_config": scheduler,
            "cache_config": cache,
            "kv_events_config": self._kv_events_config(),
        }


def _on_any_host(endpoint: str) -> str:
    return f"tcp://*:{endpoint.rpartition(':')[2]}"
