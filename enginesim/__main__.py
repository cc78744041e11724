"""Starts one simulated engine, says where it listens, and serves until it is told to stop."""

import argparse
import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence

import zmq
from aiohttp import web

from enginesim.admin import Admin
from enginesim.cli import cost_settings, parse, scheduler_settings
from enginesim.completions import Completions
from enginesim.engine import Engine
from enginesim.faults import Faults
from enginesim.kv_publisher import KvPublisher
from enginesim.load_publisher import LoadPublisher
from enginesim.pages import Pages
from enginesim.sampling import WordSampler
from enginesim.scheduler import Scheduler
from enginesim.server import make_app
from enginesim.settings import SglangSettings
from enginesim.sglang_pages import SglangPages
from enginesim.sglang_scheduler import SglangScheduler
from enginesim.step_time import StepTime
from enginesim.tokenizer import Tokenizer
from enginesim.words import MODEL_FOLDER, vocabulary

SHUTDOWN_S = 0.2  # for requests in flight, before their connections are cut

logger = logging.getLogger("enginesim")


class SettingsFault(ValueError):
    """Flags that do not go together."""


def main() -> None:
    """Run until SIGTERM or SIGINT. Exit status 1 if a port cannot be had or the engine breaks."""
    options = parse()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"enginesim[{os.getpid()}] %(levelname)s %(message)s"
    )
    if options.exit_with_parent:
        _exit_with_parent()
    try:
        asyncio.run(_serve(options))
    except (OSError, zmq.ZMQError) as error:
        sys.exit(f"enginesim: cannot listen on --host {options.host}: {error}")
    except SettingsFault as error:
        sys.exit(f"enginesim: {error}")


async def _serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    faults = Faults()
    publisher = KvPublisher(
        options.host,
        options.kv_events_port,
        options.kv_replay_port,
        options.kv_events_topic,
        options.event_format,
        options.buffer_steps,
        faults,
    )
    load: LoadPublisher | None = None
    try:
        engine = _make_engine(options, publisher)
        if options.load_publish_port is not None:
            load = LoadPublisher(options.host, options.load_publish_port)
        pages = _make_pages(options, engine, load)
        runner = web.AppRunner(
            _make_app(options, engine, faults, pages),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_S,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, options.host, options.port).start()
            _announce(runner, publisher)
            work = [engine.run(), publisher.serve_replays()]
            if load is not None and isinstance(pages, SglangPages):
                work.append(load.beat(pages.load))
            await _until_stopped(stop, work)
        finally:
            await runner.cleanup()
    finally:
        publisher.close()
        if load is not None:
            load.close()


def _make_engine(options: argparse.Namespace, publisher: KvPublisher) -> Engine:
    if options.load_publish_port is not None and options.family != "sglang":
        raise SettingsFault("--load-publish-port goes with --family sglang: vLLM pushes no load")
    try:
        settings = scheduler_settings(options)
    except ValueError as error:
        raise SettingsFault(str(error)) from error
    if settings.num_gpu_blocks * settings.block_size < settings.max_model_len:
        logger.warning(
            "max_model_len is %d, since a cache of %d blocks holds no more",
            settings.longest_request_tokens,
            settings.num_gpu_blocks,
        )
    sample = WordSampler(tuple(vocabulary().values()))
    if isinstance(settings, SglangSettings):
        return Engine(SglangScheduler(settings, sample), StepTime(cost_settings(options)), publisher, "sglang")
    return Engine(Scheduler(settings, sample), StepTime(cost_settings(options)), publisher)


def _make_pages(options: argparse.Namespace, engine: Engine, load: LoadPublisher | None) -> Pages | SglangPages:
    if options.family != "sglang":
        return Pages(engine, options.model)
    pages = SglangPages(engine, options.model, load)
    if load is not None:
        engine.on_step = lambda batch: load.step(any(not chunk.is_decode for chunk in batch.chunks), pages.load)
    return pages


def _make_app(
    options: argparse.Namespace, engine: Engine, faults: Faults, pages: Pages | SglangPages
) -> web.Application:
    completions = Completions(
        engine,
        Tokenizer.load(MODEL_FOLDER),
        options.model,
        options.tokens_per_request_default,
        options.prompt_tokens_details,
        faults,
    )
    return make_app(completions, pages, Admin(engine, faults), faults, options.name)


def _announce(runner: web.AppRunner, publisher: KvPublisher) -> None:
    """The one line on stdout, for whoever started us."""
    ready = {
        "ready": True,
        "port": runner.addresses[0][1],
        "kv_events_endpoint": publisher.endpoint,
        "kv_replay_endpoint": publisher.replay_endpoint,
        "pid": os.getpid(),
    }
    print(json.dumps(ready), flush=True)


async def _until_stopped(stop: asyncio.Event, works: Sequence[Coroutine[None, None, None]]) -> None:
    """Serve until `stop`; a part that breaks takes the process with it, so that nobody waits for it in vain."""
    stopping = asyncio.create_task(stop.wait())
    work = [asyncio.create_task(one) for one in works]
    done, unfinished = await asyncio.wait([stopping, *work], return_when=asyncio.FIRST_COMPLETED)
    for task in unfinished:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()


def _exit_with_parent() -> None:
    """Have the kernel send us SIGTERM when the parent dies, so that no engine outlives a crashed launcher."""
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit(0)


if __name__ == "__main__":
    main()
