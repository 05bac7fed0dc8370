"""The companions of a job: esrun's record of which of them belong to the training.

The controller orders changes (`core.member_orders`). esrun submits companions, starts ranks in
those that run, passes the desired ones on to rank 0, and ends those that are to leave, that failed,
or whose time is up. The outcome of a change goes into the report.

All decisions are made in one thread; other threads post what has happened.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from slurm_elastic.core.member_orders import MAX_COMPANIONS, MemberOrders
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders
from slurm_elastic.job.attempt_trial import AttemptTrial
from slurm_elastic.job.companions.companion_channel import CompanionPlace
from slurm_elastic.job.companions.companion_job import CompanionJob, companion_mark
from slurm_elastic.job.companions.companion_server import CompanionServer
from slurm_elastic.job.companions.companion_submission import (
    CompanionRefusedError,
    CompanionShape,
    CompanionSubmission,
)
from slurm_elastic.job.companions.member_change import MemberChange
from slurm_elastic.job.companions.reason_log import log_text, printable
from slurm_elastic.job.launch import RankLaunch, log_line
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.steps.step import Step

#: Seconds after which a companion that was told to end is cancelled.
_GONE_S = 5.0
#: Seconds that ranks of companions have to end by themselves after those of the base.
_FINISH_S = 10.0
#: Seconds that ranks have to leave when Slurm ends their companion: less than KillWait.
_TERMINATED_S = 25.0
#: Seconds that a line about the ability to change waits for the thread, which may be submitting.
_ABILITY_S = 5.0
#: Longest wait of the thread.
_TICK_S = 1.0


class CompanionSet:
    """Companions of one job, over all starts of its program.

    Args:
        launch: of the base.
        state: gets the outcomes of changes, and has the orders.
        send_desired: passes the desired companions on to rank 0; None: there will be none.
        trial: of the program's start, which begins anew with each change of members.
        regroups: whether ranks may join or leave while the program runs.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        launch: RankLaunch,
        state: ReportState,
        send_desired: Callable[[Mapping[str, int] | None], None],
        *,
        trial: AttemptTrial | None = None,
        regroups: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._trial = clock, trial
        self._regroups = regroups
        self._launch, self._state, self._send_desired = launch, state, send_desired
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, CompanionJob] = {}
        self._server: CompanionServer | None = None
        self._submission: CompanionSubmission | None = None
        self._change: MemberChange | None = None
        self._port: int | None = None
        self._members: frozenset[int] = frozenset()
        self._reported: dict[str, Any] = {}
        self._allowed = regroups
        self._sending = threading.Lock()
        self._sent: tuple[dict[str, int], bool] | None = None

    def start(self) -> None:
        """Start; the program learns that its members may change, unless the controller forbids it.

        The program may begin before the controller's first answer.
        """
        self._state.set_own(self._ability())
        self._publish()
        threading.Thread(target=self._run, name="companion set", daemon=True).start()
        self._state.subscribe(self._on_orders)

    def on_group(self, fields: dict[str, Any]) -> None:
        """Take a line of rank 0 about its group of ranks.

        Whether the members can change is known when this returns: the line that the training has
        begun follows, and is reported with it.
        """
        done = threading.Event()
        self._post(lambda: self._handle_group(fields))
        self._post(done.set)
        if "can" in fields:
            done.wait(_ABILITY_S)

    def end_attempt(self, *, failed: bool) -> None:
        """End all companions, as the ranks of the base have ended; returns when that is done.

        Args:
            failed: whether nothing of the program can go on; else ranks of companions may finish,
                or save what the base has lost.
        """
        done = threading.Event()
        end = time.monotonic() + _FINISH_S
        for step in [] if failed else self._running_steps():
            step.ends_within(max(0.0, end - time.monotonic()))
        self._post(lambda: self._end_all(done))
        done.wait(2 * _GONE_S)

    # Called by other threads.

    @property
    def lacked_memory(self) -> bool:
        """Whether a companion of the present group, or one that was joining, ran out of memory."""
        members = self._members
        return any(
            job.step is not None and job.step.lacked_memory
            for job in list(self._jobs.values())
            if not job.is_part and (job.job_id in members or job.state == "starting")
        )

    def admit(self, job_id: int) -> str | None:
        """Return the mark of a companion that may connect now; None if it may not."""
        job = self._jobs.get(job_id)
        return job.mark if job is not None and job.state == "submitted" else None

    def on_connected(self, job_id: int, place: CompanionPlace) -> None:
        """Handle the start of a companion's script."""
        self._post(lambda: self._handle_running(job_id, place))

    def on_terminated(self, job_id: int) -> None:
        """Handle the signal by which Slurm ends a companion."""
        by = self._clock() + _TERMINATED_S
        reason = Reason("companion-terminated", job=str(job_id))
        self._post(lambda: self._lose(job_id, reason, end_by=by))

    def on_disconnected(self, job_id: int, reason: str) -> None:
        """Handle the lost connection to a companion's script."""
        self._post(lambda: self._handle_disconnected(job_id, reason))

    def _on_orders(self, orders: Orders) -> None:
        if self._state.heard is not None:
            # At once: a program that waits for its first orders gets both together.
            self._allowed = orders.in_place and self._regroups
            self._send_if_new()
        if orders.members is not None:
            members = orders.members
            self._post(lambda: self._handle_orders(members))

    def _post(self, event: Callable[[], None]) -> None:
        self._events.put(event)

    def _parts(self) -> list[CompanionJob]:
        """Return the companions with which the program is started."""
        jobs = sorted(self._jobs.values(), key=lambda job: job.job_id)
        return [job for job in jobs if job.is_part and job.state in ("starting", "joined")]

    def _running_steps(self) -> list[Step]:
        return [job.step for job in self._jobs.values() if job.step and job.has_ranks]

    # In the thread of the set.

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                event = self._no_event
            try:
                event()
                self._meet_deadlines(self._clock())
                self._settle()
                self._publish()
            except Exception as error:  # noqa: BLE001 - the training goes on without changes
                log_line(f"internal error in a change of members: {type(error).__name__}: {error}")

    def _no_event(self) -> None:
        """Do nothing: this event only triggers the checks that follow each event."""

    def _handle_orders(self, orders: MemberOrders) -> None:
        change = self._change
        if change is None or orders.change > change.number:
            self._begin(orders)
        elif orders.change == change.number:
            has_more, is_cancelled = change.merge(orders)
            if has_more or not change.is_over:
                self._order_leaves(change)
            if is_cancelled:
                self._give_up(change, lambda job: Reason("companion-cancelled", job=job))

    def _begin(self, orders: MemberOrders) -> None:
        change = self._change = MemberChange(orders, self._clock())
        # Companions of earlier changes that have ended are not reported any more.
        self._jobs = {i: job for i, job in self._jobs.items() if job.state != "ended"}
        if orders.join and not orders.cancel:
            try:
                self._submit(orders)
            except CompanionRefusedError as error:
                change.fail(error.reason)
                log_line(f"change {orders.change} of members failed: {error}")
                return
        self._order_leaves(change)

    def _submit(self, orders: MemberOrders) -> None:
        if self._port is None and not orders.restart:
            raise CompanionRefusedError(Reason("members-fixed"))
        if len(self._jobs) + len(orders.join) > MAX_COMPANIONS:
            raise CompanionRefusedError(Reason("companions-too-many", most=MAX_COMPANIONS))
        submission = self._submission or self._prepare()
        submitted: list[CompanionJob] = []
        try:
            for gpus in orders.join:
                job_id = submission.submit(orders.change, gpus, orders.gpu_type)
                mark = companion_mark(self._launch, job_id)
                submitted.append(CompanionJob(job_id, gpus, orders.change, mark))
        except CompanionRefusedError:
            for job in submitted:
                submission.cancel(job.job_id, job.change)
            raise
        # Other threads may be reading the old one.
        self._jobs = self._jobs | {job.job_id: job for job in submitted}
        names = ", ".join(f"{job.job_id} ({job.gpus} GPUs)" for job in submitted)
        log_line(f"change {orders.change} of members: companions {names} are submitted")

    def _prepare(self) -> CompanionSubmission:
        launch = self._launch
        self._server = CompanionServer(self)
        self._submission = CompanionSubmission(
            launch.submitted,
            job_id=launch.allocation.job_id,
            run=launch.allocation.run,
            shape=CompanionShape.of_base(launch.submitted, launch.allocation.cpus, launch.tasks),
            port=self._server.port,
            secret=self._server.secret,
        )
        return self._submission

    def _order_leaves(self, change: MemberChange) -> None:
        if change.orders.restart:
            return  # when the ranks have ended
        for job_id in change.orders.leave:
            job = self._jobs.get(job_id)
            if job is not None and job.state not in ("leaving", "ended"):
                self._leave(job, change.deadline)

    def _leave(self, job: CompanionJob, end_by: float) -> None:
        """Remove a companion: rank 0 continues without its ranks from the next step on."""
        if not job.has_ranks or job.state == "starting":
            self._end(job)
        else:
            job.state, job.end_by = "leaving", end_by

    def _lose(self, job_id: int, reason: Reason, *, end_by: float = 0.0) -> None:
        """Remove a companion that ends without an order.

        Args:
            job_id: of the companion.
            reason: of `launcher_codes`.
            end_by: monotonic time at which its ranks are ended if it has not left by itself.
        """
        job = self._jobs.get(job_id)
        if job is None or job.state in ("leaving", "ended"):
            return
        log_line(f"companion {job_id} leaves: {log_text(reason)}")
        if self._change is not None and job.change == self._change.number and job.awaited:
            self._change.reason = reason
        self._leave(job, end_by)

    def _give_up(self, change: MemberChange, reason: Callable[[str], Reason]) -> None:
        """End the companions of a change that have not joined.

        Args:
            change: of members.
            reason: returns the reason for the id of a companion.
        """
        for job in self._jobs.values():
            if job.change == change.number and job.awaited:
                self._lose(job.job_id, reason(str(job.job_id)))

    def _handle_running(self, job_id: int, place: CompanionPlace) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.state != "submitted" or self._server is None:
            if self._server is not None:
                self._server.end(job_id)
            return
        job.state, job.place = "running", place
        if self._change is not None and job.change == self._change.number:
            self._change.state = "joining"
        if place.gpus != job.gpus:
            reason = Reason(
                "companion-size-differs", job=str(job_id), gpus=place.gpus, ordered=job.gpus
            )
            self._lose(job_id, reason)
        elif self._change is not None and self._change.orders.restart:
            pass  # until the ranks have ended
        elif self._port is None:
            self._lose(job_id, Reason("companion-fixed", job=str(job_id)))
        else:
            self._start_ranks(job)

    def _start_ranks(self, job: CompanionJob) -> None:
        assert self._port is not None
        assert job.place is not None
        others = [other for other in self._jobs.values() if other.desired]
        first_rank = sum(self._launch.tasks) + sum(other.gpus for other in others)
        nodes = len(self._nodes({other.job_id for other in others} | {job.job_id}))
        job.group = first_rank + job.gpus, nodes
        try:
            job.start_ranks(
                self._launch,
                port=self._port,
                first_rank=first_rank,
                nodes=nodes,
                on_end=lambda code: self._post(lambda: self._handle_step_end(job, code)),
            )
        except OSError as error:
            failure = printable(error.strerror)
            reason = Reason("companion-start-failed", job=str(job.job_id), error=failure)
            self._lose(job.job_id, reason)
            return
        if self._trial is not None:  # forming their group may break it
            self._trial.change_members(sum(self._launch.tasks))
        log_line(f"companion {job.job_id}: {job.gpus} ranks on {job.place.node} are started")

    def _handle_step_end(self, job: CompanionJob, code: int) -> None:
        reason = Reason("companion-exited", job=str(job.job_id), exit_code=code)
        if code and job.step is not None and job.step.lacked_memory:
            gpus, nodes = job.group
            reason = Reason("companion-out-of-memory", job=str(job.job_id), gpus=gpus, nodes=nodes)
            # Also where it had joined before, or rank 0 has noticed the loss first.
            if self._change is not None and self._jobs.get(job.job_id) is job:
                self._change.reason = reason
        if job.state in ("starting", "joined"):
            self._lose(job.job_id, reason)
        elif reason.code == "companion-out-of-memory":
            log_line(f"companion {job.job_id}: {log_text(reason)}")
        if job.state == "leaving":
            self._end(job)

    def _handle_disconnected(self, job_id: int, reason: str) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.state == "ended":
            return
        why = Reason("companion-disconnected", job=str(job_id), error=printable(reason))
        self._lose(job_id, why)
        if job.state != "ended":
            self._end(job)

    def _end(self, job: CompanionJob) -> None:
        """End a companion: its script kills its ranks and exits, or the job is cancelled."""
        job.state = "ended"
        if self._server is not None and self._server.end(job.job_id):
            job.gone_by = self._clock() + _GONE_S
            return
        had_ranks = job.has_ranks
        job.kill_srun()
        self._cancel(job, kill_ranks=had_ranks)

    def _cancel(self, job: CompanionJob, *, kill_ranks: bool) -> None:
        if self._submission is not None:
            self._submission.cancel(job.job_id, job.change, kill_ranks=kill_ranks)

    def _end_all(self, done: threading.Event) -> None:
        """End all companions as the attempt is over."""
        for job in list(self._jobs.values()):
            if job.state != "ended":
                self._end(job)
        if self._server is not None:
            self._server.wait_until_ended(_GONE_S)
        self._meet_deadlines(self._clock() + _GONE_S)
        self._port, self._members = None, frozenset()
        if self._change is not None and not self._change.is_over:
            self._change.reason = Reason("members-ended")
        self._settle()
        self._state.set_own({
            **self._ability(), "generation": None, "pause_s": None,
            "gpus": sum(self._launch.tasks), "nodes": len(self._launch.nodes),
        })  # fmt: skip
        self._publish()
        done.set()

    def _meet_deadlines(self, now: float) -> None:
        if self._change is not None and now >= self._change.deadline:
            self._give_up(self._change, lambda job: Reason("companion-late", job=job))
        for job in list(self._jobs.values()):
            if job.state == "leaving" and job.end_by is not None and now >= job.end_by:
                self._end(job)
            if job.gone_by is not None and now >= job.gone_by:
                job.gone_by = None
                if self._server is not None and self._server.is_connected(job.job_id):
                    self._cancel(job, kill_ranks=True)
                job.kill_srun()

    def _settle(self) -> None:
        """Decide whether the last change is over."""
        change = self._change
        if change is not None and change.settle(list(self._jobs.values())):
            why = f": {log_text(change.reason)}" if change.reason else ""
            log_line(f"change {change.number} of members is {change.state}{why}")

    def _handle_group(self, fields: dict[str, Any]) -> None:
        if "can" in fields:
            able = fields["can"] is True and self._regroups and not self._parts()
            self._port = _port(fields.get("port")) if able else None
            why = fields.get("why") or ("restarted" if fields["can"] is True else "unknown")
            is_able = self._port is not None
            self._state.set_own(
                {"in_place": is_able, "not_in_place": "" if is_able else printable(why)}
            )
        elif "dropped" in fields:
            log_line(f"generation {fields['dropped']} is dropped: {fields.get('why', '')}")
        elif isinstance(fields.get("companions"), dict):
            self._handle_generation(fields)

    def _handle_generation(self, fields: dict[str, Any]) -> None:
        self._members = frozenset(int(i) for i in fields["companions"] if str(i).isdecimal())
        for job in list(self._jobs.values()):
            if job.job_id in self._members and job.state == "starting":
                job.state = "joined"
            elif job.job_id not in self._members and job.state == "joined":
                self._lose(job.job_id, Reason("companion-dropped", job=str(job.job_id)))
        members = [job for i, job in self._jobs.items() if i in self._members]
        gpus = sum(self._launch.tasks) + sum(job.gpus for job in members)
        nodes = len(self._nodes(self._members))
        for job in members:
            job.group = gpus, nodes
        self._state.set_own({
            "gpus": gpus,
            "nodes": nodes,
            "generation": fields.get("generation"),
            "pause_s": fields.get("pause_s"),
        })  # fmt: skip
        step = fields.get("step")
        if self._trial is not None:
            # After a loss the number of ranks was not chosen.
            blamed = sum(self._launch.tasks) if fields.get("lost") else gpus
            self._trial.change_members(blamed, step=step if isinstance(step, int) else None)
        log_line(f"the training has {gpus} ranks from step {step} on")

    def _nodes(self, job_ids: frozenset[int] | set[int]) -> set[str]:
        """Return the nodes of the base and of these companions."""
        places = [job.place for i, job in self._jobs.items() if i in job_ids]
        return {*self._launch.nodes, *(place.node for place in places if place is not None)}

    def _publish(self) -> None:
        """Pass on to rank 0 and to the controller what has changed."""
        self._send_if_new()
        rows = tuple(sorted(job.row for job in self._jobs.values()))
        fields = {"companions": rows} | (self._change.report_fields() if self._change else {})
        if fields != self._reported:
            self._reported = fields
            self._state.set_own(fields)

    def _send_if_new(self) -> None:
        """Pass the desired companions on to rank 0; called by any thread."""
        with self._sending:
            desired = {str(job.job_id): job.gpus for job in self._jobs.values() if job.desired}
            allowed = self._allowed and not self._parts()
            if self._sent != (desired, allowed):
                self._sent = (desired, allowed)
                self._send_desired(desired if desired or allowed else None)

    def _ability(self) -> dict[str, Any]:
        """Return the report fields on changes in place until rank 0 reports them."""
        if self._parts():
            return {"in_place": False, "not_in_place": "restarted"}
        if not self._regroups:
            return {"in_place": False, "not_in_place": "launcher"}
        return {"in_place": None, "not_in_place": ""}


def _port(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < 65536 else None
