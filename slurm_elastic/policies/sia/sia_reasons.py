"""The reasons of Sia's choices, from the row of each job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.sia.round_arrays import Floats, RoundArrays

#: Goodputs that differ by less than this part count as equal.
_ALIKE = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class SiaReasons:
    """The reasons of each row.

    Attributes:
        gain: [J, C] normalised goodput; 0 where not valid.
        scaled: [J, C] the same after restart factors.
    """

    table: RoundArrays
    gain: Floats
    scaled: Floats

    def chosen(self, row: int, column: int) -> Reason:
        """Return why it gets this configuration."""
        gain = self.gain[row]
        valid = self.table.valid[row]
        base = int(np.where(valid, gain, np.inf).argmin())
        times = gain[column] / gain[base]
        gpus, gpu_type = self.shape(column)
        if base == column:
            first = Reason("goodput-smallest", gpus=gpus, gpu_type=gpu_type)
        else:
            base_gpus, base_type = self.shape(base)
            first = Reason(
                "goodput-chosen",
                gpus=gpus,
                gpu_type=gpu_type,
                times=times,
                base_gpus=base_gpus,
                base_type=base_type,
            )
        further = (self._other_type(row, column, base), self._not_more(row, column, base))
        reasons = [first, *(r for r in further if r is not None)]
        return first if len(reasons) == 1 else Reason("several", reasons=reasons)

    def waits(self, row: int) -> Reason:
        """Return why it gets nothing."""
        valid = self.table.valid[row]
        if not valid.any():
            return Reason("no-fit")
        gpus, gpu_type = self.shape(int(np.where(valid, self.scaled[row], 0.0).argmax()))
        if self.table.held[row] >= 0:
            return Reason("others-gain-its-gpus", gpus=gpus, gpu_type=gpu_type)
        return Reason("others-gain-more", gpus=gpus, gpu_type=gpu_type)

    def _other_type(self, row: int, column: int, base: int) -> Reason | None:
        """Return what the best configuration of another type would give."""
        columns = self.table.configurations
        others = self.table.valid[row] & (columns.kind != columns.kind[column])
        if not others.any():
            return None
        gain = self.gain[row]
        best = int(np.where(others, gain, 0.0).argmax())
        ratio = gain[best] / gain[column]
        cause = "contested"
        if ratio <= 1 - _ALIKE:
            cause = "lower"
        elif ratio < 1 + _ALIKE:
            cause = "equal"
        elif self.table.held[row] == column and self.scaled[row, best] <= gain[column]:
            cause = "restart"
        gpus, gpu_type = self.shape(best)
        times = gain[best] / gain[base]
        return Reason("goodput-elsewhere", gpus=gpus, gpu_type=gpu_type, times=times, why=cause)

    def _not_more(self, row: int, column: int, base: int) -> Reason | None:
        """Return why it does not get more of this type."""
        columns = self.table.configurations
        same_type = columns.kind == columns.kind[column]
        gpus, gain = columns.gpus, self.gain[row]
        more = self.table.valid[row] & same_type & (gpus > gpus[column])
        if not more.any():
            return self._bound(row, column)
        best = int(np.where(more, gain, 0.0).argmax())
        if gain[best] <= gain[column] * (1 + _ALIKE):
            return Reason("more-not-faster")
        if self.table.held[row] == column and self.scaled[row, best] <= gain[column]:
            return Reason(
                "more-not-worth-restart",
                gpus=gpus[best],
                gain=gain[best] / gain[column] - 1,
                factor=self.scaled[row, best] / gain[best],
            )
        return Reason("more-contested", gpus=gpus[best], times=gain[best] / gain[base])

    def _bound(self, row: int, column: int) -> Reason | None:
        """Return what keeps it from more GPUs when no configuration has more."""
        columns, job = self.table.configurations, self.table.candidates[row]
        sizes = job.directive.sizes(columns.types[columns.kind[column]])
        if job.rigid or not len(sizes) or columns.gpus[column] >= sizes[-1]:
            return None
        unit = job.directive.unit_for(columns.types[columns.kind[column]])
        if columns.gpus[column] * 2 > self.table.cap[row] * unit:
            return Reason("unmeasured-bound", gpus=self.table.cap[row] * unit)
        return None

    def shape(self, column: int) -> tuple[int, str]:
        """Return GPUs and type of a column."""
        columns = self.table.configurations
        return int(columns.gpus[column]), columns.types[columns.kind[column]]
