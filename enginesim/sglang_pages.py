"""The pages of an SGLang engine that routers and operators read, as 0.5.23 has them: settings, load, models."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from aiohttp import web

from enginesim.engine import Engine
from enginesim.load_publisher import TOPIC, LoadPublisher, LoadStat
from enginesim.radix_tree import RadixTree
from enginesim.settings import SglangSettings

SGLANG_VERSION = "0.5.23"

logger = logging.getLogger(__name__)


class SglangPages:
    """The handlers that only read, and the one that flushes the cache. There is no /metrics without --enable-metrics,
    and no /version at all."""

    def __init__(self, engine: Engine, model: str, publisher: LoadPublisher | None = None) -> None:
        self._engine = engine
        self._model = model
        self._load_publisher = publisher
        self._started_s = time.time()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/health", self.health),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/v1/loads", self.loads),
            web.route("*", "/flush_cache", self.flush_cache),
        ]

    async def models(self, http: web.Request) -> web.Response:
        """`GET /v1/models`."""
        longest = self._settings.longest_request_tokens
        card = {"id": self._model, "object": "model", "created": int(self._started_s), "owned_by": "sglang"}
        card |= {"root": self._model, "parent": None, "max_model_len": longest}
        return web.json_response({"object": "list", "data": [card]})

    async def model_info(self, http: web.Request) -> web.Response:
        """`GET /model_info`."""
        told = {"model_path": self._model, "served_model_name": self._model, "tokenizer_path": self._model}
        return web.json_response({**told, "is_generation": True})

    async def health(self, http: web.Request) -> web.Response:
        """`GET /health`: an empty 200."""
        return web.Response()

    async def server_info(self, http: web.Request) -> web.Response:
        """`GET /server_info`: every server argument as it was resolved, and where the events are."""
        settings, tree = self._settings, self._tree
        return web.json_response(
            {
                "served_model_name": self._model,
                "version": SGLANG_VERSION,
                "startup_time": self._started_s,
                "page_size": settings.block_size,
                "chunked_prefill_size": settings.max_num_batched_tokens,
                "max_prefill_tokens": settings.max_prefill_tokens,
                "disable_overlap_schedule": True,
                "max_running_requests": settings.max_num_seqs,
                "schedule_policy": "fcfs",
                "schedule_conservativeness": settings.schedule_conservativeness,
                "enable_mixed_chunk": settings.enable_mixed_chunk,
                "prefill_decode_interval": settings.prefill_decode_interval,
                "prefill_decode_interval_min_bs": settings.prefill_decode_interval_min_bs,
                "disable_radix_cache": False,
                "radix_eviction_policy": "lru",
                "decode_log_interval": settings.decode_log_interval,
                "dp_size": 1,
                "tp_size": 1,
                "enable_dp_attention": False,
                "speculative_algorithm": "EAGLE" if settings.eagle else None,
                "max_total_num_tokens": tree.total_tokens,
                "max_req_input_len": settings.longest_request_tokens - 6,
                "kv_events": self._kv_events(),
                "internal_states": [{"effective_max_running_requests_per_dp": settings.max_num_seqs}],
            }
        )

    async def loads(self, http: web.Request) -> web.Response:
        """`GET /v1/loads`: what is in progress, by data parallel rank."""
        stat = self.load()
        load = {**asdict(stat), "token_usage": stat.num_used_tokens / stat.max_total_num_tokens}
        return web.json_response(
            {"timestamp": time.time(), "version": SGLANG_VERSION, "dp_rank_count": 1, "loads": [load]}
        )

    def load(self) -> LoadStat:
        """As both the page and the publisher tell it."""
        engine, tree = self._engine, self._tree
        used = tree.used_blocks * tree.page_size
        waiting = sum(len(request.token_ids) for request in engine.scheduler.waiting)
        return LoadStat(
            num_running_reqs=engine.gauges.running,
            num_waiting_reqs=engine.gauges.waiting,
            num_used_tokens=used,
            max_total_num_tokens=tree.total_tokens,
            dp_rank=0,
            num_waiting_uncached_tokens=waiting,
            num_total_tokens=used + waiting,
            max_running_requests=self._settings.max_num_seqs,
            total_prefill_uncached_tokens=engine.prefilled_tokens,
            total_prefill_busy_us=int(engine.prefill_busy_s * 1e6),
        )

    async def flush_cache(self, http: web.Request) -> web.Response:
        """`POST /flush_cache`: 200, or 400 while anything runs. The event leaves at once: the engine's loop turns."""
        if self._engine.scheduler.has_work or not self._tree.clear():
            logger.warning("cache not flushed: requests are in progress")
            return web.Response(status=400, text="Flush cache failed.\n")
        self._engine.turn()
        return web.Response(text="Cache flushed.\n")

    @property
    def _settings(self) -> SglangSettings:
        settings = self._engine.scheduler.settings
        assert isinstance(settings, SglangSettings)
        return settings

    @property
    def _tree(self) -> RadixTree:
        tree: object = self._engine.scheduler.pool
        assert isinstance(tree, RadixTree)
        return tree

    def _kv_events(self) -> dict[str, Any]:
        publisher = self._engine.publisher
        pushed: dict[str, Any] = {}
        if self._load_publisher is not None:
            pushed = {"load_endpoint_port_base": _port(self._load_publisher.endpoint), "load_topic": TOPIC.decode()}
        return {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": _port(publisher.endpoint),
            "replay_endpoint_port_base": _port(publisher.replay_endpoint),
            "topic": publisher.topic,
            "block_size": self._settings.block_size,
            "dp_size": 1,
            **pushed,
        }


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
