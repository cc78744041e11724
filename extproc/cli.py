"""The `headway` command."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import uvloop

from extproc.config import BadConfig, Config, load_config, load_draft, notes, unusable_folder
from extproc.memory import give_back_large_buffers
from extproc.model_files import BadModelFiles, load_pool_text
from extproc.recording_file import RecordingLines, read_lines
from predictor.accuracy import as_text, summary
from predictor.backtest import Backtest, BadOverride, foresee, read_what_if, result_lines
from predictor.clairvoyance import BadCosts, read_costs
from predictor.recording import BadRecording, Header, Record, read_records

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_NOBODY_READS = 128 + signal.SIGPIPE  # what a shell shows of a tool that a closed pipe has ended
_BACKTEST_SEED = 1
_ADMIN_URL = "http://127.0.0.1:9464"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run(arguments)
        finally:
            # What was printed may only stand in a buffer until now.
            sys.stdout.flush()
            sys.stderr.flush()
    except BrokenPipeError:
        # Whoever read what we print, such as `head`, has seen enough.
        _print_no_more()
        return EXIT_NOBODY_READS


def _print_no_more() -> None:
    """The interpreter flushes once more when it ends, and would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="headway",
        description="Routes or refuses LLM requests behind Envoy by their predicted time to first token.",
    )
    parser.add_argument("--version", action="version", version=f"headway {importlib.metadata.version('headway')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the filter")
    check = commands.add_parser("check", help="check a config file and say every fault with its place")
    for command in (serve, check):
        command.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    stack = commands.add_parser("stack", help="run the local stack: real Envoy, the filter, simulated engines")
    stack.add_argument("--scene", action="store_true", help="play the scripted scene")
    stack.add_argument("--once", action="store_true", help="end after the scene, with a status that tells how it went")
    stack.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write down what the filter saw, for `headway backtest`, when it ends; compressed if FILE ends in .zst",
    )
    backtest = commands.add_parser("backtest", help="run the predictor over a recording and say how near it was")
    backtest.add_argument("recording", type=Path, metavar="RECORDING")
    backtest.add_argument(
        "--json", type=Path, metavar="OUT", help="write each prediction and a summary, one object a line"
    )
    backtest.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another engine setting than the recorded one; WORKER:KEY=VALUE for one worker, learning.KEY=VALUE",
    )
    backtest.add_argument(
        "--clairvoyant",
        type=Path,
        metavar="COSTS.json",
        help="tell the predictor the true costs, the lengths of answers and the requests yet to come",
    )
    report = commands.add_parser("report", help="how good a running filter's predictions have been")
    asked = report.add_mutually_exclusive_group()
    asked.add_argument("url", nargs="?", metavar="URL", help=f"the filter's admin port; {_ADMIN_URL} if not given")
    asked.add_argument("--admin", metavar="URL", help="the same")
    chosen = parser.parse_args(arguments)
    try:
        match chosen.command:
            case "serve":
                return uvloop.run(_serve(load_config(chosen.config)))
            case "check":
                return _check(chosen.config)
            case "report":
                return _report(chosen.url or chosen.admin or _ADMIN_URL)
            case "backtest":
                return _backtest(chosen.recording, chosen.json, chosen.what_if, chosen.clairvoyant)
            case _:
                return _stack(scene=chosen.scene or chosen.once, once=chosen.once, record=chosen.record)
    except (BadConfig, BadModelFiles, BadOverride, BadCosts) as fault:
        print(fault, file=sys.stderr)
        return EXIT_USAGE
    except BadRecording as fault:
        print(f"{chosen.recording}: {fault}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        raise
    except OSError as fault:
        print(f"headway: {fault}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_OK


def _stack(scene: bool, once: bool, record: Path | None) -> int:
    try:
        # Their needs are an extra.
        import rich  # noqa: F401

        from extproc.stack import run_stack
    except ModuleNotFoundError as missing:
        print(f"headway stack needs the package {missing.name}: pip install '.[stack]' in a checkout", file=sys.stderr)
        return EXIT_FAILED
    return run_stack(scene, once, record)


def _check(path: Path) -> int:
    draft = load_draft(path)
    missing = []
    for number, pool in enumerate(draft.config.pools):
        try:
            text = load_pool_text(None if pool.tokenizer is None else Path(pool.tokenizer))
            if text.tokenizer is not None and text.template is None:
                missing.append(
                    f"pool {pool.name!r}: its tokenizer folder has no chat template (chat_template.jinja, or "
                    "chat_template in tokenizer_config.json): chat prompts are estimated, and caches are not credited"
                )
        except BadModelFiles as fault:
            draft.fault(f"pools[{number}].tokenizer", str(fault))
    recording, learned = draft.config.recording.folder, draft.config.learned.folder
    for key, folder in (("recording.folder", recording), ("learned.folder", learned)):
        unusable = None if folder is None else unusable_folder(Path(folder))
        if unusable is not None:
            draft.fault(key, unusable)
    config = draft.without_faults()
    workers = sum(len(pool.workers) for pool in config.pools)
    print(f"{path}: good: {len(config.pools)} pool(s), {workers} worker(s)")
    for note in (*notes(config), *missing):
        print(f"note: {note}")
    return EXIT_OK


def _report(admin_url: str) -> int:
    from extproc.report import fetch_metrics, report

    print(report(fetch_metrics(admin_url)))
    return EXIT_OK


def _backtest(recording: Path, json: Path | None, what_if: Sequence[str], costs: Path | None) -> int:
    # Always the same: a recording has one report.
    overrides = read_what_if(what_if)
    foresight = None
    if costs is not None:
        try:
            known, rng = read_costs(costs.read_bytes()), np.random.default_rng(_BACKTEST_SEED)
            foresight = foresee(read_records(read_lines(recording)), known, rng, overrides)
        except BadCosts as fault:
            print(f"{costs}: {fault}", file=sys.stderr)
            return EXIT_USAGE
    backtest = Backtest(np.random.default_rng(_BACKTEST_SEED), overrides, foresight)
    began_s = time.monotonic()
    lines, had = RecordingLines(recording), Counter[str]()
    backtest.run(_counted(read_records(lines), had))
    if lines.cut_off is not None:
        read = f"{lines.lines} lines, {lines.read_bytes / 1e6:.1f} MB, were read"
        print(f"{recording}: cut off: {lines.cut_off}; {read}", file=sys.stderr)
    took_s = time.monotonic() - began_s
    outcomes = backtest.outcomes
    left_out = [f"left out: {reason}: {count}" for reason, count in sorted(backtest.left_out.items())]
    if not outcomes:
        kinds = ", ".join(f"{count} of kind {kind!r}" for kind, count in sorted(had.items()))
        print(
            f"{recording}: no request was recorded: it has {kinds or 'no records'}",
            *left_out,
            sep="\n",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if json is not None:
        figures = summary(outcomes) | {"left_out": dict(sorted(backtest.left_out.items()))}
        with json.open("wb") as out:
            out.writelines(result_lines(outcomes, figures))
    print(as_text(outcomes), *left_out, sep="\n")
    if all(outcome.actual_ttft_s is None for outcome in outcomes):
        print("nothing could be graded: no first token of these requests was recorded")
    sys.stdout.flush()
    speed = backtest.recorded_s / max(took_s, 1e-9)
    print(f"{len(outcomes)} requests in {took_s:.1f} s, {speed:.0f} times real time", file=sys.stderr)
    return EXIT_OK


def _counted(records: Iterable[Record], had: Counter[str]) -> Iterator[Record]:
    """What there is in a recording, by kind; its header says nothing."""
    for record in records:
        if not isinstance(record, Header):
            had[str(record.__struct_config__.tag)] += 1
        yield record


async def _serve(config: Config) -> int:
    # gRPC takes half a second to import, and `check` needs none of it.
    from extproc.app import App

    give_back_large_buffers()
    app = App(config)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        listening = await app.start()
    except OSError:
        await app.abandon()
        raise
    # What is there now stays: the collector need not walk tokenizers and modules again and again. And what a request
    # leaves behind has hardly any cycles, so that looking for them more seldom costs no memory.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    hosts = (address.rpartition(":")[0] for address in (config.listen.grpc, config.listen.admin))
    grpc, admin = (f"{host}:{port}" for host, port in zip(hosts, listening, strict=True))
    try:
        print(f"headway: ext_proc on {grpc}, admin on {admin}", flush=True)
    except BrokenPipeError:
        # Nobody reads it; Envoy asks all the same.
        _print_no_more()
    await stopping.wait()
    await app.stop()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
