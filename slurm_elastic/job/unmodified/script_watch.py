"""Watch of a script that saves and loads its own checkpoints.

Reports and orders of such scripts (defined in docs/esrun-scripts.md):

- `notice`: request a checkpoint by the signal, if there is one; report `saved` when a checkpoint is
  complete; after the signal, only if it has changed since the notice.
- `notice` for a rehearsal: keep the newest checkpoint, in a thread, and report `saved` then.
- `rehearse`, of controllers of 0.1.0: ignored, as it would risk the script's only checkpoint.
- proven: a restart has read the newest checkpoint and then written a newer one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_elastic.core.report import Orders
from slurm_elastic.job.complete_marker import CompleteMarker
from slurm_elastic.job.environment.world_variables import batch_may_change
from slurm_elastic.job.launch import log_line
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.unmodified.array_siblings import ArraySiblings
from slurm_elastic.job.unmodified.checkpoints import learned_saves
from slurm_elastic.job.unmodified.checkpoints.checkpoint_scanner import (
    CheckpointScanner,
    ScriptCheckpoint,
)
from slurm_elastic.job.unmodified.checkpoints.empty_checkpoints import remove_empty
from slurm_elastic.job.unmodified.checkpoints.settle_time import SettleTime, least_settle_s
from slurm_elastic.job.unmodified.command_history import CommandHistory
from slurm_elastic.job.unmodified.first_growth import FirstGrowth
from slurm_elastic.job.unmodified.fixed_accumulation import FixedAccumulation, fixed_line
from slurm_elastic.job.unmodified.given_notice import GivenNotice
from slurm_elastic.job.unmodified.node_disks import refusal_line, this_node
from slurm_elastic.job.unmodified.rank_freeze import FROZEN_S, RankFreeze, TerminationHandler
from slurm_elastic.job.unmodified.rehearsal import Rehearsal
from slurm_elastic.job.unmodified.rehearsal_copy import RehearsalCopy
from slurm_elastic.job.unmodified.resume_detection import ResumeDetection
from slurm_elastic.job.unmodified.resume_state import ResumeStateFile
from slurm_elastic.job.unmodified.training_state_check import (
    TrainingPoint,
    TrainingStateCheck,
)

#: Seconds between scans without events: by default, while a checkpoint is incomplete, and while the
#: controller waits for one.
_TICK_S, _SETTLE_TICK_S, _QUICK_TICK_S = 10.0, 0.5, 0.1
_BURST_S = 0.1
#: Seconds between two scans until there is a checkpoint: its directory is not watched yet, and two
#: saves that are found at once would be taken for one.
_FIRST_TICK_S = 1.0
#: Seconds without a change after which a save is taken for one that does not end: its ranks wait
#: for others that are lost (our choice).
_STUCK_S = 60.0
#: Newest checkpoints from which the size of one is taken.
_NEWEST = 4


class ScriptWatch:
    """Watch of one script through all attempts of one run.

    Args:
        pattern: glob pattern of its checkpoints.
        state: gets reports, has the orders.
        resume_file: state of earlier runs.
        send_signal: sends the user's signal to the ranks; None without one.
        run_id: of the job.
        guard: kills ranks that have saved and ignore SIGTERM.
        world: number of ranks.
        hosts: number of hosts on which they run.
        complete: pattern of the marker of a complete checkpoint; None: the script writes none.
        command: its command in this run of the job (`program_command`).
        micro_batches: of `esrun --micro-batches`; None: not given.
        accumulation: shows whether it resumes wrongly on another number of ranks; None: it never
            does.
        are_alone: returns whether each rank trains alone, from the size of a checkpoint that they
            have written; None: perhaps.
        end_ranks: ends them then.
        clock: monotonic seconds.

    Attributes:
        command: of this run, beside those of earlier runs.
        wrong_size_line: why it must not resume on the number of ranks of the attempt; "": it may.
        has_lost_checkpoints: whether a script that resumes has not ended, and all its checkpoints
            are missing at the start of the attempt.
    """

    def __init__(
        self,
        *,
        pattern: str,
        state: ReportState,
        resume_file: ResumeStateFile,
        send_signal: Callable[[], None] | None,
        run_id: str,
        guard: TerminationHandler,
        world: int = 1,
        hosts: int = 1,
        complete: str | None = None,
        command: str = "",
        micro_batches: int | None = None,
        accumulation: FixedAccumulation | None = None,
        are_alone: Callable[[int], bool | None] = lambda _: False,
        end_ranks: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._file, self._run_id = resume_file, run_id
        self._resume = resume_file.load()
        self._resume.select(pattern)
        self.command = CommandHistory(command, world, self._resume)
        self._growth = FirstGrowth(self._resume, resume_file, are_alone, end_ranks, clock)
        self._world = world
        self._training = TrainingStateCheck(
            self._resume,
            world,
            batch_may_change=batch_may_change(os.environ),
            micro_batches=micro_batches,
        )
        self._accumulation = accumulation
        self._program_step: int | None = None
        self._send_signal = send_signal
        self._guard = guard
        self._freeze = RankFreeze(guard, clock)
        self._clock = clock
        self._learned = learned_saves.select(self._resume.learned, pattern, complete)
        self._world_key = f"{world}x{hosts}"
        self._pattern = pattern
        self._settle = SettleTime(self._learned.pause_s, least_s=least_settle_s(pattern, hosts))
        marker = CompleteMarker(complete) if complete else None
        self._scanner = CheckpointScanner(
            pattern,
            settle=self._settle,
            marker=marker,
            ranks=world,
            clock=clock,
        )
        self._siblings = ArraySiblings(pattern, run_id, resume_file.directories, clock=clock)
        self._reads = ResumeDetection()
        self._scanner.before_read = self._reads.ignore
        self._lock = threading.Lock()
        self._notice = GivenNotice()
        self._begun_at_start = 0
        self._rehearsal = Rehearsal(
            self._resume, resume_file, run_id, pattern=pattern, marker=marker, clock=clock
        )
        self._copy = RehearsalCopy(self._rehearsal, self, state, lock=self._lock, clock=clock)
        self._written = 0
        self._last_complete: float | None = None
        self._last_save = 0
        self._is_stopped = self.has_lost_checkpoints = False
        self.wrong_size_line = ""

    def set_world(self, world: int, hosts: int) -> None:
        """Set the ranks and hosts of the next attempt, in the same run of the job."""
        with self._lock:
            self._world, self._world_key = world, f"{world}x{hosts}"
            self._training.world = self._scanner.ranks = world
            self._settle.least_s = least_settle_s(self._pattern, hosts)

    def begin_attempt(self, *, restarted: bool) -> None:
        """Take the existing checkpoints as complete and watch for reads; before each start.

        Args:
            restarted: whether this job has run before and may resume.
        """
        with self._lock:
            self._siblings.begin()
            self._look_for_siblings()
            originals = self._rehearsal.begin_attempt()
            if restarted:
                remove_empty(self._pattern)
            self._scanner.accept_existing(self._learned.files.get(self._world_key))
            self._written = 0
            self._copy.begin_attempt()
            self._program_step = None
            self._freeze.forget()
            self._notice.begin_attempt()
            if self._notice.is_given:
                self._guard.unguard()
            self._begun_at_start = self._scanner.begun
            self._training.begin_attempt()
            self._last_complete = None
            self._reads.close()
            existing = self._scanner.complete
            self.wrong_size_line = self._wrong_size_line(existing) if restarted else ""
            if self._resume.needed_micro_batches and existing:
                self._check_accumulation(existing[0])
            self._growth.begin_attempt([c.path for c in existing[:_NEWEST]], self._world)
            is_gone = not self._scanner.has_found_any
            if restarted and self._resume.count and (existing or (originals and is_gone)):
                self._reads.begin(existing, originals)
            is_unfinished = self._resume.proven and not self._resume.has_ended
            self.has_lost_checkpoints = restarted and is_gone and is_unfinished
        self._state.update(
            {
                "kind": "script",
                "step": self._resume.count,
                "checkpoint_step": self._resume.count or None,
                "proven": self._is_proven,
                "jump": self._resume.jump,
                **self._rehearsal.report(),
            }
        )

    def record_program_step(self, fields: dict[str, Any]) -> None:
        """Take the step of a save from a report of `slurm_elastic.integrations`.

        A checkpoint is reported when it is complete, not when the program says so: the field is
        removed. From then on steps of the program are reported, not the number of checkpoints.
        """
        step = fields.pop("checkpoint_step", None)
        if type(step) is int and 0 <= step < 1 << 62:
            with self._lock:
                self._program_step = step

    def end_attempt(self, code: int | None) -> None:
        """Put back what the attempt has lost, when its ranks have ended.

        Args:
            code: its exit code; None: Slurm ends it.
        """
        if code == 0:
            self.count_last()
        self._copy.end_attempt()
        with self._lock:
            self._siblings.leave()
            resumed = self._reads.has_resumed()
            fields = self._rehearsal.end_attempt(code, resumed=resumed)
        self._state.update(fields)

    def start(self) -> None:
        """Start the watch in the background."""
        self.command.log_difference()
        self._state.subscribe(self.apply_orders)
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    @property
    def has_answered_notice(self) -> bool:
        """Whether a notice has been answered; what the script does after that is lost."""
        return self._notice.answered is not None

    def apply_orders(self, orders: Orders) -> None:
        """Act on new orders."""
        if self._is_stopped:
            return
        notice = self._notice
        with self._lock:
            is_new_notice = orders.action == "notice" and orders.notice != notice.orders.notice
            if is_new_notice:
                self._look_for_siblings(at_once=True)
            if is_new_notice and self._send_signal:
                self.count_new()
                notice.saves_before = self._scanner.begun
            old_orders, notice.orders = notice.orders, orders
            if is_new_notice:
                notice.given_at, notice.due = self._clock(), None
                self._last_complete = None
                self._guard.guard()
                request = "requesting a" if self._can_signal() else "waiting for the next"
                reason = orders.reason or "a resize"
                log_line(f"notice {orders.notice}: {reason}; {request} checkpoint")
                self._copy.begin_notice()
            elif not notice.is_given and old_orders.action == "notice":
                self._guard.unguard()
                if notice.answered is None and self._scanner.unsettled:
                    log_line(
                        f"notice {old_orders.notice}: the end of a save could not be seen in time;"
                        " name the file that the script writes last by esrun --complete"
                    )
                notice.withdraw()
                self._freeze.forget()
                reason = orders.reason or "the job continues"
                log_line(f"notice {old_orders.notice} is withdrawn: {reason}")
                self._state.update({"phase": "training", "notice": None})
        if notice.is_given and not notice.is_answered:
            self._state.update({"phase": "saving", "notice": orders.notice})
            self._signal_once()
        with self._lock:
            self._keep_if_due()
        self._scanner.wake()

    def _can_signal(self) -> bool:
        # Before its first save a script may not have installed its handler: it would die.
        return self._send_signal is not None and self.has_begun_save()

    def has_begun_save(self) -> bool:
        """Return whether the script has begun a save in this attempt."""
        return self._scanner.begun > self._begun_at_start

    def _signal_once(self) -> None:
        if self._send_signal and self._can_signal() and not self._notice.is_signalled:
            self._notice.signalled = self._notice.orders.notice
            self._send_signal()

    def refusal_line(self) -> str:
        """Return why it is not started without its checkpoints."""
        node = self._resume.node
        return refusal_line(
            self._pattern,
            written=self._resume.count,
            state=self._file.path,
            job_id=self._run_id.rpartition("-")[2],
            node="" if node == this_node() else node,
        )

    def count_last(self) -> None:
        """Count, if it is the first one, a checkpoint that the program wrote before it ended."""
        with self._lock:
            before = {(c.path, c.signature) for c in self._scanner.complete}
            self._scanner.accept_existing()
            written = [c for c in self._scanner.complete if (c.path, c.signature) not in before]
            if written and not self._written:
                self._count(written[0])

    @property
    def has_nothing_left(self) -> bool:
        """Whether it had ended before, and has only read its newest checkpoint in this attempt."""
        return self._resume.has_ended and not self._written and self._reads.has_resumed()

    def record_end(self) -> None:
        """Keep that the program has ended with exit code 0, if it has completed a checkpoint."""
        with self._lock:
            if self._written and not self._resume.has_ended:
                self._resume.has_ended = True
                self._file.save(self._resume)

    def stop(self) -> None:
        """Stop the watch: the program reports by itself."""
        self._is_stopped = True
        self._siblings.leave()

    def _run(self) -> None:
        while not self._is_stopped:
            self._scanner.wait(self._interval_s())
            # Events come in bursts, and each scan costs the file server a stat per checkpoint.
            time.sleep(_BURST_S)
            if not self._is_stopped:
                self.check()

    def _interval_s(self) -> float:
        """Return the seconds until the next scan if no event comes."""
        if self._notice.is_given and not self.has_answered_notice:
            return _QUICK_TICK_S
        if not self._scanner.has_found_any:
            return _FIRST_TICK_S
        return _SETTLE_TICK_S if self._scanner.unsettled else _TICK_S

    def check(self) -> None:
        """Scan the checkpoints once, and report."""
        with self._lock:
            self._look_for_siblings()
            self.count_new()
            self._keep_if_due()
            self._answer_if_due()
            is_unused = self._thaw_if_late()
            self._end_if_alone()
        if is_unused:
            self._state.expire_notice(is_unused=True)

    @property
    def _is_proven(self) -> bool:
        """Whether the script is shown to resume on any size, from checkpoints of its own."""
        is_fixed = self._resume.needed_micro_batches > 0
        return self._resume.proven and not is_fixed and not self._siblings.running

    def _look_for_siblings(self, *, at_once: bool = False) -> None:
        """Report when another task of the array begins or ends to share the pattern."""
        if self._siblings.look(at_once=at_once):
            fields = self._rehearsal.record_sibling(self._siblings.running)
            self._state.update({"proven": self._is_proven, **fields})

    def _end_if_alone(self) -> None:
        """End ranks that train alone, when none of them saves."""
        if not self._growth.must_end:
            return
        is_due = not self._scanner.unsettled and self.freeze()
        if not is_due and self._growth.is_late(self._scanner.changed_at):
            # They save one after the other: the end of a save may never be seen.
            self._freeze.begin()
            is_due = True
        if is_due:
            self._growth.end()

    @property
    def orders(self) -> Orders:
        """The present orders; none, once the watch has stopped."""
        return Orders() if self._is_stopped else self._notice.orders

    def count_new(self) -> bool:
        """Scan and count what has become complete; return whether no save is under way."""
        for checkpoint in self._scanner.scan():
            self._count(checkpoint)
        return not self._scanner.unsettled

    def _count(self, checkpoint: ScriptCheckpoint) -> None:
        """Count and report a complete checkpoint."""
        if not self._written:
            self._growth.check(checkpoint, self._world)
        if self._growth.is_open:  # nor does one before that is known
            return
        if self._growth.has_failed:  # such a checkpoint does not end the trial of the attempt
            self._state.update({"jump": self._resume.jump})
            self._guard.guard()
            return
        self._rehearsal.observe(checkpoint)
        if not self._notice.is_given:
            self._rehearsal.withdraw()
        same_save = checkpoint.save == self._last_save != 0
        self._last_save = checkpoint.save
        self._copy.add(checkpoint, same_save=same_save)
        if same_save:
            self._state.update(self._notice_fields(checkpoint))
            return
        self._written += 1
        earlier_count = self._resume.count
        self._resume.count = max(earlier_count + 1, self._program_step or 0)
        self._resume.start_world = self._resume.start_world or self._world
        self._resume.saves += 1
        self._resume.node = this_node()
        self.command.record()
        self._record_resume(earlier_count)  # before the next line, which reads the checkpoint
        # What a rehearsal has lost is put back.
        if self._resume.proven or not self._resume.refuted:
            self._training.add(checkpoint.path)
        self._record_learned()
        self._check_accumulation(checkpoint)
        self._file.save(self._resume)
        fields = {
            "phase": "training",
            "checkpoint_step": self._resume.count,
            "checkpoint_age_s": self._clock() - checkpoint.changed_at,
            "proven": self._is_proven,
            "jump": self._resume.jump,
        }
        if self._program_step is None:
            fields |= {"step": self._resume.count}
        last = self._last_complete
        # Earlier than the last one if several ranks write the same files, or hosts' clocks differ.
        if last is not None and checkpoint.written > last and self._program_step is None:
            fields |= {"step_time_s": checkpoint.written - last, "steps_measured": 1}
        self._last_complete = checkpoint.written
        fields |= self._rehearsal.report([checkpoint.path])
        self._state.update(fields | self._notice_fields(checkpoint))

    def _wrong_size_line(self, existing: Sequence[ScriptCheckpoint]) -> str:
        """Return why the program must not resume from the newest checkpoint; "": it may."""
        point = TrainingPoint.from_json(self._resume.training)
        if not existing or self._accumulation is None or point is None or not point.world:
            return ""
        return self._accumulation.wrong_size_line(existing[0].path, point.world, self._world)

    def _check_accumulation(self, checkpoint: ScriptCheckpoint) -> None:
        """Record whether the script would resume wrongly on another number of ranks."""
        last = self._resume.needed_micro_batches
        needed = 0
        if self._accumulation and self._program_step is None:  # else it uses the integrations
            needed = self._accumulation.needed_micro_batches(checkpoint.path, self._world)
        self._resume.needed_micro_batches = needed
        if self._accumulation and needed and not last:
            in_code = self._accumulation.is_set_in_code
            log_line(fixed_line(checkpoint.path, needed, self._world, is_set_in_code=in_code))

    def _record_learned(self) -> None:
        """Record what is known of the saves now, for later attempts."""
        self._learned.pause_s = self._settle.pause_s
        files = self._scanner.known_files
        if files is not None or self._scanner.is_contradicted:
            self._learned.record(self._world_key, files)

    def _keep_if_due(self) -> None:
        """Begin to copy the newest save, if a rehearsal is asked for."""
        notice = self._notice
        if not notice.is_given or not notice.orders.rehearsal or self._resume.proven:
            return
        is_quiet = not self._scanner.unsettled and self._scanner.is_confirmed
        if not notice.is_answered and is_quiet:
            self._copy.start_if_due(
                notice.orders.notice, notice.given_at, is_signalled=notice.is_signalled
            )

    def copy_ended(self) -> None:
        """Look whether another copy is due."""
        with self._lock:
            self._keep_if_due()
        self._scanner.wake()

    def _notice_fields(self, checkpoint: ScriptCheckpoint) -> dict[str, Any]:
        """Return the fields of a report that a complete checkpoint changes under a notice."""
        notice = self._notice
        if not notice.is_given or notice.orders.notice == self._copy.declined:
            return {}
        if self._siblings.running:  # the checkpoint may be of another task
            return {"phase": "saving", "notice": notice.orders.notice}
        needs_copy = notice.orders.rehearsal and not self._resume.proven
        return notice.fields(checkpoint, needs_copy=needs_copy, is_saving=self._scanner.unsettled)

    def _answer_if_due(self) -> None:
        """Answer the notice, unless the next save has begun."""
        if not self._scanner.unsettled and not self._scanner.is_confirmed:
            return  # later
        checkpoint, self._notice.due = self._notice.due, None
        is_asked = self._notice.is_given and not self.has_answered_notice
        if checkpoint is not None and is_asked and not self._scanner.unsettled and self.freeze():
            self.answer(checkpoint)

    def answer(self, checkpoint: ScriptCheckpoint) -> None:
        """Answer the notice: all is saved, in this checkpoint."""
        number = self._notice.orders.notice
        self._notice.answered, self._notice.due = number, None
        self._guard.arm()
        log_line(f"notice {number}: {Path(checkpoint.path).name} is complete")
        self._state.update({"phase": "saved", "notice": number})

    def freeze(self) -> bool:
        """Freeze the ranks, so that none begins a save that the requeue would cut.

        Where they cannot be frozen the notice is answered all the same.

        Returns:
            False if a save had begun before they stood; they go on then.
        """
        self._freeze.begin()
        if not self.count_new():
            self.thaw()
            return False
        return True

    def is_saving(self) -> bool:
        """Look whether a save is under way that goes on; not while the ranks are frozen."""
        with self._lock:
            if self._is_stopped or self._freeze.is_frozen or self.count_new():
                return False
            return self._clock() - self._scanner.changed_at < _STUCK_S

    def thaw(self) -> None:
        """Let the ranks go on; the guards begin anew."""
        self._freeze.end()

    def _thaw_if_late(self) -> bool:
        """Take back the answer if the job is not requeued; return whether it was."""
        if not self._freeze.is_late:
            return False
        self.thaw()
        self._notice.answered = None
        self._copy.wait_for_next()
        number = self._notice.orders.notice
        log_line(f"notice {number}: no requeue within {FROZEN_S:.0f} s: the ranks go on")
        self._state.update({"phase": "saving", "notice": number})
        return True

    def _record_resume(self, earlier_count: int) -> None:
        """Decide at the first new checkpoint of a restart whether the script has resumed."""
        if not self._reads.is_active or self._siblings.running:
            return
        resumed = self._reads.has_resumed()
        self._reads.close()
        self._resume.proven = self._resume.proven or resumed
        self._resume.refuted = not resumed
        if resumed:
            self._state.update({"resumed_from": earlier_count})
            log_line("resumed: the script has read its newest checkpoint and written a newer one")
        self._state.update(self._rehearsal.decide(resumed=resumed))
