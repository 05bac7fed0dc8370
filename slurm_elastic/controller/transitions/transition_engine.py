"""Engine of transitions: many at once, each step persisted before it is taken.

`step` advances every live transition as far as it goes without waiting; the
daemon calls it a few times a second while any is live. All writes to jobs
happen in `transition_steps`, and orders to jobs go into the `outbox`; this module
persists states, shares one reservation among the transitions of a round, and
admits the jobs that may be asked to save next.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.controller.state.transition import UPROOTED, Transition, TransitionState
from slurm_elastic.controller.transitions.admission import admitted, hopeless
from slurm_elastic.controller.transitions.order_outbox import OrderOutbox
from slurm_elastic.controller.transitions.requested_change import RequestedChange
from slurm_elastic.controller.transitions.reservations import Reservations
from slurm_elastic.controller.transitions.steps.in_place_steps import InPlaceSteps
from slurm_elastic.controller.transitions.steps.restart_steps import RestartSteps
from slurm_elastic.controller.transitions.steps.state_steps import StateSteps
from slurm_elastic.controller.transitions.steps.step_inputs import (
    StepInputs,
    is_requeued_attempt,
    present_job,
)
from slurm_elastic.controller.transitions.steps.transition_steps import TransitionSteps
from slurm_elastic.controller.transitions.transition_records import TransitionRecords
from slurm_elastic.core.cluster import STARTED, Job, UnusableNodes
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.slurm.release_rules import WAIT_AFTER_REQUEUE_S
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError

#: Calls to scontrol under way at once.
_WRITERS = 8
#: States from which a job is started.
_STARTING = (
    *(TransitionState.COOL, TransitionState.RELEASE, TransitionState.VERIFY),
    TransitionState.START,
)
#: A change whose nodes Slurm would not reserve is not tried again for so many seconds.
_REFUSED_S = 60.0
#: States in which the job still has its old allocation, and trains or has saved.
_UNTOUCHED = (TransitionState.RESERVE, TransitionState.NOTIFY)
#: States in which a job that is to be requeued may say that it has saved.
_AFTER_NOTICE = (TransitionState.NOTIFY, *UPROOTED)


class TransitionEngine:
    """All live transitions.

    Args:
        scontrol: writes.
        ledger: where states are kept.
        config: the site's.
        account: Unix name of the controller's own account, sole user of fresh reservations.
        wait_after_requeue_s: seconds that a requeued job waits before it may start again.
        log: structlog logger.
    """

    def __init__(
        self,
        *,
        scontrol: Scontrol,
        ledger: Ledger,
        config: Config,
        account: str,
        wait_after_requeue_s: float = WAIT_AFTER_REQUEUE_S,
        log: Any,
    ) -> None:
        self._config, self._log = config, log
        self.records = TransitionRecords(ledger, log)
        self.reservations = Reservations(scontrol, config, account, log)
        self.outbox = OrderOutbox()
        self._wait_after_requeue_s = wait_after_requeue_s
        self._in_place = InPlaceSteps(scontrol, self.outbox, log)
        self._steps: dict[ResizeKind, StateSteps] = {
            ResizeKind.REQUEUE: TransitionSteps(scontrol, log),
            ResizeKind.IN_PLACE: self._in_place,
            ResizeKind.RESTART: RestartSteps(scontrol, self.outbox, log),
        }
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="scontrol")
        self._lock = threading.RLock()
        self._live: dict[int, Transition] = {}
        self._refused: dict[int, float] = {}
        self.ended: list[tuple[Transition, Job | None]] = []
        for transition in self.records.live():
            self._live[transition.job_id] = transition
            self.reservations.register(transition.reservation, transition.reserved_nodes)
        self._recovering = set(self._live)

    @property
    def live(self) -> dict[int, Transition]:
        """Transitions under way, by job id."""
        with self._lock:
            return dict(self._live)

    @property
    def config(self) -> Config:
        """The site's configuration, as last read."""
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        self._config = self.reservations.config = config

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._live or self.reservations)

    def begin(self, changes: Iterable[RequestedChange]) -> list[Decision]:
        """Begin changes.

        Returns:
            Changes that were begun; the others wait for changes on the same nodes.

        Raises:
            LedgerError: nothing was started.
        """
        ready, name = self._ready(changes)
        written = self._written_down(ready, name)
        targets = [t for t in written if t.reservation]
        if targets:
            nodes = {n for t in targets for n in t.reserved_nodes}
            try:
                self.reservations.cover(targets[0].reservation, nodes)
            except ScontrolError as error:
                for t in targets:
                    self._refused[t.job_id] = time.monotonic() + _REFUSED_S
                    reason = Reason("slurm-refused", error=str(error))
                    self._end(t, TransitionState.UNDONE, reason, None)
        begun_by_job = {t.job_id: t for t in written if t.state.live}
        with self._lock:
            self._live |= begun_by_job
        return [c.decision for c in ready if c.job.job_id in begun_by_job]

    def _written_down(self, changes: list[RequestedChange], name: str | None) -> list[Transition]:
        """Write new transitions to the ledger, with a target in the reservation of this name."""
        fresh: list[Transition] = []
        try:
            for change in changes:
                t = change.transition()
                self.records.add(t)
                fresh.append(t)
                if t.reserved_nodes:
                    name = name or f"{self.config.slurm.reservation_prefix}{t.id}"
                    t.reservation = name
                    self.records.put(t)
        except LedgerError:
            self.records.give_up(fresh)
            raise
        return fresh

    def _ready(
        self, changes: Iterable[RequestedChange]
    ) -> tuple[list[RequestedChange], str | None]:
        """Return changes that can be begun together, and the reservation that they join.

        A node can be in one reservation only: a change that needs nodes of two has to wait.
        """
        now = time.monotonic()
        self._refused = {job: until for job, until in self._refused.items() if until > now}
        ready, join = [], None
        for change in changes:
            decision = change.decision
            if decision.job_id in self._live or decision.job_id in self._refused:
                continue
            names = self.reservations.on(change.reserved_nodes)
            if len(names) > 1 or (names and join and names != {join}):
                continue
            join = next(iter(names), join)
            ready.append(change)
        begun = {c.decision.job_id for c in ready}
        return [c for c in ready if begun.issuperset(c.decision.requires)], join

    def step(
        self,
        jobs: Mapping[int, Job],
        *,
        sizes: Mapping[str, int],
        per_node: Mapping[str, Mapping[str, int]],
        unusable: Callable[[], UnusableNodes] = UnusableNodes,
        companions: Mapping[int, Job] | None = None,
        report: Callable[[int], Report | None] = lambda _: None,
        answering_s: float = math.inf,
        shards: Mapping[str, int] | None = None,
    ) -> None:
        """Advance everything as far as it goes.

        Args:
            jobs: read just now.
            sizes: GPUs of each node.
            per_node: partition → type → GPUs on its smallest node of that type.
            unusable: nodes on which no job may start now; asked when a job is about to start.
            companions: jobs that are companions, as Slurm shows them.
            report: returns the last report of a job.
            answering_s: seconds since slurmctld last did not answer.
            shards: of each GPU, by node.

        Raises:
            LedgerError: a transition could not be written, and was given up.
        """
        live = list(self.live.values())
        if self._recovering:
            self._recover([t for t in live if t.job_id in self._recovering], jobs)
            live = list(self.live.values())
        begin = admitted(live, jobs, sizes)
        needs_nodes = any(t.id in begin or _depends_on_nodes(t) for t in live)
        site = StepInputs(
            jobs=jobs,
            sizes=sizes,
            unusable=unusable() if needs_nodes else UnusableNodes(),
            admitted=begin,
            hopeless=hopeless(live, jobs, sizes),
            live=tuple(live),
            open=self._open,
            per_node=per_node,
            lease_s=self.config.slurm.lease_s,
            wait_after_requeue_s=self._wait_after_requeue_s,
            companions=companions or {},
            report=report,
            answering_s=answering_s,
            shards=shards or {},
        )
        unwritten: LedgerError | None = None
        for transition, job, error in self._pool.map(lambda t: self._advance(t, site), live):
            unwritten = unwritten or error
            if not transition.state.live:
                self._finish(transition, job)
        self.reservations.keep({t.reservation for t in self.live.values()})
        if unwritten:
            raise unwritten

    def _advance(
        self, transition: Transition, site: StepInputs
    ) -> tuple[Transition, Job | None, LedgerError | None]:
        """Advance one transition as far as it goes; an unwritten step is not begun."""
        job = present_job(transition, site.jobs)
        steps = self._steps[transition.kind]
        for _ in range(len(TransitionState)):
            last_state = transition.state
            try:
                steps.advance(transition, job, site, self._enter)
            except ScontrolError as error:
                if transition.refused <= 1:  # not once more for each time that it is tried again
                    state = transition.state.value
                    self._log.warning(f"{transition} State={state} Problem={error}")
                break
            except LedgerError as error:
                transition.state, transition.problem = TransitionState.UNDONE, Reason("not-written")
                return transition, job, error
            if transition.state is last_state or not transition.state.live:
                break
        return transition, job, None

    def _enter(self, transition: Transition, state: TransitionState) -> None:
        """Persist a state and enter it. A full disk stops only jobs that were not touched yet.

        Raises:
            LedgerError: the state cannot be entered.
        """
        previous = transition.state
        transition.state, transition.tries, transition.refused = state, 0, 0
        transition.entered[state.value] = time.time()
        try:
            self.records.put(transition)
        except LedgerError:
            if previous in (TransitionState.RESERVE, TransitionState.NOTIFY) and state.live:
                raise
        if state is TransitionState.NOTIFY:
            notice = Orders(
                action="notice",
                notice=transition.id,
                deadline_s=transition.notice_s,
                rehearsal=transition.action is Action.REHEARSE,
            )
            self.outbox.ask(transition.job_id, notice, run=transition.run, reason=transition.reason)
        if state.live:
            self._log.info(f"{transition} State={state.value} Action={transition.action.value}")

    def note_saving(self, job_id: int, run: int, notice: int) -> None:
        """Record when a job began to save for a notice."""
        with self._lock:
            transition = self._live.get(job_id)
            if transition and (transition.id, transition.run) == (notice, run):
                transition.entered.setdefault("saving", time.time())

    def acknowledge(self, job_id: int, run: int, notice: int, *, step: int | None) -> None:
        """Record that a job has saved; one without a live transition resumes."""
        with self._lock:
            transition = self._live.get(job_id)
            waits = (
                transition is not None
                and transition.id == notice
                and transition.run == run
                and (transition.by_companions or transition.state in _AFTER_NOTICE)
            )
            if waits and transition is not None:
                transition.step = step
                transition.entered.setdefault("saved", time.time())
                return
        orders = Orders(action="resume", notice=notice)
        self.outbox.ask(job_id, orders, run=run, reason=Reason("nothing-planned"))

    def decline(self, job_id: int, run: int, reason: Reason) -> None:
        """Record that a job cannot be rehearsed: the notice is withdrawn with the next step."""
        with self._lock:
            transition = self._live.get(job_id)
            if (
                transition is not None
                and transition.action is Action.REHEARSE
                and transition.run == run
                and transition.state is TransitionState.NOTIFY
                and "saved" not in transition.entered
            ):
                transition.entered.setdefault("declined", time.time())
                transition.problem = transition.problem or reason

    def review_target(self, job_id: int, directive: Directive) -> None:
        """Give up a change whose target a job's new directive does not allow, with the next step.

        Only while the job still has what it had before the change: a later one goes on.

        Args:
            job_id: of the job.
            directive: that its owner has just given it.
        """
        with self._lock:
            t = self._live.get(job_id)
            if t is None or t.failed or t.target is None or t.action is Action.REHEARSE:
                return
            if not directive.allows(t.target.gpus, t.target.gpu_type):
                t.entered.setdefault("revised", time.time())

    # --- beginning and ending ---

    def end_with_jobs(self, jobs: Mapping[int, Job]) -> None:
        """End the transitions of jobs that have ended since the last step.

        Args:
            jobs: read just now.
        """
        for transition in self.live.values():
            if present_job(transition, jobs) is None:
                self._end(transition, TransitionState.ENDED, Reason("job-ended"), None)

    def _end(
        self, transition: Transition, state: TransitionState, problem: Reason, job: Job | None
    ) -> None:
        transition.state, transition.problem = state, problem
        transition.entered[state.value] = time.time()
        self._finish(transition, job)

    def _finish(self, transition: Transition, job: Job | None) -> None:
        self.records.put_later(transition)
        with self._lock:
            self._live.pop(transition.job_id, None)
        if transition.by_companions:
            self._in_place.end(transition)
        if self.outbox.orders(transition.job_id, transition.run).action == "notice":
            if job and job.run == transition.run and job.state in STARTED:
                resume = Orders(action="resume", notice=transition.id)
                self.outbox.ask(
                    transition.job_id, resume, run=transition.run, reason=transition.problem
                )
            else:
                self.outbox.take_back(transition.job_id)
        problem = f" Problem={transition.problem}" if transition.problem else ""
        log = self._log.info if transition.state is TransitionState.DONE else self._log.warning
        log(
            f"{transition} State={transition.state.value} Action={transition.action.value} "
            f"Seconds={transition.seconds_text()}{problem}"
        )
        self.ended.append((transition, job))

    def _recover(self, transitions: list[Transition], jobs: Mapping[int, Job]) -> None:
        """Give up, after a restart, transitions that left their job untouched; continue others."""
        self._recovering = set()
        for t in transitions:
            job = present_job(t, jobs)
            if job is None:
                self._end(t, TransitionState.ENDED, Reason("ended-unseen"), None)
            elif t.state is TransitionState.NOTIFY and t.by_companions:
                notice = Orders(action="notice", notice=t.id)  # so that ending resumes it
                self.outbox.ask(t.job_id, notice, run=t.run)
                t.problem = Reason("controller-restarted")
                t.state = TransitionState.CANCEL
                t.entered[t.state.value] = time.time()
            elif t.state in _UNTOUCHED or (
                t.state is TransitionState.REQUEUE and job.run == t.run and job.state in STARTED
            ):
                notice = Orders(action="notice", notice=t.id)  # so that ending resumes it
                self.outbox.ask(t.job_id, notice, run=t.run)
                self._end(t, TransitionState.UNDONE, Reason("controller-restarted"), job)
            elif t.by_companions:  # esrun and companions have gone on; their time-outs begin anew
                t.entered[t.state.value] = time.time()
            elif job.state in STARTED and not is_requeued_attempt(t, job):
                t.state = TransitionState.VERIFY
            elif t.state is not TransitionState.CLEAR:
                t.state = (
                    TransitionState.DRAIN if t.old else TransitionState.RESHAPE
                )  # a waiting job had no GPUs

    def abandon(self, job: Job, reason: Reason) -> bool:
        """Give up a change of a job that has kept its GPUs so far; return whether there was one."""
        transition = self.live.get(job.job_id)
        if transition is None or transition.failed or transition.state not in _UNTOUCHED:
            return False
        self._end(transition, TransitionState.UNDONE, reason, job)
        return True

    def companions(self, base: Job) -> set[int]:
        """Return the companions of changes under way that count for a job."""
        t = self.live.get(base.job_id)
        if t is None or not t.by_companions or t.run != base.run:
            return set()
        return {j.job_id for j in t.joins if j.job_id}

    def awaits(self, companion: Job) -> bool:
        """Return whether a job is a companion of a change that is under way."""
        mark = companion.companion
        t = self.live.get(mark.base) if mark is not None else None
        return (
            mark is not None
            and t is not None
            and t.by_companions
            and (t.id, t.run, t.uid) == (mark.change, mark.run, companion.uid)
        )

    def _open(self, transition: Transition) -> None:
        nodes = transition.reserved_nodes
        if not transition.by_companions:
            nodes = frozenset(transition.target.nodes if transition.target else ())
        self.reservations.open(transition.reservation, transition.user, nodes)

    def withdraw(self, jobs: Mapping[int, Job]) -> bool:
        """Withdraw notices before the controller stops, so that the jobs resume.

        Returns:
            Whether there were any.
        """
        waiting = [t for t in self.live.values() if t.state in _UNTOUCHED]
        for transition in waiting:
            job = jobs.get(transition.job_id)
            self._end(transition, TransitionState.UNDONE, Reason("controller-stopped"), job)
        return bool(waiting)

    def close(self) -> None:
        """Wait for writes under way."""
        self._pool.shutdown(wait=True)


def _depends_on_nodes(t: Transition) -> bool:
    """Return whether the next step looks at the nodes of the target: a requeue, or a start."""
    return t.state in _STARTING or (t.state is TransitionState.NOTIFY and "saved" in t.entered)
