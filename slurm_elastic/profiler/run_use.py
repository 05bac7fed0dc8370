"""Resources that the ranks of a profiling run use on one node, second by second.

`python -m slurm_elastic.profiler.run_use MARK GPUS` prints them until it is ended, each second a
line of JSON: `selastic profile` may itself run on another machine than the ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import PurePath
from typing import Protocol

from slurm_elastic.job.launchers.gpu_use import GpuUseMeter, visible_gpus
from slurm_elastic.job.launchers.nested_launch import step_processes
from slurm_elastic.job.launchers.rank_use import RankUseMeter
from slurm_elastic.profiler.profile_file import ProfiledUse

#: Seconds of a sample.
_EVERY_S = 1.0
#: Part of a sample that must lie within the steps, for the sample to count.
_WITHIN = 0.5
#: Seconds in which srun ends a step.
_END_S = 15.0


@dataclass(frozen=True, slots=True)
class UseSample:
    """Use for each GPU between two times (epoch s)."""

    begin: float
    end: float
    use: ProfiledUse


class UseRecorder(Protocol):
    """Measurement that goes on until `stop`."""

    def stop(self) -> list[UseSample]:
        """End the measurement and return its samples, oldest first."""
        ...


class LocalUse:
    """Measurement on this machine, in a thread.

    Args:
        mark: value of `SLURM_ELASTIC_STEP` in the environment of the ranks.
        gpus: GPUs that they use here.
    """

    def __init__(self, mark: str, gpus: int) -> None:
        self._samples: list[UseSample] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=lambda: self._samples.extend(_samples(mark, gpus, self._ends)),
            name="use",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> list[UseSample]:
        """See `UseRecorder`."""
        self._ends.set()
        self._thread.join()
        return self._samples


class StepUse:
    """Measurement on a node of the allocation, by a step of its own.

    Args:
        command: srun that starts `main` there.
        environment: of srun.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - until `stop`
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> list[UseSample]:
        """See `UseRecorder`; without samples if the step could not start."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._output as output:
            output.seek(0)
            return list(_read(output.read().decode("utf-8", "replace").splitlines()))


def mean_use(samples: Sequence[UseSample], begin: float, end: float) -> ProfiledUse:
    """Return the mean use between two times (epoch s); None for what was not measured then."""
    within = []
    for sample in samples:
        shared_s = min(end, sample.end) - max(begin, sample.begin)
        if shared_s > 0 and shared_s >= _WITHIN * (sample.end - sample.begin):
            within.append((shared_s, sample.use))
    means: dict[str, float | None] = {}
    for field in fields(ProfiledUse):
        values = [(s, v) for s, use in within if (v := getattr(use, field.name)) is not None]
        total_s = sum(s for s, _ in values)
        means[field.name] = sum(s * v for s, v in values) / total_s if values else None
    return ProfiledUse(**means)


def main(mark: str, gpus: str) -> None:
    """Print samples until the process is ended; arguments as of `LocalUse`."""
    for sample in _samples(mark, int(gpus), threading.Event()):
        sys.stdout.write(f"{json.dumps(asdict(sample))}\n")
        sys.stdout.flush()


def _samples(mark: str, gpus: int, ends: threading.Event) -> Iterator[UseSample]:
    """Yield the use of each second in which there are ranks, until `ends` is set."""
    visible = visible_gpus()
    of_ranks = RankUseMeter(lambda: _ranks(mark), lambda: gpus, least_s=_EVERY_S / 2)
    of_gpus = GpuUseMeter(visible, every_s=_EVERY_S / 2)
    # The run has the visible GPUs to itself: those that it does not use are idle.
    used = (visible.count(",") + 1) / max(1, gpus)
    of_ranks.measure()
    begin, ended = time.time(), False
    while not ended:
        ended = ends.wait(_EVERY_S)
        ranks, mean, end = of_ranks.measure(), of_gpus.measure(), time.time()
        if ranks.busy_cpus is not None:
            parts = {
                k: None if v is None else min(1.0, v * used) for k, v in mean._asdict().items()
            }
            yield UseSample(begin, end, ProfiledUse(**ranks._asdict(), **parts))
        begin = end
    of_gpus.stop()


def _ranks(mark: str) -> list[int]:
    """Return the processes of the step on this node, without the srun that has started it."""
    processes = step_processes(mark)
    return [pid for pid, p in processes.items() if PurePath((*p.words, "")[0]).name != "srun"]


def _read(lines: Iterable[str]) -> Iterator[UseSample]:
    """Yield the samples of complete lines."""
    for line in lines:
        try:
            row = json.loads(line)
            yield UseSample(row["begin"], row["end"], ProfiledUse(**row["use"]))
        except (ValueError, TypeError, KeyError):
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
