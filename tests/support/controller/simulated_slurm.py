"""Slurm of a few nodes in memory: the writes and reads of the controller, and a simulated clock.

It starts pending jobs as Slurm does: in order of priority, on the nodes that they name or on any,
not before their start time, and never while they are held. `SimulatedSite` runs a whole
`Controller` on it, and replaces it by a new one with the same ledger.
"""

import dataclasses
import re
import time
import types
from collections import Counter, defaultdict

from slurm_elastic.config.schema import parse
from slurm_elastic.controller import controller as controller_module
from slurm_elastic.controller import poll_schedule, published_view, report_handler
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.state import job_store, ledger, usage_reconcile
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.transitions import (
    companion_cleanup,
    crash_loop_guard,
    order_outbox,
    orphan_cleanup,
    requested_change,
    reservations,
    transition_engine,
)
from slurm_elastic.controller.transitions.steps import (
    in_place_steps,
    restart_steps,
    transition_steps,
)
from slurm_elastic.core.cluster import (
    Allocation,
    Job,
    JobState,
    Node,
    Partition,
    Snapshot,
    UnusableNodes,
)
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.submission import Submission
from slurm_elastic.policies import policy_protocol
from slurm_elastic.slurm.readers.pyslurm_records import LAUNCH_FAILED
from tests.support.controller.job_records import Log

#: Modules whose clock is the simulated one.
_MODULES = (
    controller_module, poll_schedule, published_view, report_handler, job_store, ledger,
    usage_reconcile, crash_loop_guard, order_outbox, orphan_cleanup, reservations,
    transition_engine, transition_steps, in_place_steps, restart_steps, companion_cleanup,
    requested_change,
)  # fmt: skip
_HELD = "JobHeldUser"
#: Reasons for which Slurm does not start a job before it is released.
_HOLDS = (_HELD, LAUNCH_FAILED)
#: Of cred_expire in slurm.conf: how long a requeued job waits.
_REQUEUE_S = 121.0


def short_trials(queue="controller"):
    """Return a configuration whose changes follow soon; each has 60 s for a newer checkpoint."""
    return f"""
[controller]
mode = "act"
queue = "{queue}"
interval_s = 10
[resize]
min_interval_s = 5
per_hour = 3600
trial_s = 60
payback_s = 100000
"""


class SimulatedSlurm:
    """Nodes and jobs; `now` is epoch s. Stands in for `Scontrol` and `Reader`.

    Args:
        nodes: their GPUs.
        gpu_types: their types, a100 where there is none.
    """

    def __init__(self, nodes, gpu_types=None):
        self.nodes = dict(nodes)
        self.types = defaultdict(lambda: "a100", gpu_types or {})
        # A fresh ledger begins now: it deletes rows of earlier times.
        self.now = self.begun = float(int(time.time()) + 1)
        self.listed = {}
        #: Nodes that are down.
        self.lost = set()
        #: Slurm's reason for which it starts no companion, as with a limit of a QOS; "": none.
        self.companions_wait_for = ""
        #: (time, job, run, allocation) of each start.
        self.starts = []
        #: (job, run, exit code) of each end.
        self.ends = []

    # --- actions of users ---

    def submit(self, job_id, *, elastic="", gpus=1, **fields):
        submission = None
        if elastic:
            shape = {"min_nodes": 1, "num_tasks": 1, "tres_per_node": f"gres/gpu:{gpus}"}
            submission = Submission(Directive.parse(elastic), shape, "", int(self.now))
        values = {
            "job_id": job_id, "display_id": str(job_id), "name": f"j{job_id}", "user": "alice",
            "uid": 2001, "state": JobState.PENDING, "partition": "gpu", "priority": 10,
            "submit_time": self.now, "submission": submission, "gpus": gpus,
        }  # fmt: skip
        self.listed[job_id] = Job(**(values | fields))

    def end(self, job_id, code=0):
        job = self.listed[job_id]
        self.ends.append((job_id, job.run, code))
        self._set(
            job, state=JobState.ENDED, end_time=self.now, allocation=None, exit_code=code,
            end_state="FAILED" if code else "COMPLETED",
        )  # fmt: skip

    def send_back(self, job_id):
        """Requeue a job as `scontrol requeue` does."""
        job = self.listed[job_id]
        self._set(
            job, state=JobState.PENDING, run=job.run + 1, allocation=None, start_time=None,
            submit_time=self.now, begin_time=self.now + _REQUEUE_S, reason="BeginTime",
        )  # fmt: skip

    def fail_launch(self, job_id):
        """Let the Prolog of a job's nodes fail: Slurm drains them, and holds the job."""
        job = self.listed[job_id]
        self.lost |= set(job.allocation.nodes)
        self.send_back(job_id)
        self._set(self.listed[job_id], reason=LAUNCH_FAILED, priority=0)

    def pass_time(self, seconds):
        """Advance the time, and start the jobs that fit."""
        self.now += seconds
        waiting = [j for j in self.listed.values() if j.state is JobState.PENDING]
        for job in sorted(waiting, key=lambda j: -j.priority):
            if job.companion is not None and self.companions_wait_for:
                self._set(job, reason=self.companions_wait_for)
                continue
            if job.reason in _HOLDS or (job.begin_time or 0.0) > self.now:
                continue
            place = self._place(job)
            reason = "Resources" if place is None else ""
            fields = {"begin_time": None, "reason": reason}
            if place is not None:
                self.starts.append((self.now, job.job_id, job.run, place))
                fields |= {"state": JobState.RUNNING, "allocation": place, "start_time": self.now}
            self._set(job, **fields)

    def _place(self, job):
        free = Counter(self.nodes)
        for other in self.listed.values():
            free.subtract(dict(other.allocation.shares) if other.allocation else {})
        names = [n for n in job.required_nodes or sorted(self.nodes) if free[n] > 0]
        names = [n for n in names if n not in self.lost]
        kind = job.gpu_type or (self.types[names[0]] if names else "")
        names = [n for n in names if self.types[n] == kind]
        names.sort(key=lambda name: -free[name])
        chosen, left = {}, job.gpus
        for nodes_left, name in zip(range(job.min_nodes, 0, -1), names, strict=False):
            chosen[name] = min(free[name], left - (nodes_left - 1))
            left -= chosen[name]
        if left or len(chosen) < job.min_nodes or set(job.required_nodes) - chosen.keys():
            return None
        return Allocation.of(kind, chosen)

    def _set(self, job, **fields):
        self.listed[job.job_id] = dataclasses.replace(job, **fields)

    # --- Scontrol ---

    def update(self, job, fields):
        job = self.listed[job.job_id]
        values = {}
        for name, text in fields.items():
            if name == "StartTime":
                later = re.fullmatch(r"now\+(\d+)", text)
                values["begin_time"] = self.now + int(later[1]) if later else None
            elif name == "ReqNodeList":
                values["required_nodes"] = tuple(text.split(",")) if text else ()
            elif name == "NumNodes":
                values["min_nodes"] = int(text.split("-")[0])
            elif name == "Priority":
                values["priority"] = int(text)
            elif name in ("ReservationName", "Comment"):
                values["reservation" if name == "ReservationName" else "comment"] = text
        shape = re.compile(r":(\w*):?\b(\d+)$")
        if total := shape.search(fields.get("TresPerJob", "")):
            values["gpus"], values["gpu_type"] = int(total[2]), total[1]
        elif each := shape.search(fields.get("TresPerNode", "")):
            values["gpus"] = int(each[2]) * values.get("min_nodes", job.min_nodes)
            values["gpu_type"] = each[1]
        self._set(job, **values)

    def requeue(self, job):
        if self.listed[job.job_id].state is JobState.RUNNING:
            self.send_back(job.job_id)

    def requeue_ended(self, job):
        assert self.listed[job.job_id].state is JobState.ENDED
        self.send_back(job.job_id)

    def release(self, job):
        job = self.listed[job.job_id]
        self._set(job, priority=10, reason="" if job.reason in _HOLDS else job.reason)

    def hold(self, job):
        self._set(self.listed[job.job_id], reason=_HELD, priority=0)

    def cancel(self, job):
        if self.listed[job.job_id].state is not JobState.ENDED:
            self.end(job.job_id, 0)
            self._set(self.listed[job.job_id], end_state="CANCELLED")

    def create_reservation(self, name, **_):
        """Reservations have no effect here: there are no other users."""

    def update_reservation(self, name, fields):
        """See `create_reservation`."""

    def delete_reservation(self, name):
        """See `create_reservation`."""

    # --- Reader ---

    def jobs(self):
        return dict(self.listed)

    def some_jobs(self, job_ids):
        return {i: self.listed[i] for i in job_ids if i in self.listed}

    def pulse(self):
        return frozenset((j.job_id, j.state.value, j.run) for j in self.listed.values())

    def unusable(self):
        return UnusableNodes(frozenset(self.lost), frozenset(self.lost))

    def settings(self):
        return {"private_data": ()}

    def snapshot(self, jobs):
        used = Counter()
        for job in jobs.values():
            used.update(dict(job.allocation.shares) if job.allocation else {})
        nodes = tuple(
            Node(name=n, gpu_type=self.types[n], gpus=g, used_gpus=used[n], cpus=64,
                 available=n not in self.lost, state="DOWN" if n in self.lost else "IDLE",
                 memory_mb=1000, partitions=frozenset({"gpu"}))
            for n, g in self.nodes.items()
        )  # fmt: skip
        partition = Partition(name="gpu", nodes=tuple(self.nodes))
        return Snapshot(
            time=self.now, nodes=nodes, jobs=tuple(jobs.values()), partitions=(partition,)
        )


class SimulatedSite:
    """A `SimulatedSlurm` with a controller, and its ledger in memory.

    Args:
        text: the configuration.
        policy: instead of the one that it names.
    """

    def __init__(self, monkeypatch, nodes, text="", *, gpu_types=None, policy=None):
        self.slurm, self.log = SimulatedSlurm(nodes, gpu_types), Log()
        self.policy = policy
        clock = types.SimpleNamespace(
            time=lambda: self.slurm.now,
            monotonic=lambda: self.slurm.now - self.slurm.begun + 1000.0,
            process_time=lambda: 0.0,
            sleep=lambda _: None,
        )
        for module in _MODULES:
            if hasattr(module, "time"):
                monkeypatch.setattr(module, "time", clock)
        self.config, self.ledger = parse(text), Ledger(":memory:")
        self.controller, self._checked = None, 0
        self.restart()

    def restart(self):
        """Replace the controller, as after a crash: with the ledger as it was written."""
        if self.controller is not None:
            self.controller.engine.close()
        self.controller = Controller(
            config=self.config, reader=self.slurm, scontrol=self.slurm, ledger=self.ledger,
            policy=self.policy or policy_protocol.load(self.config), account="selastic",
            log=self.log,
        )  # fmt: skip

    def close(self):
        self.controller.engine.close()
        self.ledger.close()

    def look(self):
        self.controller.look()
        new, self._checked = self.log.lines[self._checked :], len(self.log.lines)
        problems = [line for line in new if "internal error" in line]
        assert not problems, problems

    def report(self, report):
        """Send a report as esrun does; return the orders."""
        handler, job = self.controller.report_handler, self.controller.job(report.job_id)
        if handler.handle(report, job, act=self.controller.acts):
            self.controller.soon()
        return handler.orders(report.job_id, report.run, job=job)
