"""Steps of a requeue: the action of each state on one job.

Calling an action again after a crash is harmless. A change that a user or administrator made to the
job meanwhile wins: the transition ends.
"""

from __future__ import annotations

import time
from typing import Any

from slurm_elastic.controller.state import time_limits
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.state.trials.slurm_refusals import IMPOSSIBLE
from slurm_elastic.controller.transitions import exchange_partners
from slurm_elastic.controller.transitions.steps.state_steps import (
    GIVE_UP_S,
    HELD,
    StateSteps,
    interruption_of,
    runs_elsewhere,
)
from slurm_elastic.controller.transitions.steps.step_inputs import (
    StepInputs,
    is_requeued_attempt,
)
from slurm_elastic.core.cluster import STARTED, Allocation, Job, JobState
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm import shape
from slurm_elastic.slurm.readers.pyslurm_records import LAUNCH_FAILED
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError

#: Pending for longer than this after RELEASE: the update is sent again.
PATIENCE_S = 6.0
#: A requeued job starts by itself after about 121 s; it is put off again before. One whose node is
#: lost waits as long: Slurm could start it there when the node comes back (`lost_nodes`).
WAIT_S = 120
#: Times that what was borrowed is given back, before it is left at that.
_MOST_CLEARS = 20
#: Slurm's reasons, by their beginning, of a job that does not start by waiting some seconds more:
#: limits of a QOS, an association or a partition.
_REFUSALS = (IMPOSSIBLE, "Assoc", "Max", "QOS", "Partition")
#: States after DRAIN, in which the attempt that was requeued is over.
_DRAINED = (
    *(TransitionState.RESHAPE, TransitionState.COOL),
    *(TransitionState.RELEASE, TransitionState.VERIFY),
)


class TransitionSteps(StateSteps):
    """Actions of the states."""

    _tries_on = TransitionState.CLEAR

    def __init__(self, scontrol: Scontrol, log: Any) -> None:
        super().__init__(scontrol, log)
        self._actions = {
            TransitionState.RESERVE: self._reserve,
            TransitionState.NOTIFY: self._notify,
            TransitionState.REQUEUE: self._requeue,
            TransitionState.DRAIN: self._drain,
            TransitionState.RESHAPE: self._reshape,
            TransitionState.COOL: self._cool,
            TransitionState.RELEASE: self._release,
            TransitionState.VERIFY: self._verify,
            TransitionState.CLEAR: self._clear,
        }

    def _interrupted(self, t: Transition, job: Job) -> TransitionState | None:
        if "revised" in t.entered and t.state in (TransitionState.RESERVE, TransitionState.NOTIFY):
            return self._left(t, Reason("directive-changed"))
        if t.state not in _DRAINED or job.state is JobState.PENDING:
            return None
        if not is_requeued_attempt(t, job):
            return None
        self._log.warning(f"{t} Run={job.run} Requeue=forgotten")
        is_over = job.state is JobState.ENDED
        return TransitionState.DRAIN if is_over else TransitionState.REQUEUE

    def _reserve(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        if job.run != t.run or (job.state is JobState.PENDING) != (t.old is None):
            return self._left(t, Reason("job-changed"))
        if exchange_partners.broken(t, site.live):
            return self._left(t, Reason("exchange-given-up"))
        if t.id not in site.admitted:
            late = t.waited(time.time()) > 3.0
            if late and (t.id in site.hopeless or not site.donors(t)):
                return self._left(t, Reason("gpus-taken"))
            return None
        if t.old is not None and not t.failed and (obstacle := site.obstacle(job, t.target)):
            return self._left(t, obstacle)  # drained while it runs there: it would only wait
        if t.old is None and job.time_limit_s is not None:
            self._count(t, job, ran_s=0.0)
        if t.old is None:
            return TransitionState.RESHAPE
        if t.failed:
            self._count_running(t, job)
            return TransitionState.REQUEUE
        return TransitionState.NOTIFY

    def _notify(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        if interruption := interruption_of(t, job):
            return self._left(t, interruption)
        if "declined" in t.entered:
            return TransitionState.UNDONE
        if exchange_partners.broken(t, site.live):
            return self._left(t, Reason("exchange-given-up"))
        if "saved" in t.entered:
            if not exchange_partners.all_saved(t, site.live):
                return None
            if obstacle := site.obstacle(job, t.target):  # since it was asked to save
                return self._left(t, obstacle)
            self._count_running(t, job)
            return TransitionState.REQUEUE
        if t.waited(time.time()) > t.notice_s:
            t.entered["unanswered"] = time.time()
            return self._left(t, Reason("no-checkpoint", notice_s=t.notice_s))
        return None

    def _requeue(self, t: Transition, job: Job, _: StepInputs) -> TransitionState | None:
        if job.run == t.run and job.state is JobState.SUSPENDED:
            return self._left(t, Reason("job-suspended"))
        if job.run != t.run or job.state is not JobState.RUNNING:
            return TransitionState.DRAIN
        if t.waited(time.time()) > 2.0 or not t.tries:  # the answer may have been lost
            t.tries += 1
            self._scontrol.requeue(job)
            return TransitionState.DRAIN
        return None

    def _drain(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        self._end_companions(t, site)
        if job.state is JobState.PENDING and job.run > t.run:
            t.entered["drained"] = time.time()
            if t.exchange and not t.given_up:
                return self._drained_in_exchange(t, job, site)
            return TransitionState.RESHAPE
        if job.state is JobState.ENDED:
            self._log.warning(
                f"{t} Run={job.run} Requeue=forgotten ExitCode={job.exit_code} Action=requeue"
            )
            self._scontrol.requeue_ended(job)
            return None
        if job.state in STARTED:
            if job.run > t.run:
                return self._left(t, Reason("started-by-others"), TransitionState.CLEAR)
            if job.state is JobState.SUSPENDED:
                return self._left(t, Reason("job-suspended"))
            if t.waited(time.time()) > PATIENCE_S:
                return TransitionState.REQUEUE
        return None

    def _drained_in_exchange(
        self, t: Transition, job: Job, site: StepInputs
    ) -> TransitionState | None:
        """Wait in the old shape until the others of the exchange have left their GPUs, too."""
        refused = exchange_partners.refused(t, site.live)
        if not refused and t.target is not None and site.free(t, t.target):
            return TransitionState.RESHAPE
        late = t.waited(time.time()) > exchange_partners.EXCHANGE_S
        if late or exchange_partners.broken(t, site.live):
            return self._fall_back(t, job, site, Reason("exchange-given-up"))
        return None

    def _end_companions(self, t: Transition, site: StepInputs) -> None:
        """Cancel the companions of the attempt that ends: the job's new shape is one job."""
        for companion in site.companions.values():
            mark = companion.companion
            if (
                mark is not None
                and (mark.base, mark.run, companion.uid) == (t.job_id, t.run, t.uid)
                and (companion.companion_recorded or companion.job_id in t.leaves)
                and companion.state in (JobState.PENDING, JobState.RUNNING)
            ):
                self._scontrol.cancel(companion)

    def _reshape(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        if job.state is not JobState.PENDING:
            return TransitionState.VERIFY if job.state in STARTED else None
        if job.reason in HELD:
            self._to_queue(t, job, site, start="now")
            return self._left(t, Reason("held-in-slurm"))
        if t.target is None:
            self._to_queue(t, job, site, start=f"now+{int(site.lease_s)}")
            if (
                t.nice and TransitionState.RELEASE.value in t.entered
            ):  # its start priority took that away
                return TransitionState.CLEAR
            return TransitionState.UNDONE if t.given_up else TransitionState.DONE
        if t.target.half and not site.shards_of_half(t.target):
            return self._fall_back(t, job, site, Reason("gpu-undivided", nodes=t.target.nodes))
        self._give_size(t, job, site, t.target)
        return TransitionState.COOL

    def _give_size(self, t: Transition, job: Job, site: StepInputs, target: Allocation) -> None:
        """Write the size of a target, which the job waits for."""
        shards = site.shards_of_half(target) if target.half else 0
        fields = shape.sized(job, target, time_limit_s=self._limit_s(t), shards=shards)
        self._scontrol.update(job, {**fields, "StartTime": f"now+{WAIT_S}"})

    def _cool(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        """Wait for credential and GPUs; the written shape is read back meanwhile."""
        if job.state in STARTED:
            return TransitionState.VERIFY
        if t.target is None:
            return TransitionState.RESHAPE
        now = time.time()
        cooled = t.waited(now, "drained") >= site.wait_after_requeue_s
        if not cooled or t.waited(now) < 0.05:
            return None
        wrong = shape.difference(job, t.target)
        if wrong:
            return self._reshape_again(t, job, site, wrong)
        if obstacle := site.obstacle(job, t.target) or site.spare_gpu(t, t.target):
            return self._fall_back(t, job, site, obstacle)
        if site.free(t, t.target):
            return TransitionState.RELEASE
        if t.waited(now) > GIVE_UP_S:
            return self._fall_back(t, job, site, Reason("gpus-taken"))
        return None

    def _release(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        if job.state is not JobState.PENDING:
            return TransitionState.VERIFY
        if job.reason in HELD:
            return TransitionState.RESHAPE
        if t.target is None:
            return TransitionState.RESHAPE
        site.open(t)
        self._scontrol.update(job, shape.pinned(t.target, reservation=t.reservation))
        return TransitionState.VERIFY

    def _verify(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        if job.state in STARTED:
            return self._started(t, job)
        waited = t.waited(time.time())
        if job.state is JobState.PENDING and job.reason in HELD:
            return TransitionState.RESHAPE  # a new priority would lift the hold
        if job.state is JobState.PENDING and job.reason == LAUNCH_FAILED:
            t.entered["drained"] = time.time()  # it has just left its nodes once more
            return self._fall_back(t, job, site, Reason("launch-failed"))
        if job.state is JobState.PENDING and (obstacle := site.obstacle(job, t.target)):
            return self._fall_back(t, job, site, obstacle)
        # slurmctld may have been killed before it saved that the job had started: the job's node is
        # about to say so, and for a second after that it refuses another start.
        settled = min(waited, site.answering_s) >= PATIENCE_S
        if job.state is not JobState.PENDING or not settled:
            return None
        if t.target is not None and not site.free(t, t.target):
            return self._fall_back(t, job, site, Reason("gpus-taken"))
        if waited > GIVE_UP_S or job.reason.startswith(_REFUSALS):
            return self._fall_back(t, job, site, Reason("not-started", slurm_reason=job.reason))
        if t.tries < 2 and waited > PATIENCE_S * (t.tries + 1):
            t.tries += 1
            if t.target is not None:
                self._scontrol.update(job, shape.pinned(t.target, reservation=t.reservation))
        return None

    def _started(self, t: Transition, job: Job) -> TransitionState:
        """Compare the job's GPUs with the plan; requeue it if Slurm started it without any.

        Seen on Slurm 23.11 after a restart of slurmctld. The second time it goes into the queue.
        """
        if t.target is not None and job.allocation is None:
            self._log.warning(f"{t} Run={job.run} Problem={Reason('no-gpus-held')}")
            if "no_gpus" in t.entered:
                t.problem = t.problem or Reason("no-gpus-held")
                t.target = None
            t.entered["no_gpus"] = time.time()
            t.run = job.run
            return TransitionState.REQUEUE
        t.entered.setdefault("running", time.time())
        if t.target is not None and job.allocation != t.target:
            t.problem = t.problem or runs_elsewhere(job.allocation)
        return TransitionState.CLEAR

    def _clear(self, t: Transition, job: Job, _: StepInputs) -> TransitionState | None:
        """Restore reservation, priority and nice value.

        Slurm may ignore a nice value with exit code 0, and the next change would take the lost
        value for the owner's: it is read back before this one ends.
        """
        if job.state is JobState.PENDING and job.reason in HELD:
            return self._left(t, Reason("held-in-slurm"))  # a release would lift the hold
        if "cleared" in t.entered and job.nice:
            return TransitionState.UNDONE if t.given_up else TransitionState.DONE
        try:
            # First, soon after the look at the job: it lifts a hold set since, too.
            self._scontrol.release(job)
            if t.nice:
                self._scontrol.update(job, {"Nice": str(t.nice)})
            # Last: a controller that has lost its ledger meanwhile knows by it what is missing.
            if job.reservation and job.reservation == t.reservation:
                self._scontrol.update(job, {"ReservationName": ""})
        except ScontrolError as error:
            t.tries += 1
            if t.tries > _MOST_CLEARS:
                self._log.warning(f"{t} Problem={error}")
                return TransitionState.UNDONE
            raise
        if t.nice and t.tries < _MOST_CLEARS:
            t.tries += 1
            t.entered["cleared"] = time.time()
            return None
        return TransitionState.UNDONE if t.given_up else TransitionState.DONE

    # --- ways out ---

    def _refused(
        self, t: Transition, job: Job, site: StepInputs, error: ScontrolError
    ) -> TransitionState:
        reason = Reason("slurm-refused", error=str(error))
        if job.state is JobState.ENDED:
            self._log.warning(f"{t} Problem={error}")
            return self._left(t, reason, TransitionState.ENDED)
        if t.state is TransitionState.REQUEUE or (t.given_up and t.target is None):
            self._log.warning(f"{t} Problem={error}")
            return self._left(t, reason)  # in the queue Slurm starts it as it is
        return self._fall_back(t, job, site, reason)

    def _count_running(self, t: Transition, job: Job) -> None:
        """Compute the time that a running attempt, which ends now, leaves the job."""
        now = time.time()
        t.limit_s = shape.remaining_s(job, now, spare_s=t.spare_s)
        if job.start_time is not None:
            self._count(t, job, ran_s=now - job.start_time)

    def _count(self, t: Transition, job: Job, *, ran_s: float) -> None:
        """Compute the job's time that an ending attempt leaves, where its limit may be extended."""
        if t.budget is None or job.time_limit_s is None:
            return
        if t.budget.set_s not in (None, job.time_limit_s):
            self._log.info(
                f"{t} TimeLimit={job.time_limit_s} Was={t.budget.set_s} "
                f"Reason={Reason('limit-set-by-others')}"
            )
        t.budget = time_limits.after(t.budget, ran_s=ran_s, limit_s=job.time_limit_s)

    def _limit_s(self, t: Transition) -> int | None:
        """Return the time limit (s) for the shape that the job gets now; None: unchanged."""
        if t.budget is None or t.terms is None:
            return t.limit_s
        name = "queue" if t.target is None else "planned" if t.target == t.planned else "old"
        reserved = t.terms.reserved.get(name)
        last_limit_s = t.budget.set_s
        t.budget, t.limit_s = time_limits.begun(
            t.budget,
            pace=t.terms.paces.get(name, 1.0),
            most_s=t.terms.most_s,
            until_s=None if reserved is None else reserved - time.time(),
        )
        if t.budget.extended_s and t.limit_s != last_limit_s:
            self._log.info(f"{t} TimeLimit={t.limit_s} Extended={t.budget.extended_s}")
        return t.limit_s

    @staticmethod
    def _left(
        t: Transition, reason: Reason, state: TransitionState = TransitionState.UNDONE
    ) -> TransitionState:
        t.problem = t.problem or reason
        return state

    def _reshape_again(
        self, t: Transition, job: Job, site: StepInputs, wrong: str
    ) -> TransitionState | None:
        """Write a size again that Slurm does not show, or give the plan up."""
        t.tries += 1
        if t.tries > 3:
            return self._fall_back(t, job, site, Reason("change-partial", difference=wrong))
        if t.target is not None and t.tries > 1:  # the read may have been older than the write
            self._give_size(t, job, site, t.target)
        return None

    def _fall_back(
        self, t: Transition, job: Job, site: StepInputs, reason: Reason
    ) -> TransitionState:
        """Go back to the old allocation if it is still free, else into the queue at MIN.

        Into the queue, too, where the program has failed in the old one.
        """
        self._log.warning(f"{t} Problem={reason}")
        t.refused = 0
        first = not t.given_up
        t.problem = t.problem or reason
        back = t.old if first and not t.failed and not site.obstacle(job, t.old) else None
        if back is not None and not site.promised(t, back):
            t.target = back
        else:
            t.target = None
        return TransitionState.RESHAPE

    def _to_queue(self, t: Transition, job: Job, site: StepInputs, *, start: str) -> None:
        """Shape the job as its user submitted it, at MIN, without our priority or nodes."""
        directive = job.directive
        if directive is None:
            return
        if t.given_up:
            start = f"now+{WAIT_S}" if site.lost_its_node(t, job) else "now"
        fields = shape.queued(job, directive, gpus_per_node=site.per_node.get(job.partition, {}))
        time_left = shape.time_fields(job, self._limit_s(t))
        self._scontrol.update(job, {**fields, **time_left, "StartTime": start})
        if job.priority >= int(shape.FIRST) or job.reason == LAUNCH_FAILED:
            self._scontrol.release(job)
