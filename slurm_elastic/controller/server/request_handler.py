"""Answers to the socket's requests, from a `Controller`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.leader.standby_sync import new_rows
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.durations_answer import durations, limits
from slurm_elastic.controller.queries.view import (
    HistoryRow,
    Particulars,
    SegmentRow,
    View,
    Viewer,
)
from slurm_elastic.controller.queries.visibility import Visibility
from slurm_elastic.controller.server import profile_import
from slurm_elastic.controller.server.directive_update import updated
from slurm_elastic.controller.server.request_dispatcher import RequestRefusedError
from slurm_elastic.controller.state.allocation_segments import base_of_segment
from slurm_elastic.controller.state.job_ending import EndedJob
from slurm_elastic.controller.state.ledger import LedgerError
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.slurm.shape import describe

#: Seconds for which the name of a uid is cached.
_NAME_S = 300.0
#: Characters of the reason of an order, and of parts of a logged command.
_MOST_TEXT = 200


class RequestHandler:
    """The `RequestBackend` of a `Controller`.

    Args:
        controller: the one that answers.
        check: returns the answer to `check`.
        reconfigure: reads the configuration again and returns the answer's text.
        log: gets each command that is carried out, with its user.
        sentence: returns a reason as the log of a job shows it.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        check: Callable[[View], dict[str, Any]],
        reconfigure: Callable[[], str],
        log: Any,
        sentence: Callable[[Reason], str] = str,
    ) -> None:
        self._controller, self._sentence = controller, sentence
        self._check, self._reconfigure = check, reconfigure
        self._names: dict[int, tuple[str, float]] = {}
        self._log = log

    def owner(self, job_id: int) -> int | None:
        """See `RequestBackend`."""
        job = self._controller.job(job_id)
        return job.uid if job else None

    def past_owner(self, job_id: int) -> int | None:
        """See `RequestBackend`."""
        try:
            ended = self._controller.store.ended.of(job_id)
        except LedgerError:
            return None
        return ended.job.uid if ended else None

    def find(self, name: str) -> tuple[int, ...]:
        """See `RequestBackend`."""
        return dispatch.find(self._controller.view, name)

    def has_read_cluster(self) -> bool:
        """See `RequestBackend`."""
        return self._controller.view.snapshot.time > 0

    def is_operator(self, uid: int) -> bool:
        """Return whether this is root, the controller's account, or a configured operator."""
        if uid in (0, os.geteuid()):
            return True
        return self._name(uid) in self._controller.config.controller.operators

    def _name(self, uid: int) -> str:
        """Return a user's name, "" for none; cached, as directories can be slow."""
        now = time.monotonic()
        name, until = self._names.get(uid, ("", 0.0))
        if now >= until:
            try:
                name = pwd.getpwuid(uid).pw_name
            except KeyError:
                name = ""
            self._names[uid] = (name, now + _NAME_S)
        return name

    def private(self) -> bool:
        """See `RequestBackend`."""
        return "jobs" in self._controller.published.private

    def report(self, _uid: int, report: Report) -> Orders:
        """See `RequestBackend`."""
        controller = self._controller
        job = controller.job(report.job_id)
        if controller.report_handler.handle(report, job, act=controller.acts):
            controller.soon()
        return self.orders(report.job_id, report.run)

    def orders(self, job_id: int, run: int) -> Orders:
        """See `RequestBackend`."""
        job = self._controller.job(job_id)
        orders = self._controller.report_handler.orders(job_id, run, job=job)
        reason = self._controller.report_handler.reason(job_id, run)
        if job is None or reason is None:
            return orders
        shown = Visibility(self._controller.view, self._viewer(job.uid)).reason(reason)
        # A job refuses orders that its log could not print.
        text = "".join(c if c.isprintable() else "?" for c in self._sentence(shown))[:_MOST_TEXT]
        return dataclasses.replace(orders, reason=text, reason_code=shown)

    def _viewer(self, uid: int) -> Viewer:
        private = self._controller.published.private
        return Viewer(
            uid=uid, operator=self.is_operator(uid), private="jobs" in private, hidden=private
        )

    def question(self, uid: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """See `RequestBackend`."""
        viewer, view = self._viewer(uid), self._controller.view
        if op == "check":
            return self._checked(view, viewer)
        if op == "durations":
            predictions, name = self._controller.lengths, self._name(uid)
            own_names = viewer.private and not viewer.operator
            return dict(durations(predictions, name, args, own_names=own_names))
        if op == "limits":
            private_to = self._name(uid) if viewer.private and not viewer.operator else None
            return dict(limits(self._controller.lengths, args, private_to=private_to))
        try:
            history = self._history(args) if op in ("explain", "show", "history") else ()
            segments = self._segments(args) if op == "usage" else ()
            ended = self._ended(args) if op in ("explain", "show") else None
        except LedgerError as error:
            raise RequestRefusedError(str(error)) from None
        return dispatch.answer(
            op,
            view,
            viewer,
            args,
            history=history,
            segments=segments,
            particulars=self._particulars(args) if op == "show" else None,
            ended=ended,
        )

    def _checked(self, view: View, viewer: Viewer) -> dict[str, Any]:
        """Return the answer to `check`, without other users' jobs where these are private."""
        answer = self._check(view)
        ids = view.snapshot.named.get(answer.get("slowest_job") or "", ())
        if not all(viewer.sees(view.snapshot.job[i].uid) for i in ids):
            answer = {**answer, "slowest_job": ""}
        return answer

    def copy(self, since: Mapping[str, Any]) -> dict[str, Any]:
        """See `RequestBackend`."""
        try:
            return new_rows(self._controller.ledger, since)
        except LedgerError as error:
            raise RequestRefusedError(str(error)) from None

    def command(self, uid: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """See `RequestBackend`."""
        dry = bool(args.get("dry_run"))
        by = f"Command={op} User={self._name(uid) or '-'} Uid={uid}"
        if op in ("retire", "reconfigure") and not dry:
            self._log.info(by)
        if op == "retire":
            live, waits = len(self._controller.engine.live), "would be finished"
            return {"text": f"{live} changes {waits}" if dry else self._controller.retire()}
        if op == "reconfigure":
            return {"text": "would read the configuration" if dry else self._reconfigure()}
        results = []
        for job_id in args.get("job_ids", ()):
            job = self._controller.job(job_id)
            row = {"job_id": job_id, "display_id": job.display_id if job else str(job_id)}
            try:
                text = self._carry_out(op, job_id, args, dry=dry)
                results.append({**row, "ok": True, "text": text})
            except (RequestRefusedError, LedgerError) as error:
                results.append({**row, "ok": False, "text": str(error)})
        if not dry:
            self._log_done(results, by)
            self._controller.soon()
        return {"results": results, "uid": uid}

    def _log_done(self, results: Sequence[Mapping[str, Any]], by: str) -> None:
        """Log in one line, however many jobs it names, what a command has done."""
        done = [result for result in results if result["ok"]]
        if done:
            jobs = ",".join(result["display_id"] for result in done)
            texts = "; ".join(dict.fromkeys(result["text"] for result in done))
            self._log.info(f"JobId={jobs:.{_MOST_TEXT}} {by} Text={texts:.{_MOST_TEXT}}")

    def _carry_out(self, op: str, job_id: int, args: Mapping[str, Any], *, dry: bool) -> str:
        job = self._controller.job(job_id)
        if job is None or job.submission is None:
            raise RequestRefusedError("not an elastic job")
        store = self._controller.store
        if op == "teach":
            types = {n.gpu_type for n in self._controller.view.snapshot.nodes if n.gpu_type}
            observations, text = profile_import.observations_of(args.get("profile"), types)
            use = profile_import.use_of(args.get("profile"))
            if not dry:
                store.import_observations(job, observations)
                self._controller.neighbours.teach(job, observations.stated, use)
            return text
        if op == "update":
            as_ordered = store.with_directive_in_force(job)
            ordered, text = updated(as_ordered, store.entry(job).layout, args)
            if not dry:
                if args.get("elastic") is not None:
                    store.entry(job).clear_failures()
                store.order(job, override=ordered.override, layout=ordered.layout)
                if ordered.override:
                    directive = Directive.parse(ordered.override)
                    self._controller.engine.review_target(job_id, directive)
                self._controller.report_handler.send_settings(job)
            return text
        held = op == "hold"
        if not dry:
            if not held:
                store.entry(job).clear_failures()
            store.order(job, held=held)
            if op == "release" and store.let_go(job):
                if not self._controller.acts:
                    raise RequestRefusedError(
                        f"selasticd does not act now: use `scontrol release {job.display_id}`"
                    )
                return "released: Slurm may start it again"
        return "held: its allocation is kept" if held else "released: may be resized again"

    def _particulars(self, args: Mapping[str, Any]) -> Particulars | None:
        ids: tuple[int, ...] = args.get("job_ids") or ()
        job = self._controller.job(ids[0]) if len(ids) == 1 else None
        if job is None or job.submission is None:
            return None
        store = self._controller.store
        return Particulars(
            layout=store.entry(job).layout,
            orders=self.orders(job.job_id, job.run),
            profile=store.profile(job),
        )

    def _ended(self, args: Mapping[str, Any]) -> EndedJob | None:
        """Return the record of the requested job if it has ended."""
        ids: tuple[int, ...] = args.get("job_ids") or ()
        job = self._controller.job(ids[0]) if len(ids) == 1 else None
        if len(ids) != 1 or (job is not None and job.state is not JobState.ENDED):
            return None
        return self._controller.store.ended.of(ids[0], job)

    def _history(self, args: Mapping[str, Any]) -> list[HistoryRow]:
        """Return the changes of these jobs; of earlier jobs with their ids none."""
        ids = args.get("job_ids") or (None,)
        rows = [r for i in ids for r in self._controller.ledger.transitions(i, last=200)]
        asked = (self._controller.job(i) for i in ids if i is not None)
        keys = {j.job_id: j.key for j in asked if j is not None}
        history = []
        for row in rows:
            with contextlib.suppress(ValueError):  # rows that cannot be read are left out
                transition = Transition.from_body(row)
                if keys.get(transition.job_id, transition.key) == transition.key:
                    history.append(self._history_row(transition, bool(row["live"])))
        return history

    def _history_row(self, transition: Transition, live: bool) -> HistoryRow:
        row = _history_row(transition, live=live)
        if transition.state is TransitionState.DONE:
            outcome = self._controller.store.trial_outcome(transition)
            if isinstance(outcome, Reason):
                row["outcome"], row["reason"] = "failed", outcome
            elif outcome == "trial":
                row["outcome"] = "trial"
        return row

    def _segments(self, args: Mapping[str, Any]) -> list[SegmentRow]:
        since = max(0.0, args.get("start", 0.0))
        rows = self._controller.ledger.segments(since=since, user=args.get("user") or None)
        uids = {j.user: j.uid for j in self._controller.view.snapshot.jobs}
        for name in {r["user"] for r in rows} - uids.keys():  # each once: directories can be slow
            uids[name] = _uid(name)
        return [
            SegmentRow(
                job_id=r["job_id"],
                base=base_of_segment(r),
                user=r["user"],
                uid=uids[r["user"]],
                gpu_type=r["gpu_type"],
                gpus=r["gpus"],
                start=r["start"],
                end=r["end"],
                seconds=r["seconds"],
                run=r["run"],
            )
            for r in rows
        ]


def _uid(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return -1


def _history_row(t: Transition, *, live: bool) -> HistoryRow:
    outcome = {"DONE": "done", "UNDONE": "undone", "ENDED": "failed"}.get(t.state.value, "")
    row: dict[str, Any] = {
        "time": min(t.entered.values(), default=0.0),
        "job_id": t.job_id,
        "uid": t.uid,
        "action": t.action.value,
        "from": describe(t.old) if t.old else "-",
        "to": describe(t.planned) if t.planned else "-",
        "reason": t.problem or t.reason,
        "state": t.state.value,
        "kind": t.kind.value,
        "seconds": dict(t.seconds()),
        "outcome": "" if live else t.result or outcome,
    }
    return row  # type: ignore[return-value]
