"""Jobs from the records that a `RecordSource` reads.

Strings that users can write are hostile: a field that is not UTF-8 reads as empty.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog

from slurm_elastic.core.cluster import Job, JobState
from slurm_elastic.core.companion_record import parse_companion_record
from slurm_elastic.core.member_orders import CompanionComment
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.submission import (
    Submission,
    SubmissionError,
    parse_admin_comment,
    parse_comment,
)
from slurm_elastic.slurm.readers import pyslurm_records
from slurm_elastic.slurm.readers.kept_submissions import KeptSubmission

_STATES = {
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "CONFIGURING": JobState.RUNNING,
    "COMPLETING": JobState.COMPLETING,
    "SUSPENDED": JobState.SUSPENDED,
    "STOPPED": JobState.SUSPENDED,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
}


class _Parsed(NamedTuple):
    """A submission, or why there is none; and whether AdminComment has something else now."""

    submission: Submission | None = None
    problem: Reason | None = None
    replaced: bool = False


class JobParser:
    """Jobs from records; a record is parsed again only when it has changed.

    Args:
        mark: returns a mark of a record, its id first; records with equal marks make equal jobs.
        keeps_licenses: a requeued job keeps its request for licenses.
    """

    def __init__(
        self,
        mark: Callable[[Any, float], tuple[Any, ...]] = pyslurm_records.mark,
        *,
        keeps_licenses: bool = True,
    ) -> None:
        self._mark, self._keeps_licenses = mark, keeps_licenses
        self._log = structlog.get_logger("snapshot")
        self._submissions: dict[tuple[int, float, str], _Parsed] = {}
        self._user_names: dict[int, str] = {}
        #: GPU types of the nodes.
        self.gpu_types: dict[str, str] = {}
        #: Partitions with a default of the CPUs of each GPU.
        self.partitions_with_cpus: frozenset[str] = frozenset()
        #: Per job: the mark of its record, and the job as last parsed.
        self._parsed: dict[int, tuple[object, Job]] = {}
        #: Jobs whose unreadable record has been logged.
        self._unreadable: set[int] = set()
        #: By job: submissions that AdminComment has, or had.
        self.kept: dict[int, KeptSubmission] = {}
        #: Jobs whose AdminComment was logged as replaced.
        self._replaced: set[int] = set()

    def jobs(self, records: Iterable[Any]) -> dict[int, Job]:
        """Return the jobs of all records, by raw id; forget the others."""
        records = tuple(records)
        jobs = [job for job in map(self.job, records) if job is not None]
        self._parsed = {j.job_id: last for j in jobs if (last := self._parsed.get(j.job_id))}
        ids = {int(raw.id) for raw in records}
        self._unreadable &= ids
        self._replaced &= ids
        self.kept = {i: kept for i, kept in self.kept.items() if i in ids}
        current = {(j.job_id, j.submit_time) for j in jobs}
        self._submissions = {k: v for k, v in self._submissions.items() if k[:2] in current}
        return {j.job_id: j for j in jobs}

    def job(self, raw: Any) -> Job | None:
        """Return the job of a record: the last one while the record's mark is the same.

        A record that cannot be parsed becomes an unmanaged job, with one line in the log.

        Args:
            raw: record of a job.

        Returns:
            None if not even the job's id and state can be read.
        """
        try:
            mark = self._mark(raw, time.time())
        except (ValueError, TypeError, AttributeError, OverflowError):
            return self._parse_or_log(raw)
        last = self._parsed.get(mark[0])
        if last is not None and last[0] == mark:
            return last[1]
        job = self._parse_or_log(raw)
        if job is not None and job.job_id not in self._unreadable:
            self._parsed[job.job_id] = (mark, job)
        return job

    def _parse_or_log(self, raw: Any) -> Job | None:
        try:
            return self._parse(raw)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
            problem = f"{error!r:.200}"
        if int(raw.id) not in self._unreadable:
            self._unreadable.add(int(raw.id))
            self._log.error(f"JobId={raw.id} Unreadable={problem}")
        try:
            return pyslurm_records.unreadable(raw, _STATES.get(raw.state, JobState.ENDED), problem)
        except (ValueError, TypeError, AttributeError, KeyError):
            return None

    def _parse(self, raw: Any) -> Job:
        state = _STATES.get(raw.state, JobState.ENDED)
        if state is JobState.ENDED:
            return self._ended(raw)
        submission, problem, is_replaced = self._submission(raw)
        if submission and not problem:
            problem = pyslurm_records.unmanageable(raw)
            if raw.licenses and not self._keeps_licenses:
                problem = problem or Reason("licenses-lost")
        companion, recorded = (None, False) if submission else _companion(raw)
        allocation = None
        layout = {}
        if state is not JobState.PENDING:
            layout = raw.get_resource_layout_per_node()
            allocation = pyslurm_records.allocation(layout)
            if allocation is None and _may_be_divided(submission):
                allocation = pyslurm_records.half_of_gpu(layout, self.gpu_types)
            if allocation is None and submission and state is JobState.RUNNING:
                holds_gpus = bool(pyslurm_records.gpu_types(layout))
                unclear = Reason("several-gpu-types") if holds_gpus else Reason("no-gpus-held")
                problem = problem or unclear
        tres = raw.requested_tres
        requested, gpu_type = pyslurm_records.requested_gpus(raw, tres)
        reason = pyslurm_records.reason(raw)
        if not requested and state is JobState.PENDING and reason == "Resources":
            # No part that it asks for is free: it waits for a whole GPU.
            requested, gpu_type = pyslurm_records.shared_request(raw, tres)
        shards = 0
        if state is JobState.PENDING and _may_be_divided(submission):
            shards = pyslurm_records.requested_shards(raw)
        gpus = requested = 1 if shards else requested
        if allocation:
            gpus, gpu_type = allocation.gpus, allocation.gpu_type
        cpus = int(raw.cpus or 0)
        memory = sum(int(n.get("memory") or 0) for n in layout.values())
        memory = memory or pyslurm_records.memory(raw, requested)
        all_memory = pyslurm_records.takes_all_memory(raw)
        begin = float(raw.eligible_time or 0)
        return Job(
            job_id=int(raw.id),
            display_id=pyslurm_records.display_id(raw),
            name=pyslurm_records.text(raw, "name"),
            user=self._user(raw),
            uid=int(raw.user_id or 0),
            state=state,
            partition=pyslurm_records.text(raw, "partition"),
            account=pyslurm_records.text(raw, "account"),
            qos=pyslurm_records.text(raw, "qos"),
            reason=reason,
            priority=int(raw.priority or 0),
            nice=int(raw.nice or 0),
            submit_time=float(raw.submit_time or 0),
            start_time=(
                None if state is JobState.PENDING else pyslurm_records.epoch(raw.start_time)
            ),
            end_time=pyslurm_records.epoch(raw.end_time),
            begin_time=begin if state is JobState.PENDING and begin > time.time() else None,
            time_limit_s=pyslurm_records.limit_s(raw.time_limit),
            run=int(raw.requeue_count or 0),
            submission=submission,
            record_replaced=is_replaced,
            managed=not problem,
            unmanaged_reason=problem,
            allocation=allocation,
            companion=companion,
            companion_recorded=recorded,
            devices=pyslurm_records.devices(layout),
            parts=pyslurm_records.parts(layout),
            shards=shards,
            gpus=gpus,
            gpu_type=gpu_type,
            min_nodes=pyslurm_records.min_nodes(raw, tres),
            cpus=cpus,
            cpus_per_gpu=cpus / gpus if gpus else 1.0,
            cpus_follow_gpus=self._cpus_follow_gpus(raw, submission),
            memory_per_gpu_mb=memory / gpus if gpus and not all_memory else 0.0,
            takes_all_memory=all_memory,
            required_nodes=pyslurm_records.named_nodes(raw, "required_nodes"),
            excluded_nodes=pyslurm_records.named_nodes(raw, "excluded_nodes"),
            features="&".join(raw.constraints or ()),
            reservation=pyslurm_records.text(raw, "reservation"),
            dependency="yes" if raw.dependencies else "",
            comment=pyslurm_records.text(raw, "comment"),
            extra=pyslurm_records.text(raw, "extra"),
            requeueable=bool(raw.is_requeueable),
            exit_code=pyslurm_records.exit_code(raw),
            whole_nodes=pyslurm_records.whole_nodes(raw),
            wckey=pyslurm_records.wckey(raw),
        )

    def _cpus_follow_gpus(self, raw: Any, submission: Submission | None) -> bool:
        """Return whether a default of its partition decides about the CPUs of an elastic job."""
        if submission is None or "cpus_per_task" in submission.shape:
            return False
        names = pyslurm_records.text(raw, "partition").split(",")
        return not self.partitions_with_cpus.isdisjoint(names)

    def _ended(self, raw: Any) -> Job:
        """Return an ended job, with the fields that history needs."""
        submission, _, is_replaced = self._submission(raw)
        return Job(
            job_id=int(raw.id),
            display_id=pyslurm_records.display_id(raw),
            name=pyslurm_records.text(raw, "name"),
            user=self._user(raw),
            uid=int(raw.user_id or 0),
            state=JobState.ENDED,
            partition=pyslurm_records.text(raw, "partition"),
            submit_time=float(raw.submit_time or 0),
            start_time=pyslurm_records.epoch(raw.start_time),
            end_time=pyslurm_records.epoch(raw.end_time),
            run=int(raw.requeue_count or 0),
            submission=submission,
            record_replaced=is_replaced,
            requeueable=bool(raw.is_requeueable),
            exit_code=pyslurm_records.exit_code(raw),
            end_state=str(raw.state or ""),
        )

    def _submission(self, raw: Any) -> _Parsed:
        """Return directive and shape, parsed once per attempt, and the error in them, or None."""
        admin = pyslurm_records.text(raw, "admin_comment")
        comment = pyslurm_records.text(raw, "comment")
        key = (int(raw.id), float(raw.submit_time or 0), admin + "\0" + comment)
        if key not in self._submissions:
            try:
                parsed = _Parsed(parse_admin_comment(admin))
            except SubmissionError as error:
                parsed = _Parsed(problem=Reason("directive-invalid", error=str(error)))
            self._submissions[key] = self._kept(raw, parsed, comment)
        return self._submissions[key]

    def _kept(self, raw: Any, parsed: _Parsed, comment: str) -> _Parsed:
        """Return the submission in AdminComment, else the one that it had, else Comment's.

        Args:
            raw: record of the job.
            parsed: what AdminComment has.
            comment: of the job.
        """
        job_id, uid, run = int(raw.id), int(raw.user_id or 0), int(raw.requeue_count or 0)
        submit_time = float(raw.submit_time or 0)
        if parsed.submission is not None:
            self._replaced.discard(job_id)
            self.kept[job_id] = KeptSubmission(
                uid=uid, run=run, submit_time=submit_time, submission=parsed.submission
            )
            return parsed
        kept = self.kept.get(job_id)
        name = pyslurm_records.text(raw, "name")
        if kept and kept.belongs_to(uid=uid, run=run, submit_time=submit_time, name=name):
            self.kept[job_id] = dataclasses.replace(kept, run=run, submit_time=submit_time, name="")
            if job_id not in self._replaced:
                self._replaced.add(job_id)
                shown = pyslurm_records.display_id(raw)
                self._log.warning(f"JobId={shown} AdminComment=replaced Directive=kept")
            return _Parsed(kept.submission, replaced=True)
        self.kept.pop(job_id, None)  # of an earlier job with this id
        if parsed.problem is not None:
            return parsed
        try:
            return _Parsed(parse_comment(comment))
        except SubmissionError as error:
            return _Parsed(problem=Reason("directive-invalid", error=str(error)))

    def _user(self, raw: Any) -> str:
        uid = int(raw.user_id or 0)
        if uid not in self._user_names:
            self._user_names[uid] = pyslurm_records.text(raw, "user_name") or str(uid)
        return self._user_names[uid]


def _may_be_divided(submission: Submission | None) -> bool:
    """Return whether shards of an elastic job are the controller's doing: it asked for none."""
    if submission is None or not submission.shape:
        return False
    return not any("shard" in str(value) for value in submission.shape.values())


def _companion(raw: Any) -> tuple[CompanionComment | None, bool]:
    """Return the base of a companion, and whether AdminComment names it; None: no companion."""
    recorded = parse_companion_record(pyslurm_records.text(raw, "admin_comment"))
    if recorded is not None:
        return recorded, True
    return CompanionComment.parse(pyslurm_records.text(raw, "comment")), False
