"""What an owner's profile (`selastic profile --send`) says of an application. Pure.

It comes from outside and is believed as a report is: it changes what is expected of jobs of the
same user, name and application before they have measured themselves, and nothing else. Their own
measurements come first.
"""

from __future__ import annotations

from collections.abc import Collection

from slurm_elastic.controller.server.request_dispatcher import RequestRefusedError
from slurm_elastic.controller.state.measurement import key_of
from slurm_elastic.controller.state.observations import Observations, ObservedTime, number
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Measurement
from slurm_elastic.profiler.profile_file import ProfiledConfiguration, ProfileFileError, from_body

#: Of one step; times that cannot be are refused.
_LEAST_S, _MOST_S = 1e-9, 1e6
#: A profile's stalls are medians already: as many reports of a job are believed at once.
_REPORTS = 5


def lesson(body: object, types: Collection[str]) -> tuple[Observations, str]:
    """What a profile teaches, and that in words.

    A shape of one node tells its stalls as well as its times. Of several nodes a profile does not
    know the racks, without which stalls would be taken for those of another distance: there the
    times alone count, which models know by nodes.

    Args:
        body: of a request.
        types: GPU types that the cluster has.

    Raises:
        Refused: it is no profile, or teaches nothing.
    """
    try:
        found = from_body(body)
    except ProfileFileError as error:
        raise RequestRefusedError(f"profile: {error}") from None
    known = [c for c in found.configurations if c.gpu_type in types and _possible(c)]
    if not known:
        raise RequestRefusedError(
            "profile: no configuration on a GPU type of this cluster"
            f" ({', '.join(sorted(types)) or 'none'}); measure with --gpu-type"
        )
    most = max(c.batch * c.gpus for c in known)
    taught = Observations(stated=found.application, batch=most, initial_batch=most)
    for c in known:
        taught.keep(ObservedTime(c.gpu_type, c.nodes, c.gpus, c.batch, _step_s(c), _alone_s(c)))
        if c.nodes == 1 and (c.gpus == 1 or c.interconnect is not None):
            seen = Measurement(
                gpu_type=c.gpu_type,
                gpus=c.gpus,
                nodes=c.nodes,
                samples_per_s=c.batch * c.gpus / _step_s(c),
                steps=_REPORTS,
                compute_s=c.compute.seconds,
                sync_s=_step_s(c) - _alone_s(c),
                reports=_REPORTS,
            )
            taught.see(key_of(Allocation.of(c.gpu_type, {"": c.gpus}), 1), seen)
    count = len(taught.points)
    named = f" of application {taught.stated}" if taught.stated else ""
    return taught, f"{count} configuration{'s' if count > 1 else ''}{named} learned"


def _alone_s(c: ProfiledConfiguration) -> float:
    """A step without waiting for others, data in memory."""
    return c.compute.seconds + (c.prep.seconds if c.prep else 0.0)


def _step_s(c: ProfiledConfiguration) -> float:
    return _alone_s(c) + sum(t.seconds for t in (c.interconnect, c.network) if t)


def _possible(c: ProfiledConfiguration) -> bool:
    return (
        number(_alone_s(c), _LEAST_S, _MOST_S)
        and number(_step_s(c), _LEAST_S, _MOST_S)
        and max(c.gpus, c.batch * c.gpus) < 2**31
    )
