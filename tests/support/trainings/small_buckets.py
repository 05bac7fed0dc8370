"""Schedules of exchange for tiny models, and a short trial of them that nothing ends early."""

from __future__ import annotations

from functools import partial

from slurm_elastic.training.exchange import exchange_schedule, gradient_exchange
from slurm_elastic.training.exchange.exchange_schedule import ExchangeSchedule
from slurm_elastic.training.exchange.schedule_trial import ScheduleTrial
from slurm_elastic.training.exchange.sliced_exchange import SlicedExchange
from slurm_elastic.training.parallel import sliced_parallel

#: Of each rank's parameters in a bucket with `overlap="sliced"`.
SLICED_BYTES = 60


class SmallBuckets:
    """Replacement of the schedules in one rank, as a fault of `TrainingRuns.start`."""

    def prepare(self, rank: int) -> None:
        """Replace them; all ranks do."""
        del rank
        schedules = tuple(
            ExchangeSchedule(schedule.name, size)
            for schedule, size in zip(exchange_schedule.SCHEDULES, (0, 1, 100, 200), strict=False)
        )
        for module in (exchange_schedule, gradient_exchange):
            module.SCHEDULES = schedules  # type: ignore[attr-defined]
        gradient_exchange.ScheduleTrial = partial(  # type: ignore[misc,assignment]
            ScheduleTrial, warm_up=1, turn=1, least_part=0.0
        )
        sliced_parallel.SlicedExchange = partial(  # type: ignore[misc,assignment]
            SlicedExchange, bucket_bytes=SLICED_BYTES
        )

    def begin(self, step: int) -> None:
        """Do nothing."""
