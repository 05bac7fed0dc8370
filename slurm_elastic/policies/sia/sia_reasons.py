"""The reasons of Sia's choices, from the rows of all jobs."""

from __future__ import annotations

import numpy as np

from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.sia.round_arrays import Floats, Ints, RoundArrays

#: Goodputs that differ by less than this part count as equal.
_ALIKE = 0.005


class SiaReasons:
    """The reasons of each row of a round."""

    def __init__(self, table: RoundArrays, gain: Floats, scaled: Floats, choice: Ints) -> None:
        """Compare each row's choice with its other configurations.

        Args:
            table: arrays of the round.
            gain: [J, C] normalised goodput; 0 where not valid.
            scaled: [J, C] the same after restart factors.
            choice: [J] chosen column, -1: none.
        """
        columns = table.configurations
        self._table = table
        self._columns = columns
        self._choice: list[int] = choice.tolist()
        self._held: list[int] = table.held.tolist()
        can_run = np.asarray(table.valid.any(axis=1))
        self._can_run: list[bool] = can_run.tolist()
        rows = np.arange(len(choice))
        if not gain.size:
            return
        base = np.where(table.valid, gain, np.inf).argmin(axis=1)
        other = table.valid & (columns.kind != columns.kind[choice][:, None])
        more = table.valid & ~other & (columns.gpus > columns.gpus[choice][:, None])
        best_other = np.where(other, gain, 0.0).argmax(axis=1)
        best_more = np.where(more, gain, 0.0).argmax(axis=1)
        wished = np.where(table.valid, scaled, 0.0).argmax(axis=1)
        base_gain, own_gain = gain[rows, base], gain[rows, choice]
        other_gain, more_gain = gain[rows, best_other], gain[rows, best_more]
        other_scaled, more_scaled = scaled[rows, best_other], scaled[rows, best_more]
        with np.errstate(divide="ignore", invalid="ignore"):
            self._times: list[float] = (own_gain / base_gain).tolist()
            self._other_ratio: list[float] = (other_gain / own_gain).tolist()
            self._other_times: list[float] = (other_gain / base_gain).tolist()
            self._more_ratio: list[float] = (more_gain / own_gain).tolist()
            self._more_times: list[float] = (more_gain / base_gain).tolist()
            self._more_factor: list[float] = (more_scaled / more_gain).tolist()
        self._base: list[int] = base.tolist()
        self._has_other: list[bool] = other.any(axis=1).tolist()
        self._best_other: list[int] = best_other.tolist()
        self._other_pays: list[bool] = (other_scaled > own_gain).tolist()
        self._has_more: list[bool] = more.any(axis=1).tolist()
        self._best_more: list[int] = best_more.tolist()
        self._more_pays: list[bool] = (more_scaled > own_gain).tolist()
        self._more_faster: list[bool] = (more_gain > own_gain * (1 + _ALIKE)).tolist()
        self._wished: list[int] = wished.tolist()

    def chosen(self, row: int) -> Reason:
        """Return why it gets its configuration."""
        column, base = self._choice[row], self._base[row]
        gpus, gpu_type = self._columns.size_and_type(column)
        if base == column:
            first = Reason("goodput-smallest", gpus=gpus, gpu_type=gpu_type)
        else:
            base_gpus, base_type = self._columns.size_and_type(base)
            first = Reason(
                "goodput-chosen",
                gpus=gpus,
                gpu_type=gpu_type,
                times=self._times[row],
                base_gpus=base_gpus,
                base_type=base_type,
            )
        further = (self._other_type(row), self._not_more(row), self._change(row))
        reasons = [first, *(r for r in further if r is not None)]
        return first if len(reasons) == 1 else Reason("several", reasons=reasons)

    def waits(self, row: int) -> Reason:
        """Return why it gets nothing."""
        if not self._can_run[row]:
            return Reason("no-fit")
        gpus, gpu_type = self._columns.size_and_type(self._wished[row])
        if self._held[row] >= 0:
            return Reason("others-gain-its-gpus", gpus=gpus, gpu_type=gpu_type)
        return Reason("others-gain-more", gpus=gpus, gpu_type=gpu_type)

    def _change(self, row: int) -> Reason | None:
        """Return the predicted goodput over that of what it holds."""
        column, held = self._choice[row], self._held[row]
        if held < 0 or column == held:
            return None
        gpus, gpu_type = self._columns.size_and_type(held)
        goodput = self._table.goodput
        times = float(goodput[row, column] / goodput[row, held])
        return Reason("goodput-change", times=times, gpus=gpus, gpu_type=gpu_type)

    def _other_type(self, row: int) -> Reason | None:
        """Return the goodput that the best configuration of another type would give."""
        if not self._has_other[row]:
            return None
        ratio = self._other_ratio[row]
        cause = "contested"
        if ratio <= 1 - _ALIKE:
            cause = "lower"
        elif ratio < 1 + _ALIKE:
            cause = "equal"
        elif self._held[row] == self._choice[row] and not self._other_pays[row]:
            cause = "restart"
        gpus, gpu_type = self._columns.size_and_type(self._best_other[row])
        times = self._other_times[row]
        return Reason("goodput-elsewhere", gpus=gpus, gpu_type=gpu_type, times=times, why=cause)

    def _not_more(self, row: int) -> Reason | None:
        """Return why it does not get more of this type."""
        if not self._has_more[row]:
            return self._bound(row)
        if not self._more_faster[row]:
            return _MORE_NOT_FASTER
        gpus, _ = self._columns.size_and_type(self._best_more[row])
        if self._held[row] == self._choice[row] and not self._more_pays[row]:
            return Reason(
                "more-not-worth-restart",
                gpus=gpus,
                gain=self._more_ratio[row] - 1,
                factor=self._more_factor[row],
            )
        return Reason("more-contested", gpus=gpus, times=self._more_times[row])

    def _bound(self, row: int) -> Reason | None:
        """Return why it gets no more GPUs when no configuration has more."""
        job, cap = self._table.candidates[row], int(self._table.cap[row])
        gpus, gpu_type = self._columns.size_and_type(self._choice[row])
        sizes = job.directive.sizes(gpu_type)
        if job.rigid or not len(sizes) or gpus >= sizes[-1]:
            return None
        unit = job.directive.unit_for(gpu_type)
        return Reason("unmeasured-bound", gpus=cap * unit) if gpus * 2 > cap * unit else None


_MORE_NOT_FASTER = Reason("more-not-faster")
