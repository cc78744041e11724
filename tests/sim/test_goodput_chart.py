"""The chart of the goodput benchmark."""

import xml.etree.ElementTree as ET
from typing import Any

from bench.goodput.__main__ import best_limit_only
from bench.goodput.chart import chart


def result(policy: str, load: float, served: float) -> dict[str, Any]:
    return {"policy": policy, "load": load, "served": served}


RESULTS = [
    *(result("Headway", load, 1.0 - load / 10) for load in (1.0, 2.0)),
    *(result("least request, at most 8", load, 0.5) for load in (1.0, 2.0)),
    *(result("least request, at most 16", load, load * 0.4) for load in (1.0, 2.0)),
]


def test_of_the_limits_the_best_of_each_load_is_kept() -> None:
    assert [r["policy"] for r in best_limit_only([r for r in RESULTS if r["load"] == 1.0])] == [
        "Headway",
        "least request, at most 8",
    ]
    assert [r["policy"] for r in best_limit_only([r for r in RESULTS if r["load"] == 2.0])] == [
        "Headway",
        "least request, at most 16",
    ]


def test_every_policy_has_a_line_with_a_point_for_each_load_and_the_better_is_higher() -> None:
    root = ET.fromstring(chart("trace & more".replace("&", "and"), RESULTS))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    points = [[tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in lines]
    assert [len(line) for line in points] == [2, 2]
    (_, ours), (_, limited) = points[0][0], points[1][0]
    assert ours < limited
    assert points[0][0][0] < points[0][1][0]
