"""One campaign: jobs, faults and observation, then the final checks."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos import final_checks
from tests.chaos.chaos_site import ChaosSite
from tests.chaos.faults import Faults
from tests.chaos.invariants import GUARDED, HELD, LAUNCH_FAILED, Rules
from tests.chaos.load import TRAININGS, Load
from tests.chaos.schedule import Event, Schedule, Submission
from tests.support.container_cluster.slurm_cluster import SlurmCluster

#: After the last fault: Slurm delays a requeued job for two minutes, a job takes a minute.
SETTLE_S = 420.0
#: Seconds without a process until selasticd counts as dead.
_GONE_S = 3.0


@dataclass
class FaultRecord:
    """A fault that was carried out. Times are epoch seconds."""

    kind: str
    begun: float
    log: int
    whom: str = ""
    healed: float = 0.0
    trouble: str = ""


@dataclass
class Campaign:
    """Execution of a schedule on a cluster.

    Args:
        cluster: cluster on which nothing else runs.
        plan: schedule.
        say: prints a line.
    """

    cluster: SlurmCluster
    plan: Schedule
    say: Callable[[str], None]
    hits: list[FaultRecord] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    guarded: set[str] = field(default_factory=set)
    _stop: bool = False

    def run(self) -> dict[str, Any]:
        """Run the whole campaign and return its record for the results file."""
        self.site = ChaosSite(
            self.cluster, self.plan.queue, nodes=self.plan.nodes, sleep=self.plan.sleep
        )
        self.load = Load(self.cluster)
        gpus = dict.fromkeys(self.plan.nodes, 4)
        self.rules = Rules(self.load.jobs, gpus, self.site.excused)
        self.site.prepare()
        for layout in {j.manner for j in self.plan.submissions if j.kind == "train"}:
            self.load.reference(layout)
        begun = time.time()
        watcher = threading.Thread(target=self._watch, daemon=True)
        try:
            self.site.start_daemon()
            watcher.start()
            self._carry_out()
            self._settle()
            self.say("checking the logs of the jobs")
            figures = final_checks.final(
                self.site, self.load, self.rules, self.hits, self.plan.abandoned
            )
        finally:
            self._stop = True
            self.cluster.cancel()
            log = self.site.log()
            try:
                self.site.close()
            except AssertionError as error:  # the record is kept all the same
                self.troubles.append(f"at the end: {error}"[:500])
            if watcher.is_alive():
                watcher.join(timeout=10)
        record = {
            "seed": self.plan.seed,
            "minutes": self.plan.minutes,
            "queue": self.plan.queue,
            "abandoned": self.plan.abandoned,
            **(
                {"sleep": final_checks.sleep_figures(log, self.site.samples)}
                if self.plan.sleep
                else {}
            ),
            "seconds": round(time.time() - begun),
            "jobs": len(self.load.accepted),
            "samples": len(self.site.samples),
            "faults": [
                asdict(h) | final_checks.aftermath(h, log, self.site.samples) for h in self.hits
            ],
            "breaches": [asdict(b) for b in self.rules.breaches],
            "troubles": self.troubles,
            "launch_failed": sorted(self.released),
            "guarded": sorted(self.guarded),
            **figures,
        }
        self.log = log
        return record

    # --- load and faults ---

    def _carry_out(self) -> None:
        """Start submissions and faults at their times, each in a thread."""
        faults = Faults(self.site, self.load)
        coming: list[Event | Submission] = [*self.plan.submissions, *self.plan.events]
        coming.sort(key=lambda c: c.at)
        begun, threads = time.monotonic(), []
        for item in coming:
            time.sleep(max(0.0, begun + item.at - time.monotonic()))
            act = self._submit if isinstance(item, Submission) else self._hit
            thread = threading.Thread(target=self._guarded, args=(act, item, faults), daemon=True)
            thread.start()
            threads.append(thread)
        time.sleep(max(0.0, begun + self.plan.minutes * 60 - time.monotonic()))
        self.say("no more faults; waiting for the jobs to end")
        for thread in threads:
            thread.join(timeout=180)

    def _guarded(self, act: Callable[..., None], item: Event | Submission, faults: Faults) -> None:
        try:
            act(item, faults)
        except Exception as error:  # noqa: BLE001 - the campaign's own trouble, shown at the end
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.troubles.append(f"{item} {where.name}:{where.lineno} {error!r}"[:500])
            self.say(f"TROUBLE {self.troubles[-1]}")

    def _submit(self, job: Submission, _: Faults) -> None:
        while job.kind == "train" and self._training() >= TRAININGS and not self._stop:
            time.sleep(3)
        if self._stop or (job.kind == "train" and self._late()):
            return
        self.load.submit(job)

    def _training(self) -> int:
        return sum(j["name"].startswith("real") for j in self.site.jobs())

    def _late(self) -> bool:
        return bool(self.hits) and len(self.hits) == len(self.plan.events)

    def _hit(self, event: Event, faults: Faults) -> None:
        log = max((s["log"] for s in self.site.samples), default=0)  # 0 while it is dead
        hit = FaultRecord(event.kind, time.time(), log)
        self.hits.append(hit)
        with self.site.fault(event.kind):
            try:
                hit.whom = faults.run(event)
            except Exception as error:
                hit.trouble = repr(error)[:300]
                raise
            finally:
                hit.healed = time.time()
        self.say(f"{event.kind} {hit.whom or '(no target)'} {hit.healed - hit.begun:.1f} s")
        faults.afterwards(event)

    # --- observation ---

    def _watch(self) -> None:
        gone = 0.0
        for sample in self.site.observe():
            if self._stop:
                continue  # until it is closed
            before = len(self.rules.breaches)
            self.rules.judge(sample, healthy=self.site.healthy() and sample["alive"])
            gone = gone or sample["at"] if self.site.wanted and not sample["alive"] else 0.0
            if gone and sample["at"] - gone > _GONE_S and not self._fault_in_progress():
                self.rules.add(sample["at"], "died", f"pid {self.site.pid}", "selasticd is gone")
                self.site.start_daemon()
                gone = 0.0
            for node in self.site.switch_on(sample):
                self.say(f"{node} is switched on by hand")
            for breach in self.rules.breaches[before:]:
                self.say(f"BROKEN {breach.rule}: {breach.who}: {breach.text}")

    def _help_jobs_on(self) -> None:
        """Do what is left to users: start rigid jobs that wait, release jobs held for a reason."""

        def held(job: dict[str, Any]) -> bool:
            return job["reason"] in HELD and job["comment"].startswith(GUARDED)

        for job in self.site.jobs():
            if job["name"].startswith("rigid") and job["reason"] == "BeginTime":
                words = ["scontrol", "update", f"jobid={job['id']}", "StartTime=now"]
                self.cluster.exec(words, check=False)
            elif LAUNCH_FAILED in job["description"] or held(job):  # as its owner does
                (self.guarded if held(job) else self.released).add(job["name"])
                self.cluster.exec(["scontrol", "release", str(job["id"])], check=False)

    def _fault_in_progress(self) -> bool:
        """Return whether a fault is stopping or starting selasticd now."""
        return self.site.lock("selasticd").locked()

    def _settle(self) -> None:
        """Wait until all jobs have ended; in abandoned campaigns without a controller."""
        if self.plan.abandoned:
            self.say("selasticd is killed and not started again")
            self.site.kill_daemon()
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            last = self.site.samples[-1] if self.site.samples else {"jobs": None}
            if last["jobs"] is not None and not [*self.site.jobs(), *self.site.companions()]:
                return
            self._help_jobs_on()
            time.sleep(1)
        left = ", ".join(
            f"{j['name']} {j['state']} {j['reason']}"
            for j in [*self.site.jobs(), *self.site.companions()]
        )
        self.say(f"still there: {left}")
