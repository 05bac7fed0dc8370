"""Start of a program on some GPUs: by srun inside an allocation, or on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_elastic.job import page_cache, srun
from slurm_elastic.job.esrun_options import Options
from slurm_elastic.job.launch import RankLaunch, free_port
from slurm_elastic.job.single_machine import step_mark
from slurm_elastic.job.slurm_env import AllocationError, clean, master_port, tasks_of_step
from slurm_elastic.profiler.profiling_plan import ProfiledShape
from slurm_elastic.profiler.run_use import LocalUse, StepUse, UseRecorder, UseSample

#: Seconds from SIGTERM to SIGKILL.
_END_S = 15.0
#: Longest time to drop a data set from a node's page cache: many files on a slow file system.
_DROP_S = 300.0


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """End of a run.

    Attributes:
        code: exit code; None: it took too long.
        samples: resources that it used on the first of its nodes.
    """

    code: int | None
    samples: Sequence[UseSample] = ()


class Runner(Protocol):
    """Way to start programs, one after the other.

    Attributes:
        gpus: of each node.
    """

    gpus: tuple[int, ...]

    def run(
        self,
        program: Sequence[str],
        shape: ProfiledShape,
        environment: Mapping[str, str],
        *,
        log: Path,
        timeout_s: float,
    ) -> FinishedRun:
        """Run the program on a shape until it ends.

        Args:
            program: one rank's command.
            shape: one rank on each GPU.
            environment: variables besides the present ones.
            log: path of its output.
            timeout_s: after which it is ended.
        """
        ...

    def drop(self, paths: Sequence[str], shape: ProfiledShape) -> bool:
        """Drop files from the page cache of a shape's nodes; return whether all nodes did."""
        ...


class LocalRunner:
    """Runner on this machine, without Slurm, as `esrun --local`.

    Args:
        gpus: of this machine.
    """

    def __init__(self, gpus: int) -> None:
        self.gpus: tuple[int, ...] = (gpus,)

    def run(
        self,
        program: Sequence[str],
        shape: ProfiledShape,
        environment: Mapping[str, str],
        *,
        log: Path,
        timeout_s: float,
    ) -> FinishedRun:
        """See `Runner`."""
        launcher = [sys.executable, "-m", "slurm_elastic.job.esrun", "--local", str(shape.gpus)]
        environment = {**os.environ, **environment}

        def recorder(esrun: int) -> UseRecorder:
            return LocalUse(step_mark(esrun), shape.gpus)

        return _run([*launcher, *program], environment, log, timeout_s, recorder)

    def drop(self, paths: Sequence[str], shape: ProfiledShape) -> bool:  # noqa: ARG002 - as in `Runner`
        """See `Runner`."""
        files, _ = page_cache.drop(paths)
        return files > 0


class AllocationRunner:
    """Runner in the allocation that the environment describes.

    Raises:
        AllocationError: the environment describes none, or this is one of several tasks.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        if tasks_of_step(environment) > 1:
            raise AllocationError(
                "srun: several tasks is invalid: expected one process; start selastic profile"
                " without srun"
            )
        self._env = clean(environment)
        self._launch = RankLaunch(Options(), environment)
        self._launch.listener.close()  # ranks of a profile send no reports
        self._launch.begin_queries()
        self._launch.settle()
        self._cpus = self._launch.allocation.cpus
        self.gpus = self._launch.tasks
        self._attempt = 0

    def run(
        self,
        program: Sequence[str],
        shape: ProfiledShape,
        environment: Mapping[str, str],
        *,
        log: Path,
        timeout_s: float,
    ) -> FinishedRun:
        """See `Runner`."""
        job, tasks = self._launch.allocation, self._tasks(shape)
        self._attempt += 1
        # A GPU has the same share of its node's processors in every shape.
        job.cpus = tuple(
            max(1, c // g) * t if t else c
            for c, g, t in zip(self._cpus, self.gpus, tasks, strict=True)
        )
        command = srun.command(
            job, tasks, program, gpus=self._launch.gpus, user_options=["--input=none"]
        )
        port = free_port(master_port(job.job_id, job.run, 1000 + self._attempt))
        step = f"{job.run_id}.profile"
        env = srun.step_environment(self._env, job, tasks, port=port, socket="", step=step)
        first = next(i for i, count in enumerate(tasks) if count)
        helper = srun.helper_command(
            [job.nodes[first]],
            'exec "$@"',
            *(sys.executable, "-m", "slurm_elastic.profiler.run_use", step, str(shape.per_node)),
            gpus=self.gpus[first] if self._launch.gpus else 0,
        )
        environment = {**env, **environment}
        return _run(command, environment, log, timeout_s, lambda _: StepUse(helper, self._env))

    def drop(self, paths: Sequence[str], shape: ProfiledShape) -> bool:
        """See `Runner`."""
        tasks_by_node = zip(self._launch.allocation.nodes, self._tasks(shape), strict=True)
        arguments = [sys.executable, "-m", "slurm_elastic.job.page_cache", *paths]
        command = srun.helper_command([n for n, t in tasks_by_node if t], 'exec "$@"', *arguments)
        try:
            process = subprocess.run(
                command, env=self._env, capture_output=True, check=False, timeout=_DROP_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return process.returncode == 0

    def _tasks(self, shape: ProfiledShape) -> tuple[int, ...]:
        """Return the tasks of each node; the first nodes that have the GPUs are used."""
        nodes_left, tasks = shape.nodes, []
        for count in self.gpus:
            used = nodes_left > 0 and count >= shape.per_node
            tasks.append(shape.per_node if used else 0)
            nodes_left -= used
        return tuple(tasks)


def local_gpus() -> int:
    """Return the number of GPUs of this machine; 0 if none are visible."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([word for word in listed.split(",") if word])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def gpu_type(job_id: str) -> str:
    """Return Slurm's name of the type of a job's GPUs; "": several types, or unknown."""
    try:
        process = subprocess.run(
            ["scontrol", "show", "job", job_id],
            capture_output=True, text=True, check=False, timeout=_END_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    types = set(re.findall(r"gres/gpu:([^=,\s]+)=", process.stdout))
    return types.pop() if len(types) == 1 else ""


def _run(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    timeout_s: float,
    recorder_of: Callable[[int], UseRecorder],
) -> FinishedRun:
    """Run a launcher until it ends.

    Args:
        command: of the launcher.
        env: its environment.
        log: path of its output.
        timeout_s: after which it is ended.
        recorder_of: begins to record what is used, by the launcher's process id.
    """
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        recorder = recorder_of(child.pid)
        code: int | None = None
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            samples = recorder.stop()
            _end(child)
        return FinishedRun(code, samples)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End all processes of the program, if it still runs."""
    if child.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(_END_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return
