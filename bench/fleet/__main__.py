"""`python -m bench.fleet --hours 48`: four models on sixteen unlike engines of both families, in virtual time.

Load goes up and down with the day, engines crash, lose events, are throttled, and are replaced by other versions. All
is told by the seed: the same command gives the same figures, but for the CPU time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.fleet.plan import fleet_pools, make_plan
from bench.fleet.report import report, show
from bench.fleet.world import World

SEED = 20261130


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--hours", type=float, default=48.0, help="simulated")
    parser.add_argument("--day-hours", type=float, default=24.0, help="a day of load and of troubles takes so long")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--pools", nargs="+", choices=[pool.name for pool in fleet_pools()], help="only these")
    parser.add_argument("--bypass", type=float, default=0.0, help="share of requests that do not come through Headway")
    parser.add_argument("--calm", action="store_true", help="nothing fails and nothing is rolled out")
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    parser.add_argument("--requests", type=Path, help="every request as a line of JSON")
    chosen = parser.parse_args(arguments)
    for name in ("hours", "day_hours"):
        if not getattr(chosen, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {getattr(chosen, name):g}")
    if not 0 <= chosen.bypass < 1:
        parser.error(f"--bypass must be a share from 0 to below 1, not {chosen.bypass:g}")
    pools = tuple(pool for pool in fleet_pools() if chosen.pools is None or pool.name in chosen.pools)
    world = World(
        make_plan(pools, chosen.hours, chosen.day_hours, chosen.seed, chosen.calm), chosen.seed, chosen.bypass
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    title = f"seed {chosen.seed}, commit {commit.stdout.strip() or 'unknown'}"
    print(f"{title}, {chosen.hours:g} h in days of {chosen.day_hours:g} h", flush=True)
    for name, count in world.counts.items():
        print(f"  {name}: capacity {count.capacity_per_s:.2f} requests/s", flush=True)

    def on_hour(hour: int) -> None:
        show(f"after {hour} h, {time.process_time():.0f} s of CPU", report(world).pools)

    world.run(on_hour)
    found, cpu_s = report(world), time.process_time()
    show(f"{title}: {found.hours:.1f} h", found.pools)
    print(f"what happened: {', '.join(f'{what} {count}' for what, count in sorted(found.done.items()))}")
    print("busy: " + ", ".join(f"{name} {share:.0%}" for name, share in found.busy.items()))
    print(
        f"CPU per simulated hour: {cpu_s / found.hours:.0f} s, "
        f"of which Headway {found.headway_cpu_s / found.hours:.0f} s"
    )
    if chosen.out is not None:
        chosen.out.write_text(json.dumps({"seed": chosen.seed, "bypass": chosen.bypass, **found.plain()}, indent=1))
    if chosen.requests is not None:
        with chosen.requests.open("w") as lines:
            for one in world.judged:
                lines.write(json.dumps({"pool": one.pool, "at_s": one.at_s, **asdict(one.outcome)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
