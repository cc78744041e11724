"""`python -m bench.goodput.chart RESULTS.json ... > chart.svg`: the share served within its bound, by load."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.goodput.__main__ import best_limit_only

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 340, 56, 34, 190, 44
_COLOURS = {
    "Headway": "#0b6e4f",
    "least request": "#c1440e",
    "round robin": "#7a7a7a",
    "least request, best limit": "#2f5d9b",
}


def chart(title: str, results: Sequence[dict[str, Any]]) -> str:
    """An SVG of its own; `results` are those of one workload and fleet."""
    loads = sorted({float(result["load"]) for result in results})
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in _COLOURS}
    for load in loads:
        for result in best_limit_only([result for result in results if result["load"] == load]):
            name = "least request, best limit" if ", at most" in result["policy"] else result["policy"]
            lines[name].append((load, result["served"]))

    def x(load: float) -> float:
        spread = (loads[-1] - loads[0]) or 1.0
        return _LEFT + (load - loads[0]) / spread * (_WIDTH - _LEFT - _RIGHT)

    def y(share: float) -> float:
        return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{title}</text>',
    ]
    for percent in range(0, 101, 20):
        at = y(percent / 100)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{percent} %</text>')
    parts += [f'<text x="{x(load):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{load:g}</text>' for load in loads]
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">load, as a part of what the fleet gets through</text>')
    ends: list[float] = []
    for name, points in sorted(lines.items(), key=lambda item: -item[1][-1][1] if item[1] else 0.0):
        if not points:
            continue
        path = " ".join(f"{x(load):.1f},{y(share):.1f}" for load, share in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[name]}" stroke-width="2.5"/>')
        parts += [
            f'<circle cx="{x(load):.1f}" cy="{y(share):.1f}" r="3.5" fill="{_COLOURS[name]}"/>'
            for load, share in points
        ]
        # Labels of lines that end together are moved apart.
        at = max([y(points[-1][1]) + 4, *(end + 15 for end in ends)])
        ends.append(at)
        parts.append(f'<text x="{_WIDTH - _RIGHT + 10}" y="{at:.1f}" fill="{_COLOURS[name]}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(paths: Sequence[str]) -> int:
    results = [result for path in paths for result in json.loads(Path(path).read_text())]
    if not results:
        print("no results", file=sys.stderr)
        return 2
    first = results[0]
    title = f"Served within the bound: {first['workload']}, {first['fleet']}"
    sys.stdout.write(chart(title, results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
