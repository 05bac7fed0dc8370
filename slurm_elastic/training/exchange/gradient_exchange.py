"""The exchange of gradients between replicas, whose schedule may change between two steps.

Each group of ranks begins with the flat schedule. Rank 0 then requests others; its request is one
of the values that all ranks agree on with each step, so that all change before the same step. At
the first change rank 0 passes on the order in which gradients became complete, and all ranks
measure how long the exchange takes alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from slurm_elastic.training.exchange.exchange_schedule import FLAT, SCHEDULES, candidates
from slurm_elastic.training.exchange.gradient_buckets import GradientBuckets
from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer
from slurm_elastic.training.exchange.schedule_trial import ScheduleTrial
from slurm_elastic.training.ranks.process_group import RankGroup

#: Exchanges alone, of which the shortest counts.
_PROBES = 2


class GradientExchange:
    """Reduction of the gradients of a model that every rank holds.

    Args:
        parameters: of the whole model, in its order; which of them train may change.
        rank_group: all ranks.
        overlap: one of `exchange_schedule.OVERLAPS`; that of rank 0 counts.
        log: takes one line for the job's log, on rank 0.

    Attributes:
        number: of the present schedule.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        rank_group: RankGroup,
        *,
        overlap: str = "none",
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.number = self._agreed = FLAT
        self._all, self._rank_group, self._overlap = list(parameters), rank_group, overlap
        self._log = log
        # Reversed: the last layers are the first of a backward pass.
        self._order = list(reversed(range(len(self._all))))
        self._recorder: ReadinessRecorder | None = None
        self._order_known = self._probed = self._unsuitable = False
        self._begun_at = 0.0
        self._reducer: Reducer | GradientBuckets = Reducer(self._all, rank_group)
        self._trial = self._new_trial()

    @property
    def bytes(self) -> int:
        """Size of a step's sums; 0 for a single rank."""
        return self._reducer.bytes

    @property
    def crossing_bytes(self) -> int:
        """See `ParallelStrategy`: in a ring of all ranks one rank of each node sends to another."""
        size = self._rank_group.size
        return 2 * self.bytes * (size - 1) // size

    @property
    def name(self) -> str:
        """Name of the present schedule; "": there is no choice, or not on this rank."""
        return SCHEDULES[self.number].name if self._trial else ""

    @property
    def exposed(self) -> float | None:
        """Exposed part of the exchange (`ScheduleTrial.exposed`); None: not known here."""
        return self._trial.exposed if self._trial else None

    @property
    def alone_s(self) -> float | None:
        """Seconds of the exchange without computation; None: not measured here."""
        return self._trial.exchange_s if self._trial else None

    @property
    def requested(self) -> float:
        """Number of the schedule that rank 0 requests; 0 on other ranks."""
        return float(self._trial.requested) if self._trial else 0.0

    def agree(self, number: float) -> None:
        """Set the sum of the ranks' requests, which the next step follows."""
        self._agreed = round(number)

    def begin(self) -> bool:
        """Begin a step: delete the gradients of the last one, change the schedule as agreed.

        Returns:
            Whether the schedule has changed.
        """
        self._reducer.clear()
        changed = self._agreed != self.number
        if changed:
            self._change(self._agreed)
        self._begun_at = time.monotonic()
        return changed

    def begin_last_pass(self) -> None:
        """Begin the backward pass after which this rank's gradients are complete."""
        if isinstance(self._reducer, GradientBuckets):
            self._reducer.begin_last_pass()
        elif self._trial and not self._order_known:
            self._recorder = ReadinessRecorder(self._all)

    def reduce(self, control: torch.Tensor, count: int) -> list[float]:
        """Replace sums over this rank's samples by the mean over the whole batch.

        Args and result: as of `Reducer.reduce`.
        """
        self._take_order()
        if self._trial is None:
            return self._reducer.reduce(control, count)
        if self.number == FLAT and self._rank_group.device.type == "cuda":
            torch.cuda.synchronize(self._rank_group.device)
        waits_from = time.monotonic()
        sums = self._reducer.reduce(control, count)
        ended = time.monotonic()
        running = self._trial.running
        self._trial.observe(self.number, pass_s=ended - self._begun_at, waited_s=ended - waits_from)
        if isinstance(self._reducer, GradientBuckets) and self._reducer.incomplete:
            self._unsuitable = True
            self._trial.stop()
            self._log("overlap: off: a layer's gradient is completed twice in one backward pass")
        elif running and not self._trial.running:
            gain = self._trial.gain
            compared = "" if gain is None else f", a step takes {gain:.2f} of one with flat"
            self._log(f"exchange of gradients: {SCHEDULES[self._trial.requested].name}{compared}")
        return sums

    def rebuild(self) -> None:
        """Begin anew, as other parameters train now."""
        self._reset()
        self._reducer = Reducer(self._all, self._rank_group)

    def regroup(self, *, fresh: bool) -> None:
        """Begin anew in a changed group of ranks.

        Args:
            fresh: do not use the memory of former reductions again.
        """
        self._reset()
        if fresh or not isinstance(self._reducer, Reducer) or not self._reducer.fits:
            self._reducer = Reducer(self._all, self._rank_group)

    def close(self) -> None:
        """Delete the gradients, and remove the hooks from the parameters."""
        self._take_order()
        self._reducer.clear()
        if isinstance(self._reducer, GradientBuckets):
            self._reducer.close()

    def _reset(self) -> None:
        self.close()
        self.number = self._agreed = FLAT
        self._probed = False
        self._trial = self._new_trial()

    def _new_trial(self) -> ScheduleTrial | None:
        leads = self._rank_group.rank == 0 and self._rank_group.size > 1
        if not leads or self._overlap == "none" or self._unsuitable:
            return None
        trained = (p for p in self._all if p.requires_grad)
        size = sum(p.numel() * p.element_size() for p in trained)
        return ScheduleTrial(candidates(self._overlap, size))

    def _take_order(self) -> None:
        """End the recording of a backward pass."""
        if self._recorder is None:
            return
        recorded, self._recorder = self._recorder.close(), None
        if recorded:
            seen = set(recorded)
            self._order = recorded + [i for i in self._order if i not in seen]
            self._order_known = True

    def _change(self, number: int) -> None:
        """Use another schedule, on all ranks at once."""
        if not self._probed:
            self._agree_on_order()
            self._measure_alone()
            self._probed = True
        if isinstance(self._reducer, GradientBuckets):
            self._reducer.close()
        self.number = number
        if number == FLAT:
            self._reducer = Reducer(self._all, self._rank_group)
        else:
            self._reducer = GradientBuckets(
                [self._all[i] for i in self._order],
                self._rank_group,
                bucket_bytes=SCHEDULES[number].bucket_bytes,
            )

    def _agree_on_order(self) -> None:
        order = torch.tensor(self._order, dtype=torch.int64, device=self._rank_group.device)
        self._rank_group.broadcast([order])
        self._order = order.tolist()

    def _measure_alone(self) -> None:
        """Measure the exchange without computation; the gradients are deleted."""
        control = torch.zeros(CONTROL, device=self._rank_group.device)
        seconds = []
        for _ in range(_PROBES):
            self._rank_group.add_up([control], "waiting for all ranks")
            begun_at = time.monotonic()
            self._reducer.reduce(control, 1)
            seconds.append(time.monotonic() - begun_at)
        if self._trial:
            self._trial.exchange_s = min(seconds)


class ReadinessRecorder:
    """Record of the order in which gradients become complete in one backward pass.

    Args:
        parameters: all; those that train are watched.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._order: list[int] = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._note, i))
            for i, p in enumerate(parameters)
            if p.requires_grad
        ]

    def close(self) -> list[int]:
        """End the record; return positions of parameters, each once."""
        for hook in self._hooks:
            hook.remove()
        # The last time counts: that of a gradient completed twice.
        return list(reversed(dict.fromkeys(reversed(self._order))))

    def _note(self, index: int, _: torch.Tensor) -> None:
        self._order.append(index)
