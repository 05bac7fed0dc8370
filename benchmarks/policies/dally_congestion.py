"""Elastic jobs on congested uplinks: `python -m benchmarks.policies.dally_congestion`.

Sia's published workloads (docs/data.md) on 32 nodes of four `aws` GPUs in racks of
eight, under policy sia, with plain placement and with `[placement] mode = "delay"`, the racks'
uplinks at 1, 1/4 and 1/16 (simulator/truth/rack_network.py says what crossing them costs).
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

from slurm_elastic.config.placement_settings import PlacementSettings
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.policies.policy_protocol import load
from slurm_elastic.simulator.simulation import simulate
from slurm_elastic.simulator.truth.rack_network import Network
from slurm_elastic.simulator.workloads import application_profiles, cluster_text, workload
from tests.support import published_data

CLUSTER = "aws:32x4"
RACK_NODES = 8
#: Of one rack: 40 Gbit/s.
UPLINK_BYTES_S = 5e9
#: fp32 parameters of the public models: ResNet18 for CIFAR, BERT-base, Deep Speech 2 (its
#: paper's smallest), ResNet50, YOLOv3.
GRADIENT_BYTES = {
    "cifar10": 4 * 11.2e6,
    "bert": 4 * 110e6,
    "deepspeech2": 4 * 38e6,
    "imagenet": 4 * 25.6e6,
    "yolov3": 4 * 61.9e6,
}

#: `no wait` only looks for nodes of one rack first, and moves jobs together.
PLACEMENTS = {
    "near": PlacementSettings(),
    "nowait": PlacementSettings(mode="delay", timers="nowait"),
    "fixed": PlacementSettings(mode="delay", timers="fixed"),
    "own": PlacementSettings(mode="delay", timers="own"),
    "auto": PlacementSettings(mode="delay", timers="auto"),
    "full": PlacementSettings(mode="delay", timers="full"),
}

Case = tuple[str, float, str, Path]


def run(case: Case) -> str:
    """Return one line of the table."""
    name, congestion, mode, data = case
    trace, index = name.rsplit("-", 1)
    cluster = cluster_text.parse(CLUSTER)
    jobs = workload.read(data / "workloads" / trace / f"workload-{index}.csv")
    config = Config(
        controller=ControllerSettings(policy="sia", queue="controller"), placement=PLACEMENTS[mode]
    )
    result = simulate(
        jobs,
        application_profiles.read(data / "traces", jobs.applications, cluster.types),
        cluster,
        config=config,
        policy=load(config),
        network=Network(
            rack_nodes=RACK_NODES,
            uplink_bytes_s=UPLINK_BYTES_S,
            gradient_bytes=GRADIENT_BYTES,
            congestion=congestion,
        ),
    )
    s = result.summary()
    return (
        f"| {name} | 1/{congestion:g} | {mode} | {s['avg_jct_h']:.3f} |"
        f" {s['p99_jct_h']:.2f} | {result.crossing_gpu_s / 3600:.1f} |"
        f" {s['gpu_h_per_job'] * s['jobs']:.0f} | {s['restarts_per_job']:.2f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies.dally_congestion", description=__doc__
    )
    parser.add_argument(
        "--workloads", nargs="+", default=["philly-1", "philly-2"], metavar="TRACE-N"
    )
    parser.add_argument("--uplinks", nargs="+", type=float, default=[1.0, 4.0, 16.0])
    parser.add_argument("--modes", nargs="+", choices=PLACEMENTS, default=["near", "nowait", "own"])
    parser.add_argument("--processes", type=int, default=2)
    published_data.add_option(parser)
    options = parser.parse_args()
    data = published_data.locate_or_exit(parser, options, "sia", "traces", "workloads")
    cases: list[Case] = [
        (name, congestion, mode, data)
        for name in options.workloads
        for congestion in options.uplinks
        for mode in options.modes
    ]
    began = time.perf_counter()
    heads = ("workload", "uplink", "placement", "avg JCT h", "p99 h", "crossing GPU h", "GPU h")
    print(f"| {' | '.join(heads)} | restarts |")
    print("|---" * (len(heads) + 1) + "|")
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for line in pool.imap(run, cases):
            print(line, flush=True)
    print(f"{len(cases)} simulations in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
