"""The simulator's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from slurm_elastic.application import JobClass
from slurm_elastic.config import Config
from slurm_elastic.policies.base import Policy
from slurm_elastic.simulator.clusters import Cluster
from slurm_elastic.simulator.profiles import Profiles
from slurm_elastic.simulator.restarts import RestartCosts
from slurm_elastic.simulator.results import Result
from slurm_elastic.simulator.workload import Workload

Clock = Literal["round", "event"]


def simulate(
    workload: Workload,
    profiles: Profiles,
    cluster: Cluster,
    *,
    config: Config,
    policy: Policy,
    interval_s: float = 60.0,
    clock: Clock = "round",
    artifact_compat: bool = False,
    seed: int = 0,
    job_class: JobClass | None = None,
    restarts: RestartCosts | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> Result:
    """Run a workload to its end.

    Args:
        workload: what is submitted when.
        profiles: what its applications are, in truth.
        cluster: where it runs.
        config: the site's configuration; `[controller] policy` names `policy` in the result.
        policy: decides.
        interval_s: seconds between rounds; the most with the event clock.
        clock: `round`: everything happens at multiples of `interval_s`; `event`: arrivals,
            completions and ends of restarts trigger a round at once.
        artifact_compat: policies may count on the user's batch at most, as in Sia's artifact.
        seed: for policies that draw lots.
        job_class: forced on all jobs; None: each its own.
        restarts: what a restart costs; None: the profiles' own seconds.
        progress: called now and then with (jobs complete, jobs in all, simulated seconds).

    Raises:
        SimulationError: a job can never run on this cluster, or nothing runs any more.
    """
    raise NotImplementedError
