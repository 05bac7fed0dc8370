"""Import of an owner's profile (`selastic profile --send`). Pure.

A profile is input from outside, trusted like a report: it changes the predictions for jobs of the
same user, name and application that have not measured themselves yet. Measurements of a job
itself come first.
"""

from __future__ import annotations

from collections.abc import Collection

from slurm_elastic.controller.server.request_dispatcher import RequestRefusedError
from slurm_elastic.controller.state.reported.measurement import key_of
from slurm_elastic.controller.state.reported.observations import Observations, ObservedTime, number
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Measurement
from slurm_elastic.core.report import REPORT_BOUNDS
from slurm_elastic.models.colocation.shared_speeds import MeasuredUse
from slurm_elastic.profiler.profile_file import (
    ProfiledConfiguration,
    ProfileFileError,
    StepProfile,
    from_body,
)

#: Seconds of one step; others are ignored.
_LEAST_S, _MOST_S = 1e-9, 1e6
#: Stalls in a profile are medians: they weigh as much as this many reports.
_REPORTS = 5


def observations_of(body: object, types: Collection[str]) -> tuple[Observations, str]:
    """Return the observations in a profile, and a line for the user.

    Stalls are taken over from configurations of one node only: for several nodes a profile does
    not state the racks, which models of communication need.

    Args:
        body: the profile, as JSON.
        types: GPU types of the cluster.

    Raises:
        RequestRefusedError: the profile is invalid or holds no usable configuration.
    """
    profile = _checked(body)
    usable = [c for c in profile.configurations if c.gpu_type in types and _possible(c)]
    if not usable:
        raise RequestRefusedError(
            "profile: no configuration on a GPU type of this cluster"
            f" ({', '.join(sorted(types)) or 'none'}); measure with --gpu-type"
        )
    most = max(c.batch * c.gpus for c in usable)
    observations = Observations(stated=profile.application, batch=most, initial_batch=most)
    for c in usable:
        observations.keep(
            ObservedTime(c.gpu_type, c.nodes, c.gpus, c.batch, _step_s(c), _alone_s(c))
        )
        if c.nodes == 1 and (c.gpus == 1 or c.interconnect is not None):
            measurement = Measurement(
                gpu_type=c.gpu_type,
                gpus=c.gpus,
                nodes=c.nodes,
                samples_per_s=c.batch * c.gpus / _step_s(c),
                steps=_REPORTS,
                compute_s=c.compute.seconds,
                sync_s=_step_s(c) - _alone_s(c),
                reports=_REPORTS,
            )
            key = key_of(Allocation.of(c.gpu_type, {"": c.gpus}), 1)
            observations.add_measurement(key, measurement)
    count = len(observations.points)
    named = f" of application {observations.stated}" if observations.stated else ""
    return observations, f"{count} configuration{'s' if count > 1 else ''}{named} learned"


def use_of(body: object) -> MeasuredUse:
    """Return the resources that a training used in its largest configuration on one node.

    Raises:
        RequestRefusedError: the profile is invalid.
    """
    on_one_node = [c for c in _checked(body).configurations if c.nodes == 1]
    if not on_one_node:
        return MeasuredUse()
    use = max(on_one_node, key=lambda c: (c.gpus, c.batch)).use
    return MeasuredUse(
        cpus=_at_most(use.busy_cpus, REPORT_BOUNDS["busy_cpus"]),
        read_bytes_s=_at_most(use.read_bytes_s, REPORT_BOUNDS["read_bytes_s"]),
        memory_bytes_s=_at_most(use.memory_bytes_s, REPORT_BOUNDS["memory_bytes_s"]),
        gpu=_at_most(use.gpu_busy, 1.0),
        gpu_memory=_at_most(use.gpu_memory_busy, 1.0),
    )


def _checked(body: object) -> StepProfile:
    """Return the profile of JSON values.

    Raises:
        RequestRefusedError: it is invalid.
    """
    try:
        return from_body(body)
    except ProfileFileError as error:
        raise RequestRefusedError(f"profile: {error}") from None


def _at_most(value: float | None, bound: float) -> float | None:
    """Return the value if a report could have it."""
    return value if value is not None and value <= bound else None


def _alone_s(c: ProfiledConfiguration) -> float:
    """Return the seconds of a step without communication, with its data in memory."""
    return c.compute.seconds + (c.prep.seconds if c.prep else 0.0)


def _step_s(c: ProfiledConfiguration) -> float:
    return _alone_s(c) + sum(t.seconds for t in (c.interconnect, c.network) if t)


def _possible(c: ProfiledConfiguration) -> bool:
    return (
        number(_alone_s(c), _LEAST_S, _MOST_S)
        and number(_step_s(c), _LEAST_S, _MOST_S)
        and max(c.gpus, c.batch * c.gpus) < 2**31
    )
