"""Plays esrun for a user's jobs that only sleep; runs in ctld as that user.

    crew.py ADDRESS

Every running elastic job is reported as proven, and has saved as soon as it is asked; one whose
name begins with `deaf` never has, `raw` is not proven, `slow` takes two seconds, `late` waits for
the file /tmp/save-JOBID, and `real` reports for itself.
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from slurm_elastic.rpc import frames

asked: dict[tuple[int, int], float] = {}  # (job, notice) → when it was heard


def report(address: str, job_id: int, run: int, name: str) -> None:
    told = {"job_id": job_id, "run": run, "phase": "training", "proven": not name.startswith("raw")}
    while True:
        reply = frames.call(address, {"v": 1, "op": "report", "report": told}, timeout_s=5)
        orders = reply["orders"]
        if orders["action"] != "notice" or told["phase"] == "saved" or name.startswith("deaf"):
            return
        since = asked.setdefault((job_id, orders["notice"]), time.monotonic())
        if name.startswith("slow") and time.monotonic() < since + 2:
            return
        if name.startswith("late") and not Path(f"/tmp/save-{job_id}").exists():
            return
        told |= {"phase": "saved", "notice": orders["notice"]}


while True:
    listed = subprocess.run(
        ["squeue", "-h", "--me", "-t", "R", "-O", "JobID:12,RestartCnt:12,Name:200"],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in listed.stdout.splitlines():
        number, run, name = line.split(maxsplit=2)
        if name.startswith("real"):
            continue
        with contextlib.suppress(frames.ChannelError):
            report(sys.argv[1], int(number), int(run), name)
    time.sleep(0.2)
