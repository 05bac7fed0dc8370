"""Stand-in for the esrun of a user's sleeping jobs that can be changed in place; runs in ctld.

    companion_reporter.py ADDRESS

It submits companions that sleep, says that their ranks have joined once they run, and ends them
when they are to leave. By the beginning of a base's name: `stays` ends no companion, `plain` cannot
be changed in place; only jobs called so or `place` are reported. A notice is answered at once.
"""

import contextlib
import os
import subprocess
import sys
import time
from typing import Any

from slurm_elastic.core.member_orders import CompanionComment
from slurm_elastic.rpc import frames

ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
FORMAT = "JobID:12,RestartCnt:12,State:16,Account:20,QOS:20,Name:60"


class Base:
    """One attempt of a base."""

    def __init__(self, job_id: int, run: int, name: str, account: str, qos: str) -> None:
        self.job_id, self.run, self.name = job_id, run, name
        self.account, self.qos = account, qos
        self.companions: dict[int, tuple[int, str]] = {}
        self.change: int | None = None
        self.fields: dict[str, Any] = {}
        self.notice: int | None = None
        self.orders_of: dict[int, int] = {}
        self.joins_at: dict[int, float] = {}
        self.begun = time.monotonic()

    def follow(self, listed: dict[int, str]) -> None:
        for job_id, (gpus, state) in list(self.companions.items()):
            now = listed.get(job_id, "")
            if now not in ("PENDING", "RUNNING"):
                self.companions[job_id] = (gpus, "ended")
            elif now == "RUNNING" and state == "submitted":
                self.companions[job_id] = (gpus, "running")
                self.joins_at[job_id] = time.monotonic() + 1
            elif state == "running" and time.monotonic() > self.joins_at[job_id]:
                self.companions[job_id] = (gpus, "joined")

    def carry_out(self, members: dict[str, Any] | None) -> None:
        if members is None:
            return
        mine = [i for i in self.companions if self.orders_of.get(i) == members["change"]]
        if members["change"] != self.change:
            self.change = members["change"]
            problem = self.submit(members)
            state = "submitted" if members["join"] else "leaving"
            self.fields = {"change_state": "failed" if problem else state}
            self.fields["change_reason"] = problem
            return
        if members["cancel"] and self.fields["change_state"] != "done":
            self.fields["change_state"] = "failed"
            self.end(mine)
        if not self.name.startswith("stays"):
            self.end([i for i in members["leave"] if i in self.companions])
        states = {self.companions[i][1] for i in mine}
        if self.fields["change_state"] == "failed":
            return
        gone = all(self.companions.get(i, (0, "ended"))[1] == "ended" for i in members["leave"])
        if states <= {"joined", "ended"} and gone:
            self.fields = {"change_state": "done", "change_reason": None, "pause_s": 0.012}

    def submit(self, members: dict[str, Any]) -> dict[str, Any] | None:
        comment = CompanionComment(base=self.job_id, run=self.run, change=members["change"])
        for gpus in members["join"]:
            kind = f"gpu:{members['gpu_type']}:{gpus}"
            done = subprocess.run(
                [
                    *("sbatch", "-H", "--parsable", "--no-requeue", "-N1", "-n1", "-o/dev/null"),
                    *(f"--gres={kind}", f"--comment={comment}", f"--job-name={self.name}+1"),
                    *(f"--account={self.account}", f"--qos={self.qos}", "--time=30"),
                    "--wrap=exec sleep 1200",
                ],
                env=ENVIRONMENT, capture_output=True, text=True, check=False, cwd="/",
            )  # fmt: skip
            if done.returncode:
                error = " ".join(done.stderr.split())[:150]
                return {"code": "sbatch-failed", "parameters": {"error": error}}
            job_id = int(done.stdout.split(";")[0])
            self.companions[job_id] = (gpus, "submitted")
            self.orders_of[job_id] = members["change"]
        return None

    def end(self, job_ids: list[int]) -> None:
        if job_ids:
            subprocess.run(["scancel", *map(str, job_ids)], check=False)

    def report(self, address: str) -> None:
        rows = [[i, gpus, state] for i, (gpus, state) in self.companions.items()]
        joined = sum(gpus for gpus, state in self.companions.values() if state == "joined")
        step = round(time.monotonic() - self.begun)  # one a second, each followed by a checkpoint
        body = {
            "job_id": self.job_id, "run": self.run, "phase": "training", "proven": True,
            "step": step, "checkpoint_step": step,
            "gpus": 1 + joined, "in_place": not self.name.startswith("plain"),
            "not_in_place": "stages" if self.name.startswith("plain") else "",
            "change": self.change, "companions": rows, **self.fields,
        }  # fmt: skip
        if self.notice is not None:
            body |= {"phase": "saved", "notice": self.notice}
        reply = frames.call(address, {"v": 1, "op": "report", "report": body}, timeout_s=5)
        orders = reply["orders"]
        self.notice = orders["notice"] if orders["action"] == "notice" else None
        self.carry_out(orders.get("members"))


def main(address: str) -> None:
    bases: dict[tuple[int, int], Base] = {}
    while True:
        done = subprocess.run(
            ["squeue", "-h", "--me", "-O", FORMAT], capture_output=True, text=True, check=False
        )
        listed = {}
        names = {}
        for line in done.stdout.splitlines():
            number, run, state, account, qos, name = line.split(maxsplit=5)
            listed[int(number)] = state
            if state == "RUNNING" and name.startswith(("place", "stays", "plain")):
                names[int(number), int(run)] = (name, account, qos)
        for (job_id, run), (name, account, qos) in names.items():
            if "+" in name:
                continue
            base = bases.setdefault((job_id, run), Base(job_id, run, name, account, qos))
            base.follow(listed)
            with contextlib.suppress(frames.ChannelError):
                base.report(address)
        time.sleep(0.5)


main(sys.argv[1])
