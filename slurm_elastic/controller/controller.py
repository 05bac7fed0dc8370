"""The controller: it reads the jobs, decides, and lets the engine carry out changes.

`look` is called repeatedly (`pause` is the time until the next call); it reads the jobs,
advances transitions and, when something has happened or the interval is over,
runs a round. Threads, signals and sockets are the daemon's.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.batch_tuning import BatchTuner
from slurm_elastic.controller.change_starter import ChangeStarter
from slurm_elastic.controller.job_listing import JobListing
from slurm_elastic.controller.lengths.length_predictions import LengthPredictions
from slurm_elastic.controller.lengths.rigid_nice import RigidNice
from slurm_elastic.controller.log_format import log_line
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.neighbours.neighbour_learning import NeighbourLearning
from slurm_elastic.controller.poll_schedule import PollSchedule
from slurm_elastic.controller.published_view import PublishedView
from slurm_elastic.controller.queries.view import View
from slurm_elastic.controller.report_handler import ReportHandler
from slurm_elastic.controller.sleep.sleep_control import SleepControl
from slurm_elastic.controller.solver_warning import SolverWarning
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.controller.state.usage_reconcile import UsageReconciler
from slurm_elastic.controller.transitions.companion_cleanup import CompanionCleanup
from slurm_elastic.controller.transitions.crash_loop_guard import CrashLoopGuard
from slurm_elastic.controller.transitions.early_ends import EarlyEnds
from slurm_elastic.controller.transitions.failed_changes import FailedChanges
from slurm_elastic.controller.transitions.forgotten_starts import ForgottenStarts
from slurm_elastic.controller.transitions.orphan_cleanup import OrphanCleanup
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Allocation, Job, JobState, Snapshot
from slurm_elastic.core.plan import Action, JobRecord, Plan
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.milp.round_program import StatesProgram
from slurm_elastic.policies.policy_protocol import Policy, capabilities_of
from slurm_elastic.round import decide_round
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader
from slurm_elastic.slurm.release_rules import WAIT_AFTER_REQUEUE_S
from slurm_elastic.slurm.scontrol import NotActiveError, Scontrol, SlurmUnreachableError

#: Seconds for telling jobs that a notice is withdrawn, before the socket closes.
_WITHDRAWAL_S = 0.3


class _Configured(Protocol):
    """Part of the controller that a changed configuration is given to."""

    config: Config


class Controller:
    """State and steps of the controller, without its socket (`server`) and process (`daemon`)."""

    def __init__(
        self,
        *,
        config: Config,
        reader: ClusterReader,
        scontrol: Scontrol,
        ledger: Ledger,
        policy: Policy,
        account: str,
        log: Any,
        counts: ActivityCounts | None = None,
        wait_after_requeue_s: float = WAIT_AFTER_REQUEUE_S,
    ) -> None:
        self.counts = counts or ActivityCounts()
        self.config, self.reader, self.ledger, self.policy = config, reader, ledger, policy
        self._log = log
        self.store = JobStore(ledger, config)
        self.cleanup = OrphanCleanup(scontrol, config, self.store, log)
        self.usage = UsageReconciler(ledger, log)
        self.lengths = LengthPredictions(config, log)
        self._rigid_nice = RigidNice(config, scontrol, ledger, log)
        self.sleep = SleepControl(config, scontrol, reader, ledger, log)
        self.neighbours = NeighbourLearning(config, ledger)
        self.guard = CrashLoopGuard(scontrol, config, self.store, ledger, log, counts=self.counts)
        self.engine = TransitionEngine(
            scontrol=scontrol,
            ledger=ledger,
            config=config,
            account=account,
            wait_after_requeue_s=wait_after_requeue_s,
            log=log,
        )
        self.companion_cleanup = CompanionCleanup(scontrol, self.store, self.engine, ledger, log)
        self.failed_changes = FailedChanges(
            self.store, self.engine, config, log, counts=self.counts
        )
        self.early_ends = EarlyEnds(scontrol, self.store, ledger, log)
        self.forgotten_starts = ForgottenStarts(scontrol, self.store, ledger, log)
        capabilities = capabilities_of(policy)
        chooser = capabilities.batch_chosen_by
        self.tuner = BatchTuner(self.engine.outbox.tell, policy_chooses=chooser == "policy")
        self.report_handler = ReportHandler(
            store=self.store,
            engine=self.engine,
            tuner=self.tuner,
            log=log,
            counts=self.counts,
            neighbours=self.neighbours,
        )
        self._starter = ChangeStarter(self.store, self.engine, self.tuner, config, log)
        self.store.learning.adaptive_batches = chooser != "user"
        self.store.learning.shares_measurements = capabilities.shares_measurements
        self.store.learning.residual_models = capabilities.residual_models
        self.report_handler.predicts_frozen_layers = capabilities.predicts_frozen_layers
        self.retired = False
        self.published = PublishedView(
            config.controller.mode,
            reader=reader,
            store=self.store,
            engine=self.engine,
            tuner=self.tuner,
            neighbours=self.neighbours,
            lengths=self.lengths,
            sleep=self.sleep,
        )
        self.listing = JobListing(reader, self.store, self.engine)
        self._sizes: dict[str, int] = {}
        self._shards: dict[str, int] = {}
        self._per_node: Mapping[str, Mapping[str, int]] = {}
        self._pulse: object = None
        self._others: frozenset[tuple[int, JobState, int]] = frozenset()
        #: Attempts that run, by job and restart count.
        self._attempts: frozenset[tuple[int, int]] = frozenset()
        policy_state = ledger.get("policy_state", {})
        self._state: Mapping[str, Any] = policy_state if isinstance(policy_state, dict) else {}
        self._plan: Plan | None = None
        self.schedule = PollSchedule()
        #: Called from other threads when the next look shall come sooner.
        self.nudge: Callable[[], object] = lambda: None
        #: Another controller that seems to act here, "" for none; asked once a round.
        self.rival: Callable[[], str] = lambda: ""
        self._solver_warning = SolverWarning(config.sia.solver, log)
        self._advised: dict[int, tuple[Action, Allocation | None, str]] = {}
        #: Parts that a changed configuration is given to.
        self._configured: tuple[_Configured, ...] = (
            self.cleanup,
            self.lengths,
            self._rigid_nice,
            self.sleep,
            self.neighbours,
            self.guard,
            self.engine,
            self.failed_changes,
            self._starter,
            self.store.learning,
        )

    @property
    def view(self) -> View:
        """The newest view of the cluster, for requests."""
        return self.published.view

    # --- the clock ---

    def pause(self) -> float:
        """Return the seconds until the next look."""
        return self.schedule.pause(
            poll_s=self.config.controller.poll_s, live=bool(self.engine.live)
        )

    def soon(self) -> None:
        """Schedule a round within seconds, as jobs or nodes have changed."""
        self.schedule.soon()
        self.nudge()

    def look(self) -> None:
        """Read the jobs, advance transitions, and run a round if one is due.

        Raises:
            NotActiveError: another controller has become active. All other errors are logged.
        """
        try:
            self._look()
            if self.schedule.note_answer():
                self._log.info("slurmctld answers again")
            self.published.note("slurm", None)
        except SlurmUnreachableError as error:
            if self.schedule.note_silence():
                self._log.error(f"{error}; nothing is changed until it answers")
            self.published.note("slurm", Reason("slurm-unreachable", error=str(error)))
        except LedgerError as error:
            self._unwritten(error)
        except NotActiveError:
            raise
        except Exception as error:  # noqa: BLE001 - an error in one job must not stop the others
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._log.error(
                f"internal error, please report: {error!r} at {where.name}:{where.lineno}"
            )
            self.published.note("internal", Reason("internal-error", error=repr(error)))
            self.schedule.wait_after_error()

    def _unwritten(self, error: LedgerError) -> None:
        """Log once that the ledger cannot be written; the next round tries again."""
        note = Reason("ledger-unwritable", error=str(error))
        if self.published.noted("ledger") != note:
            self._log.error(f"{error}; no new change is begun until it can be written")
        self.published.note("ledger", note)

    def _look(self) -> None:
        if self._idle():
            return
        live = self.engine.live
        with self.schedule.measuring_read():
            if live and not self.schedule.full_read_is_due():
                self.listing.read_again(live)
            else:
                self._read_jobs()
        others = frozenset(
            (j.job_id, j.state, j.run) for j in self.listing.jobs.values() if j.job_id not in live
        )
        if live and others != self._others:
            self.soon()
        self._others = others
        if self.engine.busy and self._sizes:
            self.engine.step(
                self.listing.jobs,
                sizes=self._sizes,
                per_node=self._per_node,
                unusable=self.reader.unusable,
                companions=self.listing.companions,
                report=self.store.last_report,
                answering_s=self.schedule.answering_s(),
                shards=self._shards,
            )
        if self.engine.ended:  # their last commands changed jobs that were read before
            self.listing.read_again(live)
        self._collect()
        self.listing.fold()
        self.published.show_changes()
        if self.schedule.round_is_due():
            with self.schedule.measuring_round(every_s=self.config.controller.interval_s):
                if live:  # what was read is older than what has just been written
                    self._read_jobs()
                    self.engine.end_with_jobs(self.listing.jobs)
                    self._collect()
                self.round()
            seconds, cpu_s = self.schedule.rounds[-1]
            self.counts.round_done(seconds, cpu_s=cpu_s)
            self._log.debug(f"Round {self.schedule.last_round()} Jobs={len(self.listing.jobs)}")

    def _read_jobs(self) -> None:
        with self.schedule.measuring_full_read():
            self.listing.read_all()
        self._instruct_new_attempts()

    def _instruct_new_attempts(self) -> None:
        """Send new attempts at once the orders that they need at their start.

        An esrun that has asked before its job was read waits for these orders.
        """
        running = (
            j for j in self.listing.jobs.values() if j.elastic and j.state is JobState.RUNNING
        )
        attempts = {(job.job_id, job.run): job for job in running}
        for attempt in attempts.keys() - self._attempts:
            self.report_handler.send_settings(attempts[attempt])
        self._attempts = frozenset(attempts)

    def _idle(self) -> bool:
        """Return whether nothing has happened and nothing is due, by a cheap look."""
        if self.engine.busy or self.schedule.has_unknown_job or self.schedule.round_is_due():
            return False
        with self.schedule.measuring_pulse():
            pulse = self.reader.pulse()
        if pulse != self._pulse:
            self._pulse = pulse
            self.soon()
            return False
        return True

    def _collect(self) -> None:
        """Record transitions that have ended."""
        while self.engine.ended:
            transition, job = self.engine.ended.pop(0)
            self.counts.transition_ended(transition)
            if transition.state is TransitionState.DONE or transition.given_up:
                self.store.record_end_of_change(transition, job, time.time())
            is_requeued = transition.target is not None and not transition.in_place
            if transition.state is TransitionState.DONE and is_requeued:
                self.report_handler.await_first_step(transition)
            else:
                self.report_handler.attempts.drop_prediction(transition.job_id)
            self.soon()

    # --- a round ---

    def round(self) -> None:
        """Read the cluster, decide, and act as far as the mode allows."""
        self.published.read_private()
        snapshot = self.reader.snapshot(self.listing.jobs)
        rival = self.rival()
        self.published.note("rival", Reason("other-controller", error=rival) if rival else None)
        self._sizes = {n.name: n.gpus for n in snapshot.nodes}
        self._shards = {n.name: n.shards for n in snapshot.nodes if n.shards}
        self._per_node = snapshot.smallest
        if self.config.controller.mode == "act" and not self.published.noted("rival"):
            reservations = self.cleanup.sweep(snapshot, self.engine.live, per_node=self._per_node)
            try:
                self.companion_cleanup.sweep(self.listing.listed, self.listing.companions)
            except LedgerError as error:
                self._unwritten(error)
            self.engine.reservations.adopt(reservations)
            left = self._plan.left_to_slurm if self._plan else frozenset()
            self.cleanup.leases(
                snapshot.jobs, self.engine.live, left_to_slurm=left, retired=self.retired
            )
        self.report_handler.forget(snapshot.job.keys())
        written = self._write_down(snapshot)
        if self.acts and written:
            # Before others take the GPUs of their former shapes.
            self._starter.begin_ways_back(self.failed_changes, snapshot)
            self.forgotten_starts.review(snapshot, self.engine.live)
        live = self.engine.live
        self.lengths.tick()
        records = self.lengths.attached(self.store.records(snapshot, live), snapshot)
        self.engine.outbox.set_report_interval(sum(r.reporting for r in records.values()))
        decide = partial(
            decide_round,
            records=records,
            config=self.config,
            policy=self.policy,
            state=self._state,
            previous=self._plan,
            seed=self.config.controller.seed,
            resized=self.store.resized(time.time(), live.values()),
            neighbours=self.neighbours.table(snapshot),
            gpu_pairs=self.neighbours.gpu_pairs(snapshot),
        )
        plan, state = decide(snapshot)
        if written and state != self._state:
            self.ledger.put("policy_state", dict(state))
        self._state, self._plan = state, plan
        if plan.wake is not None:
            self.schedule.soon(plan.wake - time.time())
        self._tune(snapshot, plan, records)
        self.published.show_round(
            self.config,
            snapshot,
            plan,
            records,
            until_next_s=self.schedule.until_round(),
            program=self.policy.round_program if isinstance(self.policy, StatesProgram) else None,
        )
        self.published.note("solver", self._solver_warning.note(state, snapshot.time))
        if self.acts and written:
            self._act(snapshot, plan, records)
        elif self.config.controller.mode == "advise":
            advice = {d.job_id: (d.action, d.target, d.reason.code) for d in plan.changes}
            for decision in plan.changes:
                if self._advised.get(decision.job_id) != advice[decision.job_id]:
                    self._log.info(log_line(decision, snapshot, advice=True))
            self._advised = advice
        if written:
            note = self.sleep.round(
                snapshot,
                plan,
                records,
                acts=self.acts,
                others=self.listing.listed.values(),
                decide=lambda awakened: decide(awakened, explain=False)[0],
            )
            self.published.note("sleep", note)
            note = self._rigid_nice.round(snapshot, self.lengths.for_round(), acts=self.acts)
            self.published.note("nice", note)
            self.published.show_sleep()
        self.published.show_changes()

    def _tune(self, snapshot: Snapshot, plan: Plan, records: Mapping[int, JobRecord]) -> None:
        """Tune the batches of running jobs, which needs no restart."""
        changed = self.tuner.round(
            snapshot,
            records,
            self.store.last_reports(snapshot),
            act=self.acts,
            leave={d.job_id for d in plan.changes},
            decided=plan.decision,
        )
        for job, choice in changed:
            self._log.info(
                f"JobId={job.display_id} Action=batch From={choice.present} To={choice.batch} "
                f"Reason={choice.reason}"
            )

    @property
    def acts(self) -> bool:
        """Whether anything new is begun."""
        alone = not self.published.noted("rival")
        return self.config.controller.mode == "act" and not self.retired and alone

    def _write_down(self, snapshot: Snapshot) -> bool:
        """Record the snapshot; return whether the ledger could be written."""
        try:
            self.engine.records.catch_up()
            self.early_ends.review(snapshot, self.engine.live, act=self.acts)
            self.store.observe(snapshot)
            self.neighbours.follow(snapshot)
            self.usage.tick()
            self.failed_changes.review(snapshot, self.engine.live)
            self.failed_changes.review_companions(
                snapshot, self.engine.live, self.listing.companions
            )
            self.guard.review(snapshot, self.engine.live, act=self.acts)
        except LedgerError as error:
            self._unwritten(error)
            return False
        if self.published.noted("ledger"):
            self._log.info("the ledger can be written again")
        self.published.note("ledger", None)
        return True

    def _act(self, snapshot: Snapshot, plan: Plan, records: Mapping[int, JobRecord]) -> None:
        """Begin the changes of the plan and due rehearsals; lease nodes to waiting jobs."""
        started = self._starter.begin_planned(snapshot, plan, records)
        live = self.engine.live
        for job_id in started:
            if job_id in live and live[job_id].by_companions:
                continue
            self.report_handler.attempts.record_prediction(plan.decision[job_id])
        started |= self._starter.begin_rehearsals(snapshot, plan, records)
        for job in snapshot.jobs:
            if not job.elastic or job.job_id in started or job.job_id in self.engine.live:
                continue
            decided = job.job_id in plan.decision and job.job_id not in plan.left_to_slurm
            if job.state is JobState.PENDING and decided and self.cleanup.may_lease(job):
                self.cleanup.lease(job)

    # --- from outside ---

    def job(self, job_id: int) -> Job | None:
        """Return a job as last read; for an unknown one schedule a look at once."""
        job = self.listing.jobs.get(job_id) or self.view.snapshot.job.get(job_id)
        if job is None and self.schedule.note_unknown_job():
            self.nudge()
        return job

    def reconfigure(self, config: Config) -> None:
        """Apply a changed configuration; policy, sockets and paths stay until a restart."""
        self.config = config
        for part in self._configured:
            part.config = config
        self.retired = False
        self.schedule.at_once()

    def stop(self) -> None:
        """Release jobs that wait for an answer; other transitions go on at the next start."""
        if self.engine.withdraw(self.listing.jobs):
            time.sleep(_WITHDRAWAL_S)

    def retire(self) -> str:
        """Begin nothing new and end leases; transitions under way are finished."""
        self.retired = True
        waiting, pinned = self.cleanup.give_back(self.listing.jobs.values())
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
