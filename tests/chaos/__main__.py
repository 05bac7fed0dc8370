"""Command line of the fault campaign: `python -m tests.chaos`, as `make chaos` calls it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.campaign import Campaign
from tests.chaos.load import HOME
from tests.chaos.schedule import KINDS, LAYOUTS, Schedule, schedule
from tests.chaos.script_histories import MANNERS
from tests.support.container_cluster.slurm_cluster import CLUSTER_DIR, SlurmCluster

#: Beside selasticd's log: file → command that prints it, on `ctld`.
EVIDENCE = {
    "slurmctld.log": "cat /var/log/slurm/slurmctld.log",
    "sacct.txt": "sacct -aDXP -S now-3hours -o JobID,JobName,State,ExitCode,Start,End",
}
SLURMD_LOG = "cat /var/log/slurm/slurmd-*.log"
UP = ("up", "--small-disk", "32", "--conf", "RequeueExit=137")


def main() -> int:
    """Return 0: no rule was broken; 1: at least one; 2: wrong usage or an error of the campaign."""
    args = _arguments()
    try:
        plan = schedule(
            args.seed,
            args.minutes,
            only=args.only,
            manners=args.manner,
            layouts=args.layout,
            sleep=args.sleep,
        )
    except ValueError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    print("\n".join(plan.lines()), flush=True)
    if args.plan:
        return 0
    # Ctrl-C and a CI's SIGTERM leave nothing behind either.
    signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    try:
        done = _cluster(args.name, *UP, "--nodes", str(len(plan.nodes)))
        return done or _campaign(args, plan)
    except KeyboardInterrupt:
        print("chaos: interrupted", file=sys.stderr)
        return 130
    finally:
        if not args.keep:
            _cluster(args.name, "down")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _cluster(name: str, *words: str) -> int:
    """Run `contrib/cluster/cluster` in a new session: Ctrl-C is for the campaign only."""
    command = [str(CLUSTER_DIR / "cluster"), "--name", name, *words]
    return subprocess.run(command, check=False, start_new_session=True).returncode


def _campaign(args: argparse.Namespace, plan: Schedule) -> int:
    begun = time.time()

    def say(text: str) -> None:
        print(f"{time.time() - begun:7.1f} s  {text}", flush=True)

    campaign = Campaign(SlurmCluster(args.name), plan, say)
    slurm = campaign.cluster.exec(["scontrol", "--version"]).stdout.split()[-1]
    record = {"commit": _commit(), "slurm": slurm} | campaign.run()
    if args.evidence:
        _keep(campaign, args.evidence)
    if args.results:
        short = json.loads(json.dumps(record), parse_float=lambda x: round(float(x), 1))
        with args.results.open("a") as file:
            file.write(json.dumps(short) + "\n")
    for breach in record["breaches"]:
        print(f"BROKEN {breach['rule']}: {breach['who']}: {breach['text']}")
    print(
        f"seed {plan.seed}: {record['jobs']} jobs, {len(record['faults'])} faults, transitions "
        f"{record['transitions']}, {record['lost_steps']} steps computed again, "
        f"{len(record['breaches'])} invariants broken, {len(record['troubles'])} troubles"
    )
    if record["breaches"]:
        return 1
    return 2 if record["troubles"] else 0


def _keep(campaign: Campaign, folder: Path) -> None:
    """Save the logs that show how a rule was broken."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "selasticd.log").write_text(campaign.log)
    printed = [(name, "ctld", command) for name, command in EVIDENCE.items()]
    printed += [(f"slurmd-{node}.log", node, SLURMD_LOG) for node in campaign.plan.nodes]
    for name, node, command in printed:
        text = campaign.cluster.exec(command, node=node, check=False).stdout
        (folder / name).write_text(text)
    jobs = campaign.cluster.exec(f"cd {HOME} && tail -n +1 */log", check=False).stdout
    (folder / "jobs.log").write_text(jobs)


def _commit() -> str:
    """Return the commit of the tree under test, with a `+` if it has changes."""
    words = ["git", "-C", str(CLUSTER_DIR), "describe", "--always", "--dirty=+", "--abbrev=7"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make chaos ARGS=…",
        description="Random faults at random times, and rules that must hold throughout.",
        epilog=f"Kinds of fault: {', '.join(KINDS)}.",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="replays a campaign (%(default)s)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="KIND", help="of fault; may be repeated"
    )
    parser.add_argument(
        "--manner",
        action="append",
        default=[],
        help=f"mostly unmodified scripts that save so: {', '.join(MANNERS)}; may be repeated",
    )
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        help=f"mostly trainings of that layout: {', '.join(LAYOUTS)}; may be repeated",
    )
    parser.add_argument(
        "--sleep", action="store_true", help="selasticd switches idle nodes off; fewer jobs"
    )
    parser.add_argument("--plan", action="store_true", help="print the schedule and do nothing")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append a line of JSON")
    parser.add_argument(
        "--evidence",
        type=Path,
        metavar="DIR",
        help="keep the logs of daemons and jobs, and sacct's rows there",
    )
    parser.add_argument(
        "--name",
        default=os.environ.get("SELASTIC_CLUSTER", "chaos"),
        help="of the cluster, which is started and removed (%(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="let the cluster stay up")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
