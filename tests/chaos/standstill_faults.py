"""Faults in which nothing dies: processes that stand still, restarts, acts of administrators."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.chaos.schedule import Event

if TYPE_CHECKING:
    from tests.chaos.faults import Faults

#: Ranks of trainings. Those of scripts are left out: esrun stops and continues them itself.
_TRAINING_RANKS = "^python3 .*(chaos/(train|layouts).py|light_training)"
#: Times that a command is repeated which slurmctld does not answer, every 2 s.
_TRIES = 30


class StandstillFaults:
    """Faults by kind, as in `Faults`.

    Args:
        faults: the others.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults, self._site, self._exec = faults, faults.site, faults.exec
        self.kinds: dict[str, Callable[[Event], str]] = {
            "selasticd-stop": self._stop_selasticd,
            "selasticd-restart": self._restart_selasticd,
            "slurmd-stop": self._stop_slurmd,
            "rank-stop": lambda e: self._stop_process(
                e, _TRAINING_RANKS, faults.programs(("real", "light"))
            ),
            "esrun-stop": lambda e: self._stop_process(e, "bin/esrun", faults.programs()),
            "job-suspend": self._suspend,
            "user-keep": self._keep,
            "maintenance": self._reserve,
            "reconfigure": self._reconfigure,
            "wrong-configuration": self._write_wrong_configuration,
        }

    # --- processes that stand still ---

    def _stop_selasticd(self, event: Event) -> str:
        with self._site.lock("selasticd"):
            self._exec(f"kill -STOP {self._site.pid}", check=False)
            time.sleep(event.outage_s)
            self._exec(f"kill -CONT {self._site.pid}", check=False)
        return "selasticd"

    def _restart_selasticd(self, event: Event) -> str:
        with self._site.lock("selasticd"):
            self._site.stop_daemon()
            time.sleep(event.outage_s)
            self._site.start_daemon()
        return "selasticd"

    def _stop_slurmd(self, event: Event) -> str:
        node = self._faults.node(event)
        with self._site.lock(node):
            self._faults.note_hit(node)
            self._exec("pkill -STOP -x slurmd", node=node, check=False)
            time.sleep(event.outage_s)
            self._exec("pkill -CONT -x slurmd", node=node, check=False)
        return node

    def _stop_process(self, event: Event, pattern: str, jobs: list[dict[str, Any]]) -> str:
        """Stop one process of one of these jobs, and let it go on."""
        if not jobs:
            return ""
        job = jobs[int(event.pick * len(jobs))]
        found = self._faults.find_process(event, job, pattern, job["name"])
        if found is None:
            return ""
        node, pid = found
        self._site.disturb([job["name"]])
        self._exec(f"kill -STOP {pid}", node=node, check=False)
        time.sleep(event.outage_s)
        self._exec(f"kill -CONT {pid}", node=node, check=False)
        return f"{job['name']} on {node}"

    # --- people ---

    def _suspend(self, event: Event) -> str:
        running = [j for j in self._site.jobs() if j["state"] == "RUNNING"]
        if not running:
            return ""
        job = running[int(event.pick * len(running))]
        self._exec(["scontrol", "suspend", str(job["id"])], check=False)
        time.sleep(event.outage_s)
        self._until_done(["scontrol", "resume", str(job["id"])])
        return str(job["name"])

    def _keep(self, event: Event) -> str:
        """Keep a job as it is for a while, by `selastic hold` of its owner."""
        job = self._faults.pick_job(event)
        if job is None:
            return ""
        user = self._faults.load.jobs[job["name"]].user

        def ask(verb: str) -> bool:
            words = ["selastic", "--controller", "ctld:7321", verb, str(job["id"])]
            return bool(self._exec(words, user=user, check=False).returncode == 0)

        if not ask("hold"):  # selasticd is dead, or the job has ended
            return ""
        time.sleep(event.outage_s)
        ask("release")
        return str(job["name"])

    def _reserve(self, event: Event) -> str:
        """Reserve a node for maintenance in a few seconds, while jobs run on it."""
        node = self._faults.node(event)
        name = f"maintenance_{event.at:.0f}"
        create = ["scontrol", "create", "reservation", f"ReservationName={name}"]
        create += ["StartTime=now+5", "Duration=5", f"Nodes={node}", "Users=root"]
        self._until_done([*create, "Flags=maint,ignore_jobs"])
        time.sleep(event.outage_s)
        self._until_done(["scontrol", "delete", f"ReservationName={name}"])
        return node

    def _reconfigure(self, event: Event) -> str:
        with self._site.lock("slurmctld"):
            self._until_done(["scontrol", "reconfigure"])
            time.sleep(event.outage_s)
        return "slurmctld"

    def _write_wrong_configuration(self, event: Event) -> str:
        """Have selasticd read a file with a mistake, then the right one again."""
        with self._site.lock("selasticd"):
            for text, pause_s in (
                (self._site.toml() + "\n[resize]\nno_such_key = 1\n", event.outage_s),
                (self._site.toml(), 0.0),
            ):
                self._site.configure(text)
                self._exec(f"kill -HUP {self._site.pid}", check=False)
                time.sleep(pause_s)
        return "elastic.toml"

    def _until_done(self, words: list[str]) -> bool:
        """Run a command, again while slurmctld does not answer; return whether it was done."""
        for _ in range(_TRIES):
            done: Any = self._exec(words, check=False)
            said = done.stderr + done.stdout
            if done.returncode == 0 or "Invalid" in said or "already" in said:
                return done.returncode == 0
            time.sleep(2)
        return False
