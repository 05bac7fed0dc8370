"""Runs of a profile, one after the other; a failed run does not stop the others.

A program that neither writes an answer nor prints one is not measured, unless runs are measured
as a whole: then the time from its start to its end counts, start included.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_elastic.job import profile_request
from slurm_elastic.job.profile_request import COLD, SYNTHETIC, WARM, ProfileRequest
from slurm_elastic.profiler.profile_file import ProfiledUse, StepProfile
from slurm_elastic.profiler.profile_store import ProfileStore
from slurm_elastic.profiler.profiling_plan import (
    MissingTime,
    ProfiledShape,
    ProfilingLaunch,
    next_launch,
)
from slurm_elastic.profiler.runners import Runner
from slurm_elastic.profiler.stalls import configurations

#: Last lines of a failed run's output that are shown, and bytes that are searched for them.
_LINES, _TAIL_BYTES = 8, 1 << 16

#: Takes: runs done, runs in all as far as known, description of the next run.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingRequest:
    """Measurements of a profile.

    Attributes:
        program: one rank's command.
        needs: all of them, measured already or not.
        steps, warm_up: of each block.
        batch: samples per GPU; None: the script's own, on the largest shape.
        data: paths whose cold reading is to be measured.
        whole_runs: the program ignores the request and does `steps` steps.
        timeout_s: of one run.
    """

    program: tuple[str, ...]
    needs: tuple[MissingTime, ...]
    steps: int
    warm_up: int
    batch: int | None
    data: tuple[str, ...]
    whole_runs: bool
    timeout_s: float

    @property
    def gpus(self) -> int:
        """GPUs of the largest shape."""
        return max(n.shape.gpus for n in self.needs)


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that measured nothing.

    Attributes:
        reason: one line.
        tail: the last lines of its output.
        log: path of the whole output.
    """

    launch: ProfilingLaunch
    reason: str
    tail: tuple[str, ...]
    log: Path


def run(
    request: ProfilingRequest, runner: Runner, store: ProfileStore, progress: Progress
) -> list[Failure]:
    """Make all runs that the store does not have; a shape that fails is left for the next call.

    Raises:
        KeyboardInterrupt: of the user; measurements are kept, the present run is ended.
    """
    failures: list[Failure] = []
    failed: set[ProfiledShape] = set()
    runs_done = 0
    while True:
        missing = [n for n in request.needs if n not in store.steps and n.shape not in failed]
        total = runs_done + len({(n.shape, n.repeat) for n in missing})
        if not missing:
            return failures
        launch = next_launch(missing)
        if request.whole_runs:
            launch = ProfilingLaunch(launch.shape, launch.repeat, launch.blocks[:1])
        progress(runs_done, total, describe(launch))
        failure = _run_once(request, launch, runner, store)
        if failure is not None:
            failures.append(failure)
            failed.add(launch.shape)
        runs_done += 1


def describe(launch: ProfilingLaunch) -> str:
    """Return a description such as `4 GPUs on 2 nodes, synthetic+warm, repeat 1`."""
    gpus, nodes = launch.shape.gpus, launch.shape.nodes
    shape_text = f"{gpus} GPU{'s' if gpus > 1 else ''}" + (
        f" on {nodes} nodes" if nodes > 1 else ""
    )
    return f"{shape_text}, {'+'.join(launch.blocks)}, repeat {launch.repeat}"


def profile(
    store: ProfileStore, *, application: str, gpu_type: str, batch: int | None, whole_runs: bool
) -> StepProfile:
    """Return the profile of all measurements.

    Args:
        store: of the measurements.
        application: the user's name of it, or "".
        gpu_type: likewise.
        batch: samples per GPU; None: as runs have stated, else 1.
        whole_runs: see `ProfilingRequest`.

    Raises:
        NotMeasuredError: there is no measurement on one GPU.
    """
    facts = store.facts
    measured = configurations(
        store.steps,
        gpu_type=gpu_type,
        batch=batch or (None if whole_runs else store.batch()) or 1,
    )
    return StepProfile(
        application=application or _text(facts.get("application")),
        model=_text(facts.get("model")),
        layers=_count(facts.get("layers")),
        gradient_bytes=_count(facts.get("gradient_bytes")),
        samples=_count(facts.get("samples")),
        configurations=tuple(
            dataclasses.replace(c, use=_use(store.uses, ProfiledShape(c.nodes, c.gpus)))
            for c in measured
        ),
    )


def _use(uses: Mapping[MissingTime, ProfiledUse], shape: ProfiledShape) -> ProfiledUse:
    """Return the use of resources with data in memory, and the bytes read from storage.

    The median over the repeats counts.
    """
    blocks = {n.block for n in uses if n.shape == shape}
    last = WARM if WARM in blocks else SYNTHETIC
    medians: dict[str, float | None] = {}
    for field in dataclasses.fields(ProfiledUse):
        block = COLD if field.name == "read_bytes_s" else last
        values = [
            value
            for need, use in uses.items()
            if (need.shape, need.block) == (shape, block)
            and (value := getattr(use, field.name)) is not None
        ]
        medians[field.name] = statistics.median(values) if values else None
    return ProfiledUse(**medians)


def _run_once(
    request: ProfilingRequest, launch: ProfilingLaunch, runner: Runner, store: ProfileStore
) -> Failure | None:
    log = store.log(launch)
    log.unlink(missing_ok=True)
    result = store.answer(launch)
    run_request = ProfileRequest(
        result=result,
        blocks=launch.blocks,
        steps=request.steps,
        warm_up=request.warm_up,
        batch=request.batch,
        gpus=request.gpus,
        data=request.data,
    )
    if launch.blocks[0] == COLD and not runner.drop(request.data, launch.shape):
        paths = ", ".join(map(str, request.data))
        reason = (
            f"was not started: {paths} could not be dropped from a node's page cache, so its reads"
            " would not be cold; leave out --data, or make the files readable on all nodes"
        )
        return Failure(launch, reason, (), log)
    began = time.time()
    start_s = time.monotonic()
    finished = runner.run(
        request.program,
        launch.shape,
        {} if request.whole_runs else run_request.environment(),
        log=log,
        timeout_s=request.timeout_s,
    )
    duration_s, code = time.monotonic() - start_s, finished.code
    answer: Any = store.read_answer(result)
    tail = _tail(log)
    if request.whole_runs and code == 0:
        row = {"block": launch.blocks[0], "seconds": [duration_s / request.steps] * request.steps}
        answer = {"blocks": [row | {"ended": began + duration_s}]}
    elif answer is None:
        answer = profile_request.printed(tail, launch.blocks[0])
    # A program may fail after it has answered: its times are valid.
    if store.keep(launch, answer, finished.samples):
        return None
    if code is None:
        reason = (
            f"took longer than --timeout {request.timeout_s:g} s and was ended; give a longer"
            " --timeout or fewer --steps"
        )
    elif code:
        reason = f"ended with exit code {code}"
    else:
        reason = (
            "ended well, but reported no steps: it does not use slurm_elastic.training; let it"
            " report them as in docs/profiler.md, or add --whole"
        )
    lines = [line for line in tail.splitlines() if line.strip()]
    return Failure(launch, reason, tuple(lines[-_LINES:]), log)


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= 200 and value.isprintable() else ""


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 < value < 2**53 else None


def check(program: Sequence[str]) -> str:
    """Return an error in a command line, or ""."""
    if program and program[0] in {"esrun", "srun", "torchrun", "mpirun"}:
        return (
            f"PROGRAM: {program[0]} is invalid: expected the command of one rank, e.g. python"
            " train.py; ranks are started by selastic profile"
        )
    return ""
