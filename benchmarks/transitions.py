"""Many resizes on 64 nodes, while other jobs wait for every GPU that becomes free.

    python -m benchmarks.transitions [--count 20] [--rivals 100] [--deaf 0.0] [--seed 1]
                                     [--json] [--keep] [--cluster farm64]

The cluster is full. Pairs of elastic jobs hold some of its nodes and are moved among them, all at
once, as often as needed, while one-GPU jobs of another user wait for any GPU that becomes free. The
jobs (drivers/busy_job.sh) save on a notice and continue from their save; `--deaf` is the share of
notices that a job ignores: those transitions must be rolled back.

Prints how many transitions finished and how many were rolled back, how long Slurm's part took, and
what Slurm alone shows: jobs that lost work, rivals that got onto the jobs' nodes (only after an
ignored notice may that happen; a job whose old place is taken goes back into the queue), and what
was left behind. Exit code 1 if anything was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import threading
from collections import Counter
from typing import Any

from benchmarks.resize import on_cluster, place_driver, quantile
from benchmarks.simulated_users import USERS_DIR, SimulatedUsers, cluster_command
from slurm_elastic.core.reason import Reason, log_form

#: Jobs at most, two a node.
MOVERS = 32
TOP_UP_S = 5.0
#: Of movers; it has to be there afterwards.
NICE = 7
_QUIET = ("-o", "/dev/null", "--mem-per-gpu=100", "--open-mode=append")


class Bench:
    """One run on a cluster that is up.

    Args:
        cluster: of 64 nodes of four GPUs.
        users: alice's jobs move, bob's are in the way.
        args: see `main`.
    """

    def __init__(self, cluster: str, users: SimulatedUsers, args: argparse.Namespace) -> None:
        self.cluster, self.users, self.args = cluster, users, args
        names = on_cluster(cluster, "sinfo", "-hN", "-o", "%N").split()
        self.nodes = sorted(names)
        self.own = self.nodes[: max(1, min(MOVERS, args.count) // 2)]
        self.movers: list[int] = []
        self.asked: dict[int, str] = {}  # the node that a mover's user has named
        self.stolen: set[str] = set()
        self._stop = threading.Event()

    def run(self) -> dict[str, Any]:
        """Fill the cluster, deal, look.

        Returns:
            `rows`, a transition each; `attempts`, see `simulated_users.judged`; `left`, what should
            not exist afterwards; `stolen`, rivals on the movers' nodes.
        """
        self.users.report(deaf=self.args.deaf)
        self.movers = [self._mover(node, i) for node in self.own for i in range(2)]
        fill = "; ".join(self._sbatch("filler", 4, 90 + i) for i in range(len(self._others())))
        on_cluster(self.cluster, "sh", "-c", f"cd /tmp; {fill}", user="bob")
        self._wait()
        self._top_up()
        rivals = threading.Thread(target=self._rivals, daemon=True)
        rivals.start()
        try:
            rows = self._deal()
        finally:
            self._stop.set()
            rivals.join(60)
        self._all_run_again()
        left = self._left()
        return {
            "rows": rows,
            "attempts": self.users.attempts(),
            "left": left,
            "stolen": sorted(self.stolen),
        }

    def _others(self) -> list[str]:
        return [n for n in self.nodes if n not in self.own]

    def _mover(self, node: str, number: int) -> int:
        environment = f"WORK=100000000 JOBS_DIR={USERS_DIR}/alice"
        name = f"--job-name=m{node}{number}"
        words = ["sbatch", "--parsable", "--gres=gpu:2", "-N1", "-w", node, name]
        words += ["--elastic=1-4", f"--nice={NICE}", *_QUIET]
        command = f"{environment} {' '.join(words)} {USERS_DIR}/busy_job.sh"
        job_id = int(on_cluster(self.cluster, "sh", "-c", command, user="alice").split()[-1])
        self.asked[job_id] = node
        return job_id

    @staticmethod
    def _sbatch(name: str, gpus: int, seconds: int) -> str:
        quiet = " ".join(_QUIET)
        return f"sbatch -Q --gres=gpu:{gpus} {quiet} --job-name={name} --wrap 'sleep {seconds}'"

    def _wait(self) -> None:
        """Wait until all moving jobs run and no job waits."""
        movers = "$(squeue -h -t R -u alice | wc -l)"
        check = f'[ {movers} -eq {len(self.movers)} ] && [ -z "$(squeue -h -t PD)" ]'
        script = f"for _ in $(seq 600); do {check} && exit; sleep 0.2; done; exit 1"
        on_cluster(self.cluster, "sh", "-c", script)

    def _top_up(self) -> None:
        """Submit as many rivals as are missing."""
        listed = on_cluster(self.cluster, "squeue", "-h", "-n", "rival", "-t", "PD", "-o", "%i")
        missing = self.args.rivals - len(listed.split())
        if missing > 0:
            submit = self._sbatch("rival", 1, 60)
            loop = f"cd /tmp; for _ in $(seq {missing}); do {submit}; done"
            on_cluster(self.cluster, "sh", "-c", loop, user="bob")

    def _rivals(self) -> None:
        """Keep them coming, and see where they run. One lasts longer than the looks are apart."""
        while not self._stop.wait(TOP_UP_S):
            with contextlib.suppress(SystemExit):
                self._look_for_thieves()
                self._top_up()

    def _all_run_again(self) -> None:
        """Wait until jobs that went back into the queue run again, now without rivals."""
        listed = ",".join(map(str, self.movers))
        check = f"[ $(squeue -h -t R -j {listed} | wc -l) = {len(self.movers)} ]"
        script = f"for _ in $(seq 200); do {check} && exit; sleep 1; done; true"
        on_cluster(self.cluster, "scancel", "-u", "bob", "-n", "rival")
        on_cluster(self.cluster, "sh", "-c", script)

    def _look_for_thieves(self) -> None:
        words = ("squeue", "-h", "-t", "R", "-u", "bob", "-o", "%i %N")
        for line in on_cluster(self.cluster, *words).splitlines():
            job, node = line.split()
            if node in self.own:
                self.stolen.add(f"{job} on {node}")

    def _deal(self) -> list[dict[str, Any]]:
        driver = place_driver(self.cluster, "random_moves.py", USERS_DIR)
        words = [driver, "--jobs", json.dumps(self.movers)]
        words += ["--count", str(self.args.count), "--seed", str(self.args.seed)]
        words += ["--notice", str(self.args.notice)]
        process = self.users.spawn("selastic", *words)
        assert process.stdout is not None
        rows = []
        for line in process.stdout:
            rows.append(json.loads(line))
            _say(f"{len(rows)} of {self.args.count} transitions ended")
        if process.wait():
            sys.exit("benchmarks: the driver gave up, see above")
        self._look_for_thieves()
        return rows

    def _left(self) -> list[str]:
        """Return what slurmctld shows that must not exist after the last transition."""
        leftovers = []
        reservations = json.loads(on_cluster(self.cluster, "scontrol", "show", "res", "--json"))
        leftovers += [f"reservation {r['name']}" for r in reservations["reservations"]]
        shown = json.loads(on_cluster(self.cluster, "scontrol", "show", "job", "--json"))["jobs"]
        jobs = {j["job_id"]: j for j in shown}
        for job_id in self.movers:
            job = jobs.get(job_id)
            if job is None or job["job_state"] not in (["RUNNING"], ["PENDING"]):
                leftovers.append(f"job {job_id} is {job and job['job_state']}")
                continue
            leftovers += [f"job {job_id}: {what}" for what in _marks(job, self.asked[job_id])]
        for job in shown:
            if job["user_name"] == "bob" and (job["restart_cnt"] or job["required_nodes"]):
                leftovers.append(f"job {job['job_id']} of another user was touched")
        return leftovers


def _marks(job: dict[str, Any], asked: str) -> list[str]:
    """Return the changes of ours on a job; a running one's node list is cleared once it is pending.

    Args:
        job: as slurmctld shows it.
        asked: the node that its user has named: others may fill it, and then it waits.
    """
    marks = []
    if job["nice"] != NICE:
        marks.append(f"nice {job['nice']}")
    if job["priority"]["number"] >= 2**31:
        marks.append(f"priority {job['priority']['number']}")
    if job["resv_name"]:
        marks.append(f"reservation {job['resv_name']}")
    if job["hold"]:
        marks.append("held")
    if job["state_reason"] not in ("None", "", "Resources", "Priority"):
        marks.append(f"reason {job['state_reason']}")
    if set(filter(None, job["required_nodes"].split(","))) - {asked, *job["nodes"].split(",")}:
        marks.append(f"pinned to {job['required_nodes']} and runs on {job['nodes']}")
    return marks


def _problem(row: dict[str, Any]) -> str:
    """Return the reason for which a transition did not reach its target."""
    return log_form(Reason.from_json(row["problem"]))


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run; `other` counts transitions neither finished nor rolled back."""
    rows = run["rows"]
    states = Counter(r["state"] for r in rows)
    parts = {
        part: [r["seconds"][part] for r in rows if r["state"] == "DONE" and r["seconds"][part]]
        for part in ("checkpoint", "slurm", "total")
    }
    return {
        "count": len(rows),
        "landed": states["DONE"],
        "rolled_back": states["UNDONE"],
        "other": len(rows) - states["DONE"] - states["UNDONE"],
        "seconds": {
            part: {"p50": statistics.median(v), "p95": quantile(v, 0.95), "max": max(v)}
            for part, v in parts.items()
            if v
        },
        "problems": dict(Counter(_problem(r) for r in rows if r["state"] != "DONE")),
        **{k: run[k] for k in ("attempts", "left", "stolen")},
    }


def clean(found: dict[str, Any]) -> bool:
    """Return whether nothing happened that must not."""
    stolen = found["stolen"] and not found["rolled_back"]
    return not (found["other"] or found["attempts"]["lost"] or found["left"] or stolen)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Measure and print; exit code 1 when a job did not land and was not rolled back cleanly."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transitions")
    parser.add_argument("--count", type=int, default=20, help="at least so many transitions")
    parser.add_argument("--rivals", type=int, default=100)
    parser.add_argument("--deaf", type=float, default=0.0, help="share of notices not answered")
    parser.add_argument("--notice", type=float, default=10.0, help="seconds that jobs have to save")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--cluster", default="farm64")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.count < 2 or not 0 <= args.deaf < 1:
        parser.error("--count must be 2 or more, --deaf from 0 to below 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = cluster_command(args.cluster)
    try:
        subprocess.run([*command, "up", "--farm", "64"], check=True, stdout=subprocess.DEVNULL)
        with SimulatedUsers(args.cluster, users=2) as users:
            run = Bench(args.cluster, users, args).run()
    except KeyboardInterrupt:
        sys.exit("benchmarks: interrupted")
    finally:
        if not args.keep:
            subprocess.run([*command, "down"], check=False, stdout=subprocess.DEVNULL)
    row = figures(run)
    if args.json:
        print(json.dumps({**row, "rows": run["rows"]}))
    else:
        print(f"{row['count']} transitions: {row['landed']} landed, {row['rolled_back']} "
              f"rolled back, {row['other']} else; {args.rivals} rivals pending")  # fmt: skip
        for part, v in row["seconds"].items():
            line = f"{part}: p50 {v['p50']:.2f} s, p95 {v['p95']:.2f} s, max {v['max']:.2f} s"
            print(f"  {line}")
        print(f"  jobs: {row['attempts']}; stolen: {row['stolen']}; left: {row['left']}")
        print(f"  rolled back because: {row['problems']}")
    sys.exit(0 if clean(row) else 1)


if __name__ == "__main__":
    main()
