"""Cost of a scrape of the controller's metrics, beside a round over the same jobs.

    python -m benchmarks.controller.scrape [--nodes 1000] [--jobs 2000] [--blocks 5] [--json]

A synthetic busy cluster, as that of `round` beside this. Rounds and scrapes take turns in one
process, so that a busy machine slows both alike; a scrape goes over HTTP. CPU is that of the
process: of server and client. The scrape's text is counted, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import urllib.request
from collections.abc import Callable

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.metrics.metrics_server import MetricsServer
from slurm_elastic.controller.metrics.metrics_source import MetricsSource
from slurm_elastic.controller.metrics.metrics_text import MetricsText
from slurm_elastic.controller.queries.view import View
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import busy


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller.scrape")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args.nodes, args.jobs, args.blocks)
    if args.json:
        print(json.dumps(figures))
        return
    print(
        f"round {figures['round_cpu_s'] * 1000:.0f} ms of CPU, "
        f"scrape {figures['scrape_cpu_s'] * 1000:.1f} ms ({figures['scrape_s'] * 1000:.1f} ms of "
        f"wall clock, {figures['bytes'] / 1000:.0f} kB); scrape / round "
        f"{figures['least_ratio']:.4f} to {figures['most_ratio']:.4f}"
    )


def measure(nodes: int, jobs: int, blocks: int) -> dict[str, float]:
    """Return medians in seconds, and the least and the largest ratio of CPU in a block."""
    config, cluster = Config(), busy(nodes, jobs, seed=0)
    snapshot = cluster.snapshot()

    def decide() -> View:
        plan, _ = decide_round(
            snapshot, cluster.records, config=config, policy=FairShare(config), state={}
        )
        return View(snapshot=snapshot, plan=plan, records=cluster.records)

    source = MetricsSource(decide(), config, ActivityCounts(), "json")
    log = logging.getLogger("scrape")
    server = MetricsServer("127.0.0.1:0", MetricsText(lambda: source).render, log)
    server.start()
    host, port = server.address
    request = urllib.request.Request(
        f"http://{host}:{port}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    sizes: list[int] = []

    def scrape() -> None:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - http
            sizes.append(len(answer.read()))

    try:
        scrape()
        rounds, scrapes = [], []
        for _ in range(blocks):
            rounds.append(_timed(decide))
            scrapes.append(_timed(scrape))
    finally:
        server.stop()
    ratios = [s[1] / r[1] for r, s in zip(rounds, scrapes, strict=True)]
    return {
        "jobs": len(snapshot.jobs),
        "round_cpu_s": statistics.median(cpu for _, cpu in rounds),
        "scrape_cpu_s": statistics.median(cpu for _, cpu in scrapes),
        "scrape_s": statistics.median(wall for wall, _ in scrapes),
        "bytes": sizes[-1],
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of wall clock and of CPU that a call takes."""
    wall, cpu = time.monotonic(), time.process_time()
    call()
    return time.monotonic() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
