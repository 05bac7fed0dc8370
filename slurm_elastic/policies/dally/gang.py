"""A job of the policy `dally`: it runs on exactly the GPUs that it asked for, or on none."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.placement.delay.free_map import Place


@dataclass(slots=True, kw_only=True)
class Gang:
    """State of one job; orders and gang policies must not change it.

    Attributes:
        model: names its communication (models/communication.py).
        arrival_s: when it was submitted.
        since_s: when it last got or gave up GPUs; its arrival before that.
        done: part of its work, 0 to 1.
        ran_s: seconds it has run, communication included.
        ideal_s: seconds that all its work takes without communication.
        service_gpu_s: GPU seconds that it has received.
        last: where it ran last, () before its first start.
    """

    job_id: int
    model: str
    gpus: int
    arrival_s: float
    since_s: float
    ideal_s: float
    done: float = 0.0
    ran_s: float = 0.0
    service_gpu_s: float = 0.0
    last: Place = ()

    @property
    def left_s(self) -> float:
        """Seconds of work left, without communication."""
        return (1.0 - self.done) * self.ideal_s

    @property
    def network_sensitivity(self) -> float:
        """Part of the work that is done, over run time in ideal run times; 0: never ran."""
        # Divisions as in the author's code: gangs that never suffer differ in rounding only.
        return self.done / (self.ran_s / self.ideal_s) if self.ran_s > 0 else 0.0
