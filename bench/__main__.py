"""Runs the benchmarks, prints one table: all of them, or the parts that are named."""

from __future__ import annotations

import argparse
import asyncio
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench import decision, domain, edge, index, queues, refusals
from bench.row import Row, print_table


@dataclass(frozen=True, slots=True)
class _Part:
    what: str
    rows: Callable[[], Iterable[Row]]


_PARTS = {
    "index": _Part("the cache index, beside NVIDIA Dynamo's: events, memory, a long prompt matched", index.rows),
    "domain": _Part("one decision with 3 to 256 workers, and a step learned from", domain.rows),
    "decision": _Part(
        "from a body to the decision, 4 KB to 3 MB, and decisions while queues change",
        lambda: [*asyncio.run(decision.rows()), *queues.rows()],
    ),
    "edge": _Part("behind the real Envoy, beside a server that does nothing", lambda: asyncio.run(edge.rows())),
    "refusals": _Part(
        "bursts of 429s behind the real Envoy, and streams meanwhile", lambda: asyncio.run(refusals.rows())
    ),
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            [
                "parts:",
                *(f"  {name:<10}{part.what}" for name, part in _PARTS.items()),
                "",
                "Apart, each with its own --help: python -m bench.goodput (who serves the most within its bound),",
                "python -m bench.fleet (a day of sixteen unlike engines).",
            ]
        ),
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="one of those below; without any: all of them")
    chosen = parser.parse_args(arguments).parts
    if unknown := [name for name in chosen if name not in _PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(_PARTS)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit {commit.stdout.strip() or 'unknown'}, Python {platform.python_version()}, {platform.machine()}\n")
    print_table([row for name in chosen or _PARTS for row in _PARTS[name].rows()])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
