"""Requeues of one job with a chosen wait before its next start; runs in ctld as root.

    requeues.py TIMES NODE [SECONDS]

Each time: `scontrol requeue`, and so many seconds (0) after the job was seen pending one update
with another size, the same node and "start now". Prints JSON: the seconds of each requeue that
worked, and what became of the job in those that did not. A requeue has worked when the batch script
runs for a second.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """#!/bin/bash
for tick in 0 1 2 3 4; do echo $SLURM_RESTART_COUNT $tick >>{ticks}; sleep 0.25; done
exec sleep 1000
"""
PATIENCE_S = 20.0


def run(*words: str, stdin: str = "") -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip()


def state(job: str) -> str:
    return run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T %r")


def runs(job: str) -> bool:
    return state(job).startswith("RUNNING")


def waits(job: str) -> bool:
    return state(job).startswith(("PENDING", "COMPLETING", "CONFIGURING"))


def submit(node: str, ticks: Path) -> str:
    ticks.write_text("0 4\n")
    words = ("--parsable", "--requeue", "-o/dev/null", f"-w{node}", "--gres=gpu:1", "--time=60")
    job = run("sbatch", *words, stdin=SCRIPT.format(ticks=ticks)).split(";")[0]
    wait(lambda: runs(job))
    return job


def wait(happens) -> bool:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if happens():
            return True
        time.sleep(0.02)
    return False


def requeue(job: str, count: int, node: str, ticks: Path, pause_s: float) -> tuple[float, str]:
    """Return the seconds until the job ran again, and why it did not ("" if it did)."""
    begun = time.monotonic()
    run("scontrol", "requeue", job)
    if not wait(lambda: state(job).startswith("PENDING")):
        return 0.0, f"not pending: {state(job)}"
    time.sleep(pause_s)
    gpus = f"TresPerNode=gres/gpu:{1 + count % 2}"
    update = run("scontrol", "update", f"jobid={job}", gpus, f"ReqNodeList={node}", "StartTime=now")
    if update:
        return 0.0, f"update refused: {update}"
    run("scontrol", "update", f"jobid={job}", "Priority=4000000000")
    if not wait(lambda: not waits(job)) or not runs(job):
        return 0.0, f"not started: {state(job)}"
    seconds = time.monotonic() - begun
    if not wait(lambda: f"{count} 4" in ticks.read_text().splitlines() or not runs(job)):
        return 0.0, f"batch script ended or did not run: {state(job)}"
    return seconds, "" if runs(job) else f"ended: {state(job)}"


def main() -> None:
    times, node = int(sys.argv[1]), sys.argv[2]
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    seconds: list[float] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir="/shared/scratch") as folder:
        Path(folder).chmod(0o777)
        ticks = Path(folder, "ticks")
        job, count = submit(node, ticks), 0
        for _ in range(times):
            count += 1
            took, failure = requeue(job, count, node, ticks, pause_s)
            if failure:
                failures.append(failure)
                run("scancel", job)
                wait(lambda job=job: not run("squeue", "-h", "-j", job))
                job, count = submit(node, ticks), 0
            else:
                seconds.append(round(took, 2))
        run("scancel", job)
    print(json.dumps({"times": times, "seconds": sorted(seconds), "failures": failures}))


main()
