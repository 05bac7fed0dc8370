"""Simulated user of a busy cluster; runs in ctld as that user, prints one JSON object per action.

    simulated_user.py --seed TEXT --jobs N --directory D [--selastic]

Submits N jobs, prints {"submitted_all": true} and waits for a line with a time (epoch s). Until
then it keeps N jobs in the queue and looks, cancels, holds, releases and updates, at times
drawn from the seed. The n-th job of a user is the same in every run of a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

#: Actions with their relative frequencies.
ACTIONS = {
    "squeue": 20,
    "squeue --me": 20,
    "sinfo": 5,
    "show job": 10,
    "scancel": 10,
    "hold": 8,
    "update": 12,
    "selastic status": 8,
    "selastic explain": 7,
}
#: Mean seconds between two actions, and of a hold.
THINK_S, HOLD_S = 2.0, 30.0
#: Longest time until jobs that ended are replaced.
TOP_UP_S = 5.0


class SimulatedUser:
    """One simulated user."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.draw = random.Random(args.seed)
        self.script = Path(__file__).with_name("busy_job.sh").read_text()
        self.submitted = 0
        self.until = float("inf")
        self.pending: list[int] = []
        self.mine: list[int] = []
        self.held: dict[int, float] = {}

    def log(self, **row: object) -> None:
        """Print one event as a line."""
        print(json.dumps(row), flush=True)

    def do(self, what: str, *words: str, stdin: str = "", **environment: str) -> str:
        """Run a command and log how long it took."""
        began = time.time()
        try:
            done = subprocess.run(
                words,
                input=stdin,
                env=os.environ | environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            rc, out = done.returncode, done.stdout
            error = " ".join(done.stderr.split())[-200:] if rc else ""
        except subprocess.TimeoutExpired:
            rc, out, error = 124, "", "no answer in 60 s"
        self.log(t=began, did=what, s=round(time.time() - began, 3), rc=rc, error=error)
        return out

    def submit(self) -> None:
        """Submit the next job, drawn from its number."""
        number, self.submitted = self.submitted, self.submitted + 1
        draw = random.Random(f"{self.args.seed}/{number}")
        gpus = draw.choice([1, 1, 1, 2, 2, 4, 4, 8])
        seconds = draw.uniform(90, 600)
        options = [f"--gres=gpu:{gpus}", "--nodes=1"]
        if draw.random() < 0.6:
            least = max(1, gpus // draw.choice([1, 2]))
            types = draw.choice(["", "", ",types=a100:v100"])
            options.append(f"--elastic={least}-{min(16, gpus * draw.choice([2, 4]))}{types}")
        self.do(
            "sbatch",
            "sbatch",
            "-Q",
            "--parsable",
            f"--job-name=j{number}",
            "--output=/dev/null",
            "--open-mode=append",
            "--mem-per-gpu=100",
            f"--time={draw.randint(20, 60)}",
            *options,
            stdin=self.script,
            # Not by --export: with a list slurmd fetches the user's environment, and fails if it
            # may not create namespaces.
            WORK=str(int(seconds * gpus)),
            JOBS_DIR=self.args.directory,
        )

    def top_up(self) -> None:
        """Count the user's jobs, and submit as many as have ended."""
        listed = self.do("squeue --me", "squeue", "-h", "--me", "-o", "%A %t").split()
        pairs = list(zip(listed[::2], listed[1::2], strict=False))
        self.mine = [int(j) for j, _ in pairs]
        self.pending = [int(j) for j, state in pairs if state == "PD"]
        for _ in range(self.args.jobs - len(pairs)):
            if time.time() >= self.until:
                return
            self.submit()

    def act(self) -> None:
        """Do one action that users do."""
        what = self.draw.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        place = self.draw.random()  # always drawn, so that all runs of a seed draw the same
        job = str(self.mine[int(place * len(self.mine))]) if self.mine else "1"
        waiting = self.pending[int(place * len(self.pending))] if self.pending else 0
        if what == "squeue":
            self.do(what, "squeue")
        elif what == "squeue --me":
            self.do(what, "squeue", "--me")
        elif what == "sinfo":
            self.do(what, "sinfo")
        elif what == "show job":
            self.do(what, "scontrol", "show", "job", job)
        elif what == "scancel":
            self.do(what, "scancel", job)
        elif what == "hold" and waiting:
            self.do(what, "scontrol", "hold", str(waiting))
            self.held[waiting] = time.time() + self.draw.expovariate(1 / HOLD_S)
        elif what == "update":
            field = ["TimeLimit=19", "Nice=10", "Comment=mine"][int(place * 1000) % 3]
            self.do(what, "scontrol", "update", f"jobid={job}", field)
        elif what.startswith("selastic") and self.args.selastic:
            words = [job] if what.endswith("explain") else []
            self.do(what, "selastic", what.split()[1], *words)

    def release(self, *, all_: bool = False) -> None:
        """Release the jobs that have been held long enough."""
        for job, until in list(self.held.items()):
            if all_ or until < time.time():
                del self.held[job]
                self.do("release", "scontrol", "release", str(job))

    def run(self) -> None:
        """Act until the time is over."""
        self.top_up()
        self.log(submitted_all=True, jobs=self.submitted)
        self.until = float(sys.stdin.readline())
        looked = time.time()
        while time.time() < self.until:
            time.sleep(min(self.draw.expovariate(1 / THINK_S), 10 * THINK_S))
            self.act()
            self.release()
            if time.time() - looked > TOP_UP_S:
                self.top_up()
                looked = time.time()
        self.release(all_=True)


def main() -> None:
    """Run one simulated user."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--selastic", action="store_true")
    SimulatedUser(parser.parse_args()).run()


if __name__ == "__main__":
    main()
