"""The controller: looks, decides, lets the engine act. One method per thing it does.

`look` is called every so often (`pause` says when next); it reads the jobs,
advances transitions and, when something has happened or the interval is over,
runs a round. Nothing here knows of threads, signals or sockets but the lock
that guards the view.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from slurm_elastic.cluster import Job, JobState, Snapshot
from slurm_elastic.config import Config
from slurm_elastic.controller.answers_inputs import TransitionRow, View
from slurm_elastic.controller.book import Book
from slurm_elastic.controller.dialogue import Dialogue
from slurm_elastic.controller.engine import Change, Engine
from slurm_elastic.controller.housekeeping import Housekeeping
from slurm_elastic.controller.ledger import Ledger, LedgerError
from slurm_elastic.controller.transition import State
from slurm_elastic.controller.tuning import Tuner
from slurm_elastic.plan import Decision, JobRecord, Plan
from slurm_elastic.policies.base import Policy
from slurm_elastic.round import decide_round
from slurm_elastic.slurm.scontrol import Scontrol, SlurmUnreachable
from slurm_elastic.slurm.shape import describe
from slurm_elastic.slurm.snapshot import Reader

#: While transitions are live.
_FAST_S = 0.2
#: A look may cost at most this share of a core.
_IDLE_SHARE = 0.004
#: After a change, others that come with it get this long to show.
_SETTLE_S = 0.3
#: Somebody's word about a job not known yet makes the next look come after this time.
_UNKNOWN_S = 1.0
_SILENCE_MAX_S = 15.0
_INTERNAL_ERROR_S = 10.0
#: Jobs get this long to hear that a notice is withdrawn, before the socket closes.
_FAREWELL_S = 0.3
#: slurm.conf is looked at this often.
_SETTINGS_S = 300.0


class Controller:
    """Everything but the way in (`desk`) and the process (`daemon`)."""

    def __init__(
        self,
        *,
        config: Config,
        reader: Reader,
        scontrol: Scontrol,
        ledger: Ledger,
        policy: Policy,
        account: str,
        log: Any,
    ) -> None:
        self.config, self.reader, self.ledger, self.policy = config, reader, ledger, policy
        self._log = log
        self.book = Book(ledger, config)
        self.housekeeping = Housekeeping(scontrol, config, self.book, log)
        self.engine = Engine(
            scontrol=scontrol,
            ledger=ledger,
            config=config,
            account=account,
            log=log,
        )
        self.tuner = Tuner(self.engine.outbox.tell, obeys=getattr(policy, "batches", False))
        self.dialogue = Dialogue(book=self.book, engine=self.engine, tuner=self.tuner, log=log)
        self.book.learning.tunes = bool(getattr(policy, "tunes", True))
        self.dialogue.freezes = bool(getattr(policy, "freezes", False))
        self.retired = False
        #: PrivateData=jobs in slurm.conf; taken for granted until slurmctld has answered.
        self.private = True
        self.view = View(
            snapshot=Snapshot(time=0.0, nodes=(), jobs=()), mode=config.controller.mode
        )
        self._jobs: dict[int, Job] = {}
        self._sizes: dict[str, int] = {}
        self._per_node: dict[str, dict[str, int]] = {}
        self._pulse: frozenset[tuple[int, str, int]] = frozenset()
        self._others: frozenset[tuple[int, JobState, int]] = frozenset()
        kept = ledger.get("policy_state", {})
        self._state: Mapping[str, Any] = kept if isinstance(kept, dict) else {}
        self._plan: Plan | None = None
        # Of time.monotonic, as all waits here: the clock may be set.
        self._next_round = 0.0
        self._read_s = 0.0
        self._asked_for, self._looked = False, 0.0
        #: Called from other threads when the next look shall come sooner.
        self.nudge: Callable[[], object] = lambda: None
        self._silence_s = 0.0
        self._notes: dict[str, str] = {}
        self._advised: dict[int, str] = {}
        self._settings_read = 0.0

    # --- the clock ---

    def pause(self) -> float:
        """Seconds until the next look."""
        if self._silence_s:
            return self._silence_s
        if self.engine.live:
            return _FAST_S
        if self._asked_for:
            return _UNKNOWN_S
        poll = max(self.config.controller.poll_s, self._read_s / _IDLE_SHARE)
        return max(0.05, min(poll, self._next_round - time.monotonic()))

    def soon(self) -> None:
        """Something has happened: decide again shortly."""
        self._next_round = min(self._next_round, time.monotonic() + _SETTLE_S)
        self.nudge()

    def look(self) -> None:
        """Read the jobs, advance what is under way, decide if it is time. Never raises."""
        try:
            self._look()
            if self._silence_s:
                self._log.info("slurmctld answers again")
            self._silence_s = 0.0
            self._note("slurm", "")
        except SlurmUnreachable as error:
            if not self._silence_s:
                self._log.error(f"{error}; nothing is changed until it answers")
            self._silence_s = min(_SILENCE_MAX_S, self._silence_s * 2 or 1.0)
            self._note("slurm", str(error))
        except LedgerError as error:
            self._unwritten(error)
        except Exception as error:  # noqa: BLE001 - one bad job must not leave all others alone
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._log.error(
                f"internal error, please report: {error!r} at {where.name}:{where.lineno}"
            )
            self._note("internal", f"internal error: {error!r}")
            self._silence_s = _INTERNAL_ERROR_S

    def _unwritten(self, error: LedgerError) -> None:
        """Say once that the ledger cannot be written; the next round tries again."""
        if self._notes.get("ledger") != str(error):
            self._log.error(f"{error}; no new change is begun until it can be written")
        self._note("ledger", str(error))

    def _look(self) -> None:
        if self._idle():
            return
        self._asked_for, self._looked = False, time.monotonic()
        self._jobs = self.reader.jobs()
        live = self.engine.live
        others = frozenset(
            (j.job_id, j.state, j.run) for j in self._jobs.values() if j.job_id not in live
        )
        if live and others != self._others:
            self.soon()
        self._others = others
        if self.engine.busy and self._sizes:
            self.engine.step(
                self._jobs, sizes=self._sizes, per_node=self._per_node, down=self.reader.down
            )
        if self.engine.ended:  # what was given back a moment ago must not be taken for left over
            self._jobs = self.reader.jobs()
        self._collect()
        self._publish()
        if time.monotonic() >= self._next_round:
            self._next_round = time.monotonic() + self.config.controller.interval_s
            if live:  # what was read is older than what has just been written
                self._jobs = self.reader.jobs()
            self.round()

    def _idle(self) -> bool:
        """A cheap look: whether nothing has happened and nothing is due."""
        if self.engine.busy or self._asked_for or time.monotonic() >= self._next_round:
            return False
        began = time.process_time()
        pulse = self.reader.pulse()
        self._read_s = time.process_time() - began
        if pulse != self._pulse:
            self._pulse = pulse
            self.soon()
            return False
        return True

    def _collect(self) -> None:
        """Take note of transitions that have ended."""
        while self.engine.ended:
            transition, job = self.engine.ended.pop(0)
            if transition.state is State.DONE or transition.given_up:
                self.book.changed(transition, job, time.time())
            if transition.state is State.DONE and transition.target is not None:
                self.dialogue.expect(transition)
            self.soon()

    # --- a round ---

    def round(self) -> None:
        """Look at everything, decide, act as far as the mode allows."""
        self._read_settings()
        snapshot = self.reader.snapshot(self._jobs)
        self._sizes = {n.name: n.gpus for n in snapshot.nodes}
        self._per_node = _per_node(snapshot)
        if self.config.controller.mode == "act":
            found = self.housekeeping.sweep(snapshot, self.engine.live, per_node=self._per_node)
            self.engine.reservations.adopt(found)
            self.housekeeping.leases(snapshot.jobs, self.engine.live, retired=self.retired)
        self.engine.outbox.forget(snapshot.job.keys())
        written = self._write_down(snapshot)
        live = self.engine.live
        records = self.book.records(snapshot, live)
        plan, state = decide_round(
            snapshot,
            records,
            config=self.config,
            policy=self.policy,
            state=self._state,
            previous=self._plan,
            seed=self.config.controller.seed,
        )
        if written and state != self._state:
            self.ledger.put("policy_state", dict(state))
        self._state, self._plan = state, plan
        if plan.wake is not None:
            left_s = max(plan.wake - time.time(), _SETTLE_S)
            self._next_round = min(self._next_round, time.monotonic() + left_s)
        self._tune(snapshot, plan, records)
        self.view = dataclasses.replace(
            self.view,
            snapshot=snapshot,
            plan=plan,
            records=records,
            batches=self.tuner.choices,
            resizes=self.book.resizes(),
            mode=self.config.controller.mode,
            policy=self.config.controller.policy,
            next_round=time.time() + max(0.0, self._next_round - time.monotonic()),
            topology=self.config.topology,
        )
        if self.acts and written:
            self._act(snapshot, plan, records)
        elif self.config.controller.mode == "advise":
            advice = {d.job_id: f"{_words(d, snapshot)} Mode=advise" for d in plan.changes}
            for job_id, text in advice.items():
                if self._advised.get(job_id) != text:
                    self._log.info(text)
            self._advised = advice
        self._publish()

    def _tune(self, snapshot: Snapshot, plan: Plan, records: Mapping[int, JobRecord]) -> None:
        """Batches of running jobs: what needs no restart."""
        told = self.tuner.round(
            snapshot,
            records,
            self.book.last_reports(snapshot),
            act=self.acts,
            leave={d.job_id for d in plan.changes},
            decided=plan.decision,
        )
        for job, choice in told:
            self._log.info(
                f"JobId={job.display_id} Action=batch From={choice.present} To={choice.batch} "
                f"Reason={choice.reason!r}"
            )

    @property
    def acts(self) -> bool:
        """Whether anything new is begun."""
        return self.config.controller.mode == "act" and not self.retired

    def _read_settings(self) -> None:
        """What slurm.conf says; it may change while we run."""
        if not self._settings_read or time.monotonic() - self._settings_read > _SETTINGS_S:
            settings = self.reader.settings()
            self.private = "jobs" in settings["private_data"]
            self._settings_read = time.monotonic()

    def _write_down(self, snapshot: Snapshot) -> bool:
        """What has been seen; whether the ledger takes it."""
        try:
            self.engine.catch_up()
            self.book.observe(snapshot)
        except LedgerError as error:
            self._unwritten(error)
            return False
        if self._notes.get("ledger"):
            self._log.info("the ledger can be written again")
        self._note("ledger", "")
        return True

    def _act(self, snapshot: Snapshot, plan: Plan, records: Mapping[int, JobRecord]) -> None:
        room = self.config.resize.max_in_flight - len(self.engine.live)
        changes = []
        for decision in plan.changes[: max(0, room)]:
            job = snapshot.job[decision.job_id]
            changes.append(Change(decision, job, self._notice_s(job), self.book.spare_s(job)))
        begun = self.engine.begin(changes) if changes else []
        self.tuner.ahead(begun, snapshot, records, self.book.last_reports(snapshot))
        for decision in begun:
            self._log.info(_words(decision, snapshot))
        started = {d.job_id for d in begun}
        for job in snapshot.jobs:
            if not job.elastic or job.job_id in started or job.job_id in self.engine.live:
                continue
            if job.state is JobState.PENDING:
                if job.job_id in plan.decision and self.housekeeping.may_lease(job):
                    self.housekeeping.lease(job)
            elif job.state is JobState.RUNNING:
                self.dialogue.prove(job)

    def _notice_s(self, job: Job) -> float:
        directive = self.book.directive(job)
        asked = directive.notice_s if directive else None
        return float(asked or self.config.resize.notice_s)

    # --- from outside ---

    def job(self, job_id: int) -> Job | None:
        """A job as last read. One that is not known yet makes the next look come at once."""
        job = self._jobs.get(job_id) or self.view.snapshot.job.get(job_id)
        if job is None:
            self._asked_for = True
            if time.monotonic() - self._looked > _UNKNOWN_S:
                self.nudge()
        return job

    def reconfigure(self, config: Config) -> None:
        """Take over a changed configuration; policy, sockets and paths stay until a restart."""
        self.config = config
        self.engine.config = config
        self.housekeeping.config = config
        self.book.learning.config = config
        self.retired = False
        self._next_round = 0.0

    def stop(self) -> None:
        """Leave nobody waiting for us; whatever has begun is carried on at the next start."""
        if self.engine.withdraw(self._jobs):
            time.sleep(_FAREWELL_S)

    def retire(self) -> str:
        """Begin nothing new, and give back leases; what is under way is finished."""
        self.retired = True
        waiting, pinned = self.housekeeping.give_back(self._jobs.values())
        text = (
            f"nothing new is begun; {waiting} waiting jobs were given to Slurm, "
            f"{len(self.engine.live)} changes under way will be finished"
        )
        if pinned:  # Slurm clears a running job's node list only when it is pending again
            text += (
                f"; should one of these be requeued later, clear its node list "
                f"(scontrol update jobid=J ReqNodeList=): {', '.join(pinned)}"
            )
        return text

    # --- the view ---

    def _publish(self) -> None:
        rows = tuple(
            TransitionRow(
                id=t.id,
                job_id=t.job_id,
                state=t.state.value,
                since=t.since,
                target=describe(t.target),
                reason=t.problem or t.reason,
            )
            for t in self.engine.live.values()
        )
        reports = self.book.last_reports(self.view.snapshot)
        self.view = dataclasses.replace(self.view, transitions=rows, reports=reports)

    def _note(self, name: str, text: str) -> None:
        self._notes[name] = text
        self.view = dataclasses.replace(
            self.view, notes=tuple(n for n in self._notes.values() if n)
        )


def _per_node(snapshot: Snapshot) -> dict[str, dict[str, int]]:
    """GPUs on the smallest node of each type, by partition."""
    found: dict[str, dict[str, int]] = {}
    for partition in snapshot.partitions:
        sizes = found.setdefault(partition.name, {})
        for name in partition.nodes:
            node = snapshot.node.get(name)
            if node and node.gpus:
                sizes[node.gpu_type] = min(sizes.get(node.gpu_type, node.gpus), node.gpus)
    return found


def _words(decision: Decision, snapshot: Snapshot) -> str:
    job = snapshot.job[decision.job_id]
    held = decision.current.gpus if decision.current else 0
    return (
        f"JobId={job.display_id} Action={decision.action.value} From={held} "
        f"To={describe(decision.target)!r} Reason={decision.reason!r}"
    )
