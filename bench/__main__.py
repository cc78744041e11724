"""Runs the benchmarks, prints one table. `python -m bench [index] [domain] [decision] [edge] ...` runs a part."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable

from bench import decision, domain, edge, index, queues, refusals
from bench.row import Row, print_table

_PARTS: dict[str, Callable[[], Iterable[Row]]] = {
    "index": index.rows,
    "domain": domain.rows,
    "decision": lambda: [*asyncio.run(decision.rows()), *queues.rows()],
    "edge": lambda: asyncio.run(edge.rows()),
    "refusals": lambda: asyncio.run(refusals.rows()),
}


def main(chosen: list[str]) -> int:
    unknown = [name for name in chosen if name not in _PARTS]
    if unknown:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join(_PARTS)}", file=sys.stderr)
        return 2
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit {commit.stdout.strip() or 'unknown'}, Python {platform.python_version()}, {platform.machine()}\n")
    rows = [row for name in chosen or _PARTS for row in _PARTS[name]()]
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
