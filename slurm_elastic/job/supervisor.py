"""Supervision of a running step: signals, threads, restarts in place, exit code."""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from slurm_elastic.core.report import Report
from slurm_elastic.job.attempt_trial import AttemptTrial
from slurm_elastic.job.companions.joint_step import JointStep
from slurm_elastic.job.companions.program_companions import ProgramCompanions
from slurm_elastic.job.controller_client import ControllerClient
from slurm_elastic.job.environment.state_cleanup import remove_old_state
from slurm_elastic.job.environment.state_directory import state_directories
from slurm_elastic.job.in_place_restart import InPlaceRestart
from slurm_elastic.job.launch import SIGNALS, RankLaunch, SrunProcess, log_line
from slurm_elastic.job.launchers.gpu_use import GpuUseMeter, visible_gpus
from slurm_elastic.job.launchers.launcher_site import recognise
from slurm_elastic.job.launchers.nested_launch import RankProcess, ranks_only, step_processes
from slurm_elastic.job.launchers.rank_use import RankUseMeter
from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.signals.rank_signals import RankSignals
from slurm_elastic.job.steps.launch_watches import LaunchWatches
from slurm_elastic.job.steps.unreported_end import UnreportedEndWatch
from slurm_elastic.job.unmodified.fixed_accumulation import FixedAccumulation, batch_scripts
from slurm_elastic.job.unmodified.program_command import program_command
from slurm_elastic.job.unmodified.resume_state import ResumeStateFile
from slurm_elastic.job.unmodified.save_end import stop_between_saves
from slurm_elastic.job.unmodified.script_watch import ScriptWatch
from slurm_elastic.rpc import frames

_FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Slurm sends SIGCONT directly before the SIGTERM that ends a job; seconds between the two.
_SLURM_TERM_S = 2.0
_SLURM_CONT_S = 0.5
#: Seconds from SIGTERM to SIGKILL.
_STOP_S = 10.0
_FINAL_REPORT_S = 2.0
#: Pauses between starts of srun while slurmctld or a node does not answer it, from the first to the
#: longest, and how long it is tried (our choice: slurmctld may be started again by hand).
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _UNREACHED_S = 2.0, 30.0, 1800.0
#: Exit code of a program that starts a launcher in each rank: wrong usage.
_REFUSED_CODE = 2
#: Command in place of the step of a script that must not begin anew: it fails as on trial.
_FAILING = ("sh", "-c", f"exit {_REFUSED_CODE}")


class Supervisor:
    """Supervisor of the steps of one job.

    Args:
        launch: starts the steps.
        child: the first step's srun, if it has been started already.
    """

    def __init__(self, launch: RankLaunch, child: SrunProcess | None = None) -> None:
        self._launch = launch
        self._ranks = RankSignals(launch)
        job = launch.allocation
        self._state = ReportState(
            Report(
                job_id=job.job_id,
                run=job.run,
                phase="starting",
                kind="script",
                gpus=sum(launch.tasks) if launch.gpus else 0,
                nodes=sum(1 for count in launch.tasks if count),
            )
        )
        self._address = _controller_address()
        self._trial = AttemptTrial(
            self._state,
            run_id=job.run_id,
            run=job.run,
            has_controller=bool(self._address),
        )
        self._uses_library = False
        self._companions: ProgramCompanions | None = None
        self._refused = self._lacked_memory = False
        self._script = (
            self._script_watch(launch.options.checkpoint) if launch.options.checkpoint else None
        )
        self._watches = LaunchWatches(
            launch,
            on_nested=self._refuse,
            uses_library=lambda: self._uses_library,
            has_begun_save=self._script.has_begun_save if self._script else None,
        )
        self._end_watch: UnreportedEndWatch | None = None
        if child:
            self._trial.begin()
        self._step = self._supervise(child) if child else self._start()
        self._stopping = threading.Lock()
        self._ending = False
        self._signals = queue.SimpleQueue[int]()
        self._terminated = threading.Event()
        self._continued_at = -math.inf
        self._client: ControllerClient | None = None

    def run(self) -> int:
        """Supervise the program until it has ended; return its exit code."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        # Before any thread starts: their child processes must not inherit the blocked signals.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._in_background(self._act_on_signals)
        listener = socket.socket(fileno=self._launch.listener.detach())
        address = self._address
        if address:
            self._state.expect_controller()
        server = RankSocketServer(
            self._state, listener, on_report=self._on_program_report, on_group=self._on_group
        )
        if address:
            self._companions = self._companion_set(server)
        server.start()
        in_place = InPlaceRestart(self._state, server)
        if address:
            ranks = RankUseMeter(self._rank_processes, self._gpus_here)
            gpus = GpuUseMeter(visible_gpus() if self._launch.gpus else "")
            self._client = ControllerClient(
                self._state,
                address,
                measure=lambda: self._state.set_own(
                    ranks.measure()._asdict() | gpus.measure()._asdict()
                ),
            )
            self._client.start()
        if self._script:
            self._script.start()
            if self._companions is not None:
                job_id = self._launch.allocation.job_id
                self._in_background(self._script.command.read_batch_script, job_id)
        else:
            self._state.update({"phase": "training"})
        job = self._launch.allocation
        if job.run == 0:
            self._in_background(remove_old_state, state_directories(os.environ), job.run_id)
        code = self._wait_for_step()
        while not self._ending and (
            self._is_changed(code)
            or (not self._refused and in_place.should_restart(code) and self._may_start_again())
            or self._goes_on(code)
        ):
            self._refused = False
            self._step = self._start()
            code = self._wait_for_step()
        if self._companions:
            self._companions.end_attempt(failed=self._ending or code != 0)
        self._ranks.unguard()
        if code == 0 and self._script and not self._ending and not self._uses_library:
            self._script.record_end()
        self._report_end(code)
        return code

    def _wait_for_step(self) -> int:
        code, pause_s = self._step.wait(), _FIRST_PAUSE_S
        end = time.monotonic() + _UNREACHED_S
        while code and self._step.is_unreached and time.monotonic() < end:
            silent = "a node" if self._step.has_unreached_node else "slurmctld"
            log_line(f"{silent} does not answer srun, which is started again in {pause_s:.0f} s")
            if self._terminated.wait(pause_s):
                break
            self._end_watches()
            self._step = self._supervise(self._launch.start())
            code, pause_s = self._step.wait(), min(2 * pause_s, _LONGEST_PAUSE_S)
        companions = self._companions
        self._lacked_memory = self._step.lacked_memory or bool(
            companions and companions.lacked_memory
        )
        self._end_watches()
        if self._companions:
            # Ranks of the library save what the base has not saved.
            failed = code not in (0, RESTART_CODE) and not self._uses_library
            if self._ending:
                self._companions.end_attempt(failed=True)
            else:
                self._companions.end_start(failed=failed)
        if self._script and not self._uses_library:
            is_ended = self._ending or self._restart_is_due()
            self._script.end_attempt(None if is_ended else code)
        return _REFUSED_CODE if self._refused else code

    def _end_watches(self) -> None:
        self._watches.end()
        if self._end_watch is not None:
            self._end_watch.end()
            self._end_watch = None

    def _script_watch(self, pattern: str) -> ScriptWatch:
        name = self._launch.options.signal
        job_id = self._launch.allocation.job_id
        return ScriptWatch(
            pattern=pattern,
            state=self._state,
            resume_file=ResumeStateFile(self._launch.allocation.run_id),
            send_signal=(lambda: self._in_background(self._signal_ranks, name)) if name else None,
            run_id=self._launch.allocation.run_id,
            guard=self._ranks,
            world=self._launch.ranks,
            hosts=_host_count(self._launch),
            complete=self._launch.options.complete,
            command=program_command(
                self._launch.options.program, pattern, os.environ, self._launch.stdin.start()
            ),
            micro_batches=self._launch.options.micro_batches,
            accumulation=FixedAccumulation(self._launch.options, lambda: batch_scripts(job_id)),
            are_alone=lambda size: self._watches.train_alone(self._rank_processes(), size),
            end_ranks=self._end_lone_ranks,
        )

    def _start(self) -> JointStep:
        if self._companions:
            self._launch.parts = self._companions.begin_start()
        instead: Sequence[str] = ()
        if self._script and not self._uses_library:
            self._script.set_world(self._launch.ranks, _host_count(self._launch))
            restarted = self._launch.allocation.run > 0 or self._launch.attempt > 0
            self._script.begin_attempt(restarted=restarted)
            if self._script.has_lost_checkpoints and not self._launch.parts:
                log_line(self._script.refusal_line())
                instead = _FAILING
            elif self._script.wrong_size_line:
                log_line(self._script.wrong_size_line)
                instead = _FAILING
        self._trial.begin()
        step = self._supervise(self._launch.start(instead))
        if self._companions:
            self._companions.started()
        return step

    def _is_changed(self, code: int) -> bool:
        """Return whether the program is started again as its companions have changed."""
        if self._companions is None:
            return False
        self._trial.note()
        on_trial = not self._trial.has_checkpoint
        if not self._companions.restarts(code, self._step.failed_in, on_trial=on_trial):
            return False
        self._ranks.unguard()
        self._state.serve_notice(self._companions.due_change)
        self._state.begin_attempt()
        return True

    def _may_repeat(self) -> bool:
        """Return whether the command of this run still resumes from the newest checkpoint."""
        script = None if self._uses_library else self._script
        return script is None or script.command.may_start_again

    def _restart_is_due(self) -> bool:
        return self._companions is not None and self._companions.restart.is_due

    def _end_ranks(self) -> None:
        """End the ranks of the present start, which have saved or cannot go on."""
        if not self._step.ends_within(0):
            self._step.end()

    def _goes_on(self, code: int) -> bool:
        """Return whether a program that has ended on trial is started again; may wait long."""
        script = None if self._uses_library else self._script
        if code == 0 and self._trial.on and script:
            script.count_last()
        if code == 0 and script and script.has_nothing_left:
            return False  # the batch script goes on to its next line, as it did before
        unmodified = script is not None
        goes_on = self._trial.goes_on(
            code,
            unmodified=unmodified,
            out_of_memory=self._lacked_memory,
            in_companions=self._step.failed_in_companions,
            is_due=self._restart_is_due,
        )
        return goes_on and self._may_start_again()

    def _may_start_again(self) -> bool:
        """Return whether the program gets its standard input once more; log if it does not."""
        if not self._launch.stdin.is_repeatable:
            log_line(
                "the program is not started again: its standard input is a pipe, which can be read"
                " once only; give it a file or a here-document"
            )
        return self._launch.stdin.is_repeatable

    def _supervise(self, child: SrunProcess) -> JointStep:
        self._ranks.mark = child.mark
        self._watches.begin(child.mark)
        step = JointStep(
            child,
            self._launch.started_parts,
            end_ranks=self._kill_ranks,
            wait_in_vain=self._waits_in_vain,
        )
        if self._launch.allocation.here:
            base = self._launch.allocation.job_id
            self._end_watch = UnreportedEndWatch(
                lambda: [(job_id or base, one) for job_id, one in step.running()],
                self._rank_processes,
            )
            self._end_watch.start()
        return step

    def _waits_in_vain(self) -> bool:
        """Return whether ranks that others have left are those of a script that began nothing."""
        script = None if self._uses_library else self._script
        return script is not None and self._trial.on and not script.is_saving()

    def _kill_ranks(self, has_base_ended: Callable[[], bool]) -> None:
        """Kill all ranks; those of an unmodified script not within a save."""
        if self._script and not self._uses_library:
            stop_between_saves(
                self._script.is_saving,
                has_ended=has_base_ended,
                stop=lambda: self._ranks.send_here("STOP"),
                resume=lambda: self._ranks.send_here("THAW"),
            )
        self._ranks.send("KILL")

    def _rank_processes(self) -> dict[int, RankProcess]:
        return ranks_only(step_processes(self._ranks.mark), os.getpid())

    def _gpus_here(self) -> int:
        """Return the GPUs of the ranks on this node, those in companions included."""
        launch, here = self._launch, self._launch.allocation.here
        own = launch.allocation.gpus[0] if here and here == launch.allocation.nodes[0] else 0
        return (own or 0) + sum(part.ranks for part in launch.parts if part.node == here)

    def _end_lone_ranks(self) -> None:
        """End ranks that train alone, as a program that has failed; the watch has frozen them."""
        self._refused = True

        def end() -> None:
            self._end_ranks()
            self._ranks.unguard()

        self._in_background(end)

    def _refuse(self, launcher: str) -> None:
        """End a program that has turned out to start a launcher in each rank."""
        self._refused = True
        log_line(
            f"the program starts {launcher} in each rank, so {sum(self._launch.tasks)} trainings"
            f" would run side by side; write esrun before {launcher} there, and start the program"
            " without esrun"
        )
        self._end_step()

    def _on_program_report(self, fields: dict[str, Any]) -> None:
        # Of slurm_elastic.integrations: the checkpoints are watched.
        if fields.get("kind") == "script":
            if self._script:
                self._script.record_program_step(fields)
            return
        if self._uses_library:
            return
        self._uses_library = True
        self._state.update({"kind": "library"})
        launcher = recognise(self._launch.options.program)
        if launcher:
            log_line(
                f"the program uses slurm_elastic.training: start it without {launcher}"
                " (esrun python …), or a change of its layout will end the job"
            )
        if self._script:
            self._script.stop()
            log_line("the program uses slurm_elastic.training: --checkpoint is ignored")

    def _companion_set(self, server: RankSocketServer) -> ProgramCompanions | None:
        """Return the started set of companions; None if the job cannot have any."""
        launcher = recognise(self._launch.options.program)
        obstacle = "" if self._launch.gpus else "no-gpus"
        if not self._launch.stdin.is_repeatable:
            obstacle = "standard-input"
        if obstacle:
            self._state.set_own({"in_place": False, "not_in_place": obstacle})
            return None
        companions = ProgramCompanions(
            self._launch,
            self._state,
            server.set_companions,
            trial=self._trial,
            end_ranks=self._end_ranks,
            may_repeat=self._may_repeat,
            regroups=launcher is None,
        )
        companions.start()
        return companions

    def _on_group(self, fields: dict[str, Any]) -> None:
        if self._companions:
            self._companions.on_group(fields)

    def _report_end(self, code: int) -> None:
        if self._ending:
            return  # Slurm waits for this process to end, and needs no report
        self._state.update({"phase": "ended", "exit_code": code})
        if self._client:
            self._client.stop(final_report_s=_FINAL_REPORT_S, failed=code != 0)
        if code:
            log_line(f"the program ended with exit code {code}")

    def _on_signal(self, number: int, _frame: object) -> None:
        # Without locks, not even those of an Event: the thread that it interrupts may hold them.
        if number == signal.SIGCONT:
            self._continued_at = time.monotonic()
        elif number == signal.SIGINT and sys.stdin.isatty():
            pass  # the terminal has sent it to srun too
        else:
            self._ending = self._ending or number not in _FORWARDED
            self._signals.put(number)

    def _act_on_signals(self) -> None:
        """Act on signals as they come, in a thread of their own."""
        while True:
            number = self._signals.get()
            if number in _FORWARDED:
                self._step.send(number)
            else:
                self._on_termination()

    def _on_termination(self) -> None:
        """Act on SIGTERM or SIGINT: from Slurm, which signals the ranks too, or another process."""
        first = not self._terminated.is_set()
        self._terminated.set()
        self._trial.stop()
        if first:
            self._in_background(self._end_step_unless_slurm_does, time.monotonic())
        elif not self._slurm_ends_job(time.monotonic()):
            self._step.send(signal.SIGTERM)

    def _end_step_unless_slurm_does(self, signal_s: float) -> None:
        # Python runs handlers of simultaneous signals by number: SIGTERM (15) before SIGCONT (18).
        time.sleep(_SLURM_CONT_S)
        if not self._slurm_ends_job(signal_s):
            self._end_step()

    def _slurm_ends_job(self, signal_s: float) -> bool:
        return abs(signal_s - self._continued_at) < _SLURM_TERM_S

    def _signal_ranks(self, name: str) -> None:
        if not self._ranks.send(name) and not self._step.ends_within(0):
            log_line(f"signal {name} could not be sent to the ranks")

    def _end_step(self) -> None:
        """End the step: SIGTERM to the ranks, after `_STOP_S` srun kills them."""
        step = self._step
        with self._stopping:
            if step.ends_within(0):
                return
            self._ranks.unguard()  # frozen ranks could not handle the signal
            self._ranks.send("TERM")
        if not step.ends_within(_STOP_S):
            step.send(signal.SIGTERM)  # "srun: forcing job termination"

    @staticmethod
    def _in_background(work: Callable[..., object], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()


def _host_count(launch: RankLaunch) -> int:
    """Return the number of hosts on which ranks run."""
    return sum(len(names) for _, names in launch.hosts)


def _controller_address() -> str | None:
    """Return the controller's address; None if the job is to run without one."""
    try:
        return frames.controller_address()
    except frames.ConfigurationReadError as error:
        log_line(f"{error}; the job continues without its controller")
        return None
