"""Many changes on 64 nodes, while other jobs wait for every GPU that becomes free.

    python -m benchmarks.transitions [--kind in-place|requeue] [--count 20] [--rivals 100]
                                     [--deaf 0.0] [--seed 1] [--json] [--keep] [--cluster farm64]

The cluster is full. Pairs of elastic jobs hold some of its nodes and are moved among them, all at
once, as often as needed, while one-GPU jobs of another user wait for any GPU that becomes free. The
jobs (support/busy_job.sh) save on a notice and continue from their save; `--deaf` is the share of
notices that a job ignores: those transitions must be rolled back.

With `--kind in-place` the jobs are light trainings under esrun (tests/support/light_training) with
one GPU each. Half of them have a companion with two more, which it gives to one of the others, all
at once, as often as needed.

Prints how many transitions finished and how many were rolled back, how long Slurm's part took, and
what Slurm alone shows: jobs that lost work, rivals that got onto the jobs' nodes (only after an
ignored notice may that happen; a job whose old place is taken goes back into the queue), and what
was left behind. Exit code 1 if anything was. slurmctld's CPU time is that during the changes, and
in the half minute before them, with the same jobs.
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
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.container_commands import cluster_command, on_cluster, place_driver
from benchmarks.support.quantiles import quantile
from benchmarks.support.simulated_users import USERS_DIR, SimulatedUsers
from slurm_elastic.core.reason import Reason, log_form
from slurm_elastic.core.resize_kind import ResizeKind
from tests.support.container_cluster import light_trainings

#: Jobs at most, two a node.
MOVERS = 32
TOP_UP_S = 5.0
#: Of movers; it has to be there afterwards.
NICE = 7
_QUIET = ("-o", "/dev/null", "--mem-per-gpu=100", "--open-mode=append")
#: Seconds of a look at slurmctld's CPU time without changes.
IDLE_S = 30.0
#: Samples, epochs and samples of a step of light trainings: none ends. A step takes a second.
_LIGHT_SIZE = (3200, 1000, 32)
_LIGHT = "--samples {} --epochs {} --global-batch {} --step 1 --checkpoint-every 600"
_CPU = "cut -d' ' -f14,15 /proc/$(pidof slurmctld | cut -d' ' -f1)/stat; getconf CLK_TCK"


class Bench:
    """One run on a cluster that is up.

    Args:
        cluster: of 64 nodes of four GPUs.
        users: alice's jobs move, bob's are in the way.
        args: see `main`.
    """

    def __init__(self, cluster: str, users: SimulatedUsers, args: argparse.Namespace) -> None:
        self.cluster, self.users, self.args = cluster, users, args
        listed = on_cluster(cluster, "sinfo", "-hN", "-o", "%N %G").splitlines()
        types = {name: gres.split(":")[1] for name, gres in map(str.split, listed)}
        self.nodes = sorted(types)
        self.in_place = args.kind is ResizeKind.IN_PLACE
        # In place jobs keep their type.
        own = [n for n in self.nodes if not self.in_place or types[n] == types[self.nodes[0]]]
        self.own = own[: max(1, min(MOVERS, args.count) // 2)]
        self.movers: list[int] = []
        self.asked: dict[int, str] = {}  # the node that a mover's user has named
        self.stolen: set[str] = set()
        #: CPU seconds of slurmctld during the changes, their wall seconds, and cores before them.
        self.cpu_s = self.seconds = self.idle_cpu = 0.0
        self._stop = threading.Event()

    def run(self) -> dict[str, Any]:
        """Fill the cluster, deal, look.

        Returns:
            `rows`, a transition each; `attempts`, see `simulated_users.judged`; `left`, what should
            not exist afterwards; `stolen`, rivals on the movers' nodes.
        """
        self.users.report(deaf=self.args.deaf)
        if self.in_place:
            self._install()
        self.movers = [self._mover(node, i) for node in self.own for i in range(2)]
        fill = "; ".join(self._sbatch("filler", 4, 90 + i) for i in range(len(self._others())))
        on_cluster(self.cluster, "sh", "-c", f"cd /tmp; {fill}", user="bob")
        self._wait()
        rivals = threading.Thread(target=self._rivals, daemon=True)
        try:
            rows = self._deal(rivals)
        finally:
            self._stop.set()
            if rivals.is_alive():
                rivals.join(60)
        self._all_run_again()
        left = self._left()
        return {
            "rows": rows,
            "attempts": self._steps() if self.in_place else self.users.attempts(),
            "cpu_s": self.cpu_s,
            "idle_cpu": self.idle_cpu,
            "seconds": self.seconds,
            "left": left,
            "stolen": sorted(self.stolen),
        }

    def _others(self) -> list[str]:
        return [n for n in self.nodes if n not in self.own]

    def _mover(self, node: str, number: int) -> int:
        environment = f"WORK=100000000 JOBS_DIR={USERS_DIR}/alice"
        name = f"m{node}{number}"
        gpus, directive, program = 2, "1-4", f"{USERS_DIR}/busy_job.sh"
        if self.in_place:
            gpus, directive, program = 1, "1-4,in-place=auto", f"{USERS_DIR}/light.sh {name}"
        words = ["sbatch", "--parsable", f"--gres=gpu:{gpus}", "-N1", "-w", node]
        words += [f"--job-name={name}", f"--elastic={directive}", f"--nice={NICE}", *_QUIET]
        command = f"cd {USERS_DIR}/alice; {environment} {' '.join(words)} {program}"
        job_id = int(on_cluster(self.cluster, "sh", "-c", command, user="alice").split()[-1])
        self.asked[job_id] = node
        return job_id

    def _install(self) -> None:
        """Install the light training."""

        def run(script: str, *, stdin: str) -> None:
            on_cluster(self.cluster, "sh", "-c", script, stdin=stdin)

        light_trainings.install(run, USERS_DIR)
        out = f"{USERS_DIR}/alice/$1"
        program = (
            f"#!/bin/bash\nexport PYTHONPATH={USERS_DIR} SLURM_ELASTIC_CONTROLLER=ctld:7321\n"
            f"exec esrun python3 -m {light_trainings.PROGRAM} --out {out}"
            f" {_LIGHT.format(*_LIGHT_SIZE)} >>{out}.out 2>&1\n"
        )
        run(f"cat >{USERS_DIR}/light.sh", stdin=program)
        # Ranks meet at the names of nodes, which are all one container.
        names = " ".join(self.nodes)
        known = f"grep -q {self.nodes[0]} /etc/hosts || echo 127.0.0.1 {names} >>/etc/hosts"
        words = [*cluster_command(self.cluster), "exec", self.nodes[0], "--", "sh", "-c", known]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)

    def _steps(self) -> dict[str, int]:
        """Return the steps of all light trainings, and how many were repeated or are wrong."""
        show = f"cd {USERS_DIR}/alice; grep -H . */losses.jsonl"
        expected = [loss for _, loss in light_trainings.expected_steps(*_LIGHT_SIZE)]
        steps: dict[str, dict[int, float]] = {}
        rows = wrong = 0
        for line in on_cluster(self.cluster, "sh", "-c", show).splitlines():
            name, _, text = line.partition(":")
            row, rows = json.loads(text), rows + 1
            steps.setdefault(name, {})[row["step"]] = row["loss"]
            wrong += abs(row["loss"] - expected[row["step"] - 1]) > 1e-9
        missing = sum(max(losses) - len(losses) for losses in steps.values())
        again = rows - sum(map(len, steps.values()))
        return {"jobs": len(steps), "steps": rows, "lost": again + missing + wrong}

    def _cpu(self) -> float:
        """Return the CPU seconds that slurmctld has used."""
        user, system, ticks = map(int, on_cluster(self.cluster, "sh", "-c", _CPU).split())
        return (user + system) / ticks

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

    def _deal(self, rivals: threading.Thread) -> list[dict[str, Any]]:
        """Let the driver change jobs; return a row per transition.

        In place the first set only fills the cluster; what follows is measured, beside rivals.
        """
        driver = place_driver(self.cluster, Path(__file__).with_name("random_moves.py"), USERS_DIR)
        words = [driver, "--jobs", json.dumps(self.movers)]
        words += ["--count", str(self.args.count), "--seed", str(self.args.seed)]
        words += ["--notice", str(self.args.notice), "--kind", self.args.kind.value]
        if not self.in_place:
            self._begin(rivals)
        process = self.users.spawn("selastic", *words)
        assert process.stdout is not None
        rows: list[dict[str, Any]] = []
        for line in process.stdout:
            row = json.loads(line)
            if self.in_place and row["set"] == 0:
                if not rivals.is_alive():
                    self._begin(rivals)
                    assert process.stdin is not None
                    process.stdin.close()  # the driver waits for it
                continue
            rows.append(row)
            _say(f"{len(rows)} of {self.args.count} transitions ended")
        if process.wait():
            sys.exit("benchmarks: the driver gave up, see above")
        self.cpu_s, self.seconds = self._cpu() - self.cpu_s, time.monotonic() - self.seconds
        self._look_for_thieves()
        return rows

    def _begin(self, rivals: threading.Thread) -> None:
        """Let rivals come, and begin to measure slurmctld's CPU time."""
        self._top_up()
        rivals.start()
        idle = self._cpu()
        time.sleep(IDLE_S)
        self.cpu_s, self.seconds = self._cpu(), time.monotonic()
        self.idle_cpu = (self.cpu_s - idle) / IDLE_S

    def _left(self) -> list[str]:
        """Return the objects in slurmctld that must not exist after the last transition."""
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


#: Parts of a change in place: the marks between which they lie.
_IN_PLACE_PARTS = {
    "slurm starts a companion": ("START", "running"),
    "slurm ends a companion": ("LEAVE", "DONE"),
    "decision to new size": ("RESERVE", "switched"),
}


def _between(rows: Sequence[dict[str, Any]], begin: str, end: str) -> list[float]:
    """Return the seconds between two marks of the changes in place that have both."""
    marks = [r["entered"] for r in rows if r.get("kind") == ResizeKind.IN_PLACE.value]
    return [at[end] - at[begin] for at in marks if begin in at and end in at]


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run; `other` counts transitions neither finished nor rolled back."""
    rows = run["rows"]
    states = Counter(r["state"] for r in rows)
    done = [r for r in rows if r["state"] == "DONE"]
    in_place = any(r.get("kind") == ResizeKind.IN_PLACE.value for r in done)
    parts: dict[str, list[float]] = {
        part: [r["seconds"][part] for r in done if r["seconds"][part]]
        for part in (("pause",) if in_place else ("checkpoint", "slurm", "total"))
    }
    parts |= {name: _between(done, *marks) for name, marks in _IN_PLACE_PARTS.items()}
    return {
        "count": len(rows),
        "landed": states["DONE"],
        "rolled_back": states["UNDONE"],
        "other": len(rows) - states["DONE"] - states["UNDONE"],
        "slurmctld_cpu_s": run["cpu_s"],
        "slurmctld_idle_cores": run["idle_cpu"],
        "wall_s": run["seconds"],
        "seconds": {
            part: {"p50": statistics.median(v), "p95": quantile(v, 0.95), "max": max(v)}
            for part, v in parts.items()
            if v
        },
        "problems": dict(Counter(_problem(r) for r in rows if r["state"] != "DONE")),
        **{k: run[k] for k in ("attempts", "left", "stolen")},
    }


def clean(row: dict[str, Any]) -> bool:
    """Return whether nothing happened that must not."""
    stolen = row["stolen"] and not row["rolled_back"]
    return not (row["other"] or row["attempts"]["lost"] or row["left"] or stolen)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Measure and print; exit code 1 when a job did not land and was not rolled back cleanly."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transitions")
    parser.add_argument("--kind", choices=("in-place", "requeue"), default="requeue")
    parser.add_argument("--count", type=int, default=20, help="at least so many transitions")
    parser.add_argument("--rivals", type=int, default=100)
    parser.add_argument("--deaf", type=float, default=0.0, help="share of notices not answered")
    parser.add_argument("--notice", type=float, default=10.0, help="seconds that jobs have to save")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--cluster", default="farm64")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.kind = ResizeKind(args.kind)
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
        changes = max(1, row["count"])
        print(
            f"  slurmctld: {row['slurmctld_cpu_s']:.1f} CPU s in {row['wall_s']:.0f} s,"
            f" {row['slurmctld_cpu_s'] / changes:.3f} s per change; before the changes"
            f" {row['slurmctld_idle_cores']:.3f} cores"
        )
        print(f"  jobs: {row['attempts']}; stolen: {row['stolen']}; left: {row['left']}")
        print(f"  rolled back because: {row['problems']}")
    sys.exit(0 if clean(row) else 1)


if __name__ == "__main__":
    main()
