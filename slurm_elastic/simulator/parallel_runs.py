"""Several simulations at once, each in its own process, with equal results for any number.

What goes to a process is a `Task` of plain values, what comes back a `Result`. An error in
one of them ends all and is raised here as it was there.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from queue import Empty
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.application import JobClass
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.policies import policy_protocol
from slurm_elastic.simulator.results import Result
from slurm_elastic.simulator.simulation import Clock, simulate
from slurm_elastic.simulator.truth.neighbour_slowdown import NeighbourSlowdown
from slurm_elastic.simulator.truth.rack_network import Network
from slurm_elastic.simulator.truth.resize_costs import ResizeCosts
from slurm_elastic.simulator.truth.restart_costs import RestartCosts
from slurm_elastic.simulator.workloads.application_profiles import Profiles
from slurm_elastic.simulator.workloads.cluster_text import Cluster
from slurm_elastic.simulator.workloads.workload import Workload

#: (task, jobs complete, jobs in all)
Report = Callable[[int, int, int], None]

_LOOK_S = 0.2


class RunError(SlurmElasticError):
    """Failure because a process ended without a result."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Arguments of one simulation, as of `simulation.simulate`; the policy is that of `config`."""

    workload: Workload
    profiles: Profiles
    cluster: Cluster
    config: Config
    interval_s: float = 60.0
    clock: Clock = "round"
    seed: int = 0
    job_class: JobClass | None = None
    restarts: RestartCosts | None = None
    freezing: str | None = None
    network: Network | None = None
    resizes: ResizeCosts | None = None
    moves_restart: bool = False
    neighbours: NeighbourSlowdown | None = None
    gpu_pairs: NeighbourSlowdown | None = None

    def run(self, progress: Callable[[int, int, float], None] | None = None) -> Result:
        """Run it here."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        first = [fields.pop(name) for name in ("workload", "profiles", "cluster")]
        result: Result = simulate(
            *first, **fields, policy=policy_protocol.load(self.config), progress=progress
        )
        return result


def run_all(tasks: Sequence[Task], *, processes: int, report: Report | None = None) -> list[Result]:
    """Run tasks and return their results in the same order.

    Raises:
        RunError: a process was killed.
        ValueError: what `simulate` raises.
    """
    if processes <= 1 or len(tasks) <= 1:
        return [task.run(_reporter(i, report)) for i, task in enumerate(tasks)]
    # Not fork: the progress bar runs in a thread.
    context = multiprocessing.get_context("spawn")
    progress_queue: Any = context.Queue()
    pool = ProcessPoolExecutor(
        min(processes, len(tasks)),
        mp_context=context,
        initializer=_begin,
        initargs=(progress_queue,),
    )
    try:
        waiting = {pool.submit(_run, i, task): i for i, task in enumerate(tasks)}
        results = _gather(waiting, progress_queue, report)
    except BaseException:
        # The other results are no longer needed: do not wait for them.
        for child in multiprocessing.active_children():
            child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    else:
        pool.shutdown()
    finally:
        progress_queue.close()
    return [results[i] for i in range(len(tasks))]


def _gather(
    waiting: dict[Future[Result], int], progress_queue: Any, report: Report | None
) -> dict[int, Result]:
    results: dict[int, Result] = {}
    unfinished = set(waiting)
    while unfinished:
        finished, unfinished = wait(unfinished, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        _pass_on(progress_queue, report)
        for future in finished:
            try:
                results[waiting[future]] = future.result()
            except BrokenProcessPool:
                raise RunError(
                    "a simulation's process was killed (out of memory?); try --jobs 1"
                ) from None
    return results


def _pass_on(progress_queue: Any, report: Report | None) -> None:
    while True:
        try:
            message = progress_queue.get_nowait()
        except Empty:
            return
        if report is not None:
            report(*message)


def _reporter(task: int, report: Report | None) -> Callable[[int, int, float], None] | None:
    if report is None:
        return None
    return lambda done, total, _: report(task, done, total)


#: Queue in which a child process reports progress; empty in the parent.
_progress_queue: list[Any] = []


def _begin(progress_queue: Any) -> None:
    # Ctrl-C is sent to all processes of the terminal; the parent ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _progress_queue[:] = [progress_queue]


def _run(index: int, task: Task) -> Result:
    return task.run(_reporter(index, lambda *words: _progress_queue[0].put(words)))
