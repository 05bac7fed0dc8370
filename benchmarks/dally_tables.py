"""Reproduction of Dally's published results: `python -m benchmarks.dally_tables`.

Prints for each cluster, trace and policy ours beside what the author's simulator produced for the
same files (docs/data.md), then our own policy. `--main` runs p75g8 on A64 only;
`--decide` times one decision on 1,000 nodes with 1,000 waiting gangs, `--decide --rounds` that of
the live policy `dally` with as many waiting jobs, and the whole round; `--congestion` runs p75g8
on 32 nodes in four racks with the closed form of communication and the racks' uplinks at 1, 1/4
and 1/16.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings, SpeedupSettings
from slurm_elastic.core.plan import Measurement, Proposal
from slurm_elastic.models.communication import ClosedForm, Communication, GangLink, uplink_shares
from slurm_elastic.placement.delay.free_map import FreeMap, NodeLayout, Place
from slurm_elastic.placement.delay.timers import Timers
from slurm_elastic.policies.dally.dally import Dally
from slurm_elastic.policies.dally.gang import Gang
from slurm_elastic.policies.policy_protocol import Capabilities, Policy, Question
from slurm_elastic.round import decide_round
from slurm_elastic.simulator.gangs.gandiva import Gandiva
from slurm_elastic.simulator.gangs.gang_files import read_sites, read_slowdowns, read_workload
from slurm_elastic.simulator.gangs.gang_policy import GangPolicy, Held, Offer
from slurm_elastic.simulator.gangs.gang_results import GangResult
from slurm_elastic.simulator.gangs.gang_simulation import simulate_gangs
from slurm_elastic.simulator.gangs.own_dally import OwnDally
from slurm_elastic.simulator.gangs.published_dally import PublishedDally
from slurm_elastic.simulator.gangs.tiresias import Tiresias
from tests.support import published_data
from tests.support.decisions.synthetic_clusters import Cluster, node, racks

CLUSTERS = {"A64": "2x4x8", "B128": "2x8x8"}
LEASE_S = 3600.0
#: Label, name in the reference.
POLICIES = (
    ("dally auto", "dally-auto24"),
    ("dally 12,24", "dally-12-24"),
    ("dally full", "dally-full"),
    ("dally nowait", "dally-nowait"),
    ("tiresias", "tiresias"),
    ("tiresias-condfix", "tiresias-condfix"),
    ("gandiva", "gandiva-s0"),
    ("dally own", ""),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Arguments of one simulation; picklable."""

    cluster: str
    trace: str
    label: str
    theirs: str
    data: Path


def policy(label: str, communication: Communication) -> GangPolicy:
    """Return the policy of a label."""
    if label == "gandiva":
        return Gandiva()
    if label.startswith("tiresias"):
        return Tiresias(published=label == "tiresias")
    timers = label.removeprefix("dally ")
    if timers == "own":
        return OwnDally(communication, lease_s=LEASE_S)
    return PublishedDally(Timers.parse(timers, lease_s=LEASE_S))


def run(task: Run) -> tuple[Run, GangResult]:
    """Simulate it."""
    table = read_slowdowns(task.data / "reference" / "slowdown.csv")
    return task, simulate_gangs(
        read_workload(task.data / "workloads" / f"{task.trace}.csv"),
        read_sites(CLUSTERS[task.cluster], slots=2),
        table,
        policy(task.label, table),
        name=task.label,
        lease_s=LEASE_S,
    )


def equal_jobs(task: Run, result: GangResult) -> str:
    """Return the number of gangs that end at exactly the same time; "" without a row for each."""
    path = task.data / "reference" / f"{task.trace}-{task.theirs}.csv"
    if task.cluster != "A64" or not path.is_file():
        return ""
    with path.open(newline="") as lines:
        theirs = {row["job_id"]: float(row["finish"]) for row in csv.DictReader(lines)}
    return f"{sum(theirs[j.name] == j.finish_s for j in result.jobs)}/{len(result.jobs)}"


def row(task: Run, result: GangResult, theirs: Mapping[str, str] | None) -> str:
    """Return one line of the table: our figures, and those of the reference in brackets."""
    s = result.summary()
    shares = "/".join(f"{s[f'share_{t}_2_8']:.2f}" for t in ("node", "rack", "network"))
    cells = [
        (f"{s['avg_jct_h']:.2f}", "avg_jct_h", ".4g"),
        (f"{s['p99_jct_h']:.1f}", "p99_jct_h", ".4g"),
        (f"{s['avg_queue_h']:.2f}", "avg_queue_h", ".4g"),
        (f"{s['comm_gpu_h']:.0f}", "comm_gpu_h", ".5g"),
        (f"{s['comm_share_2_8']:.4f}", "comm_share_g2_8", ".4g"),
    ]
    texts = [
        own + (f" [{float(theirs[key]):{form}}]" if theirs else "") for own, key, form in cells
    ]
    if theirs:
        known = "/".join(f"{float(x):.2f}" for x in theirs["tier_share_g2_8"].split("/"))
        shares += f" [{known}]"
    words = [task.cluster, task.trace, task.label, *texts, shares, equal_jobs(task, result)]
    return f"| {' | '.join(words)} |"


def table(done: Sequence[tuple[Run, GangResult]], data: Path) -> str:
    """Return all runs as Markdown."""
    with (data / "reference" / "summary.csv").open(newline="") as lines:
        known = {(r["cluster"], r["trace"], r["policy"]): r for r in csv.DictReader(lines)}
    heads = (
        "cluster", "trace", "policy", "avg JCT h", "p99 h", "queue h", "comm GPU h",
        "comm share 2-8", "node/rack/network", "equal jobs",
    )  # fmt: skip
    rows = [row(t, r, known.get((f"{t.cluster}fix", t.trace, t.theirs))) for t, r in done]
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows])


def decide(nodes: int, waiting: int, seed: int = 0) -> tuple[float, int]:
    """Return CPU seconds and grants of one decision of our policy on a half-used cluster."""
    draw = random.Random(seed)
    sites = NodeLayout.regular(racks=nodes // 25, nodes=25, gpus=8, domains=2)
    room, running = FreeMap(sites), dict[int, Held]()
    for domain in range(len(sites.size)):
        taken = draw.randint(0, sites.size[domain])
        if taken:
            place: Place = ((domain, taken),)
            room.take(place)
            running[-domain] = Held(_gang(-domain, taken, draw), place, draw.uniform(1e5, 1.1e5))
    gangs = [_gang(i, draw.choice((1, 1, 2, 4, 8, 16, 32, 64)), draw) for i in range(waiting)]
    link = GangLink(bytes_s=1e11)
    own = OwnDally(
        ClosedForm(
            compute_s={f"m{i}": 0.1 for i in range(6)},
            gradient_bytes={f"m{i}": 1e8 * (i + 1) for i in range(6)},
            domain=link,
            node=link,
            rack=GangLink(bytes_s=1.2e10),
            spine=GangLink(bytes_s=3e9),
        ),
        lease_s=LEASE_S,
    )
    offer = Offer(now_s=1e5, waiting=sorted(gangs, key=own.rank), room=room, running=running)
    own.decide(offer, {})
    begin = time.process_time()
    answer = own.decide(offer, {})
    return time.process_time() - begin, len(answer.grants)


#: Bytes of gradients per step, fp32: parameters of the public models (torchvision; BERT-large).
GRADIENT_BYTES = {
    "AlexNet": 4 * 61.1e6,
    "BERT": 4 * 335e6,
    "MobileNetV3": 4 * 5.48e6,
    "ResNet18": 4 * 11.7e6,
    "ResNet50": 4 * 25.6e6,
    "VGG": 4 * 132.9e6,
}
#: Invented: seconds of a step on one GPU.
STEP_S = {
    "AlexNet": 0.05,
    "BERT": 0.60,
    "MobileNetV3": 0.08,
    "ResNet18": 0.06,
    "ResNet50": 0.18,
    "VGG": 0.25,
}


def congested(congestion: float) -> ClosedForm:
    """Return link costs: NVLink, 100 Gbit/s per GPU in a rack, 10 between racks, shared."""
    return ClosedForm(
        compute_s=STEP_S,
        gradient_bytes=GRADIENT_BYTES,
        domain=GangLink(bytes_s=100e9),
        node=GangLink(bytes_s=16e9, latency_s=5e-6),
        rack=GangLink(bytes_s=12.5e9, latency_s=10e-6),
        spine=GangLink(bytes_s=1.25e9, latency_s=50e-6),
        uplink_share=uplink_shares({"uplink": 1}, congestion=congestion)["uplink"],
    )


def congestion_run(task: tuple[str, float, str, Path]) -> str:
    """Return one line of the table of congestion."""
    label, congestion, trace, data = task
    communication = congested(congestion)
    s = simulate_gangs(
        read_workload(data / "workloads" / f"{trace}.csv"),
        read_sites("4x8x2", slots=1),
        communication,
        policy(label, communication),
        name=label,
        lease_s=LEASE_S,
    ).summary()
    shares = "/".join(f"{s[f'share_{t}_2_8']:.2f}" for t in ("node", "rack", "network"))
    return (
        f"| {trace} | 1/{congestion:g} | {label} | {s['avg_jct_h']:.2f} | {s['p99_jct_h']:.1f} |"
        f" {s['avg_queue_h']:.2f} | {s['comm_gpu_h']:.0f} | {shares} |"
    )


def busy_cluster(nodes: int, waiting: int, *, free: float, seed: int = 0) -> Cluster:
    """Return nodes of 8 GPUs, mostly used by elastic and rigid gangs, with elastic ones waiting.

    Half of the gangs that run and a fifth of those that wait have measured speeds of their own.
    """
    draw = random.Random(seed)
    members = [node(f"n{i:04d}", 8) for i in range(nodes)]
    cluster = Cluster(members, switches=racks([n.name for n in members], 25))
    job_id = 0
    for member in members:
        left = 8
        while left and draw.random() > free:
            job_id += 1
            size = min(left, draw.choice((1, 2, 4, 4, 8)))
            left -= size
            began = cluster.time - draw.uniform(100, 10_000)
            elastic = f"{max(1, size // 2)}-{2 * size}" if draw.random() < 0.5 else str(size)
            known = {"last_change": began, "progress": draw.random(), **_measured(draw, size, 0.5)}
            cluster.add(
                job_id, elastic=elastic, on={member.name: size}, start_time=began, record=known
            )
    for extra in range(waiting):
        size = draw.choice((1, 1, 2, 4, 8, 16, 32, 64))
        elastic = f"{max(1, size // 4)}-{size}" if draw.random() < 0.5 else str(size)
        cluster.add(
            job_id + extra + 1,
            elastic=elastic,
            gpus=size,
            submit_time=cluster.time - draw.uniform(0, 20_000),
            time_limit_s=int(draw.uniform(1e3, 1e6)),
            record=_measured(draw, size, 0.2),
        )
    return cluster


def _measured(draw: random.Random, gpus: int, part: float) -> dict[str, object]:
    if draw.random() > part:
        return {}
    rate = 100 * draw.random() * gpus ** draw.uniform(0.7, 0.98)
    measurement = Measurement(
        gpu_type="a100", gpus=gpus, nodes=-(-gpus // 8), samples_per_s=rate, steps=100
    )
    return {"measurements": (measurement,)}


def decide_live(nodes: int, waiting: int, *, free: float) -> tuple[float, float, dict[str, int]]:
    """Return CPU seconds of one live decision and of its whole round, and the changes."""
    cluster = busy_cluster(nodes, waiting, free=free)
    settings = Config(
        controller=ControllerSettings(queue="controller", policy="dally"),
        resize=ResizeSettings(min_interval_s=0.0),
        speedup=SpeedupSettings(loss_across_nodes=0.2),
    )
    timed = Timed(Dally(settings))
    snapshot = cluster.snapshot()
    begin = time.process_time()
    plan, _ = decide_round(snapshot, cluster.records, config=settings, policy=timed, state={})
    seconds = time.process_time() - begin
    return timed.cpu_s, seconds, dict(Counter(d.action.value for d in plan.changes))


class Timed:
    """Policy whose decisions are timed."""

    capabilities = Capabilities(binding_proposals=True, batch_chosen_by="user")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.cpu_s = 0.0

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Ask it."""
        begin = time.process_time()
        answer = self._policy.decide(question, state)
        self.cpu_s += time.process_time() - begin
        return answer


def _gang(job_id: int, gpus: int, draw: random.Random) -> Gang:
    since = draw.uniform(0, 1e5)
    return Gang(
        job_id=job_id,
        model=f"m{draw.randrange(6)}",
        gpus=gpus,
        arrival_s=since,
        since_s=since,
        ideal_s=draw.uniform(1e3, 1e6),
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dally_tables", description=__doc__)
    parser.add_argument("--main", action="store_true", help="p75g8 on A64 only")
    parser.add_argument("--decide", action="store_true", help="time one large decision only")
    parser.add_argument("--rounds", action="store_true", help="of the live policy, with --decide")
    parser.add_argument("--congestion", action="store_true", help="uplinks at 1, 1/4, 1/16 only")
    parser.add_argument("--policies", nargs="+", help="labels, e.g. 'dally own'")
    parser.add_argument("--processes", type=int, default=2)
    published_data.add_option(parser)
    options = parser.parse_args()
    if options.rounds:
        for nodes, waiting, free in ((100, 100, 0.1), (1000, 1000, 0.1), (1000, 1000, 0.5)):
            policy_s, round_s, changes = decide_live(nodes, waiting, free=free)
            print(
                f"{nodes} nodes x 8, {waiting} waiting, {free:.0%} a chance of idle GPUs:"
                f" {policy_s:.3f} s CPU, whole round {round_s:.3f} s; {changes}"
            )
        return
    if options.decide:
        for nodes, waiting in ((100, 100), (1000, 1000)):
            seconds, grants = decide(nodes, waiting)
            print(f"{nodes} nodes x 8, {waiting} waiting: {seconds:.3f} s CPU, {grants} start")
        return
    needed = ["workloads"] if options.congestion else ["workloads", "reference"]
    data = published_data.locate_or_exit(parser, options, "dally", *needed)
    if options.congestion:
        labels = options.policies or [x for x, _ in POLICIES if x not in ("gandiva", "tiresias")]
        cases = [
            (label, congestion, trace, data)
            for trace in ("p75g8",)
            for congestion in (1.0, 4.0, 16.0)
            for label in labels
        ]
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            print("\n".join(pool.imap(congestion_run, cases)))
        return
    traces = [("A64", "p75g8")]
    if not options.main:
        traces += [(c, t) for c in CLUSTERS for t in ("p25", "p75", "batch")]
    todo = [
        Run(cluster=c, trace=t, label=label, theirs=theirs, data=data)
        for c, t in traces
        for label, theirs in POLICIES
        if not options.policies or label in options.policies
    ]
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        done = list(pool.imap(run, todo))
    print(table(done, data))
    print(f"{len(done)} simulations in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
