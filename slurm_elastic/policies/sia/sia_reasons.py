"""Why Sia gives a job what it gives: words for `selastic explain`, from the job's row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_elastic.policies.sia.round_arrays import Floats, RoundArrays

LIMIT_HIT = "the solver's time limit was hit: the best answer by then"
#: Goodputs that differ by less than this part are told as equal.
_ALIKE = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class SiaReasons:
    """What can be said of each row.

    Attributes:
        gain: [J, C] normalised goodput; 0 where not valid.
        scaled: [J, C] the same after restart factors.
        factor: [J] restart factors.
    """

    table: RoundArrays
    gain: Floats
    scaled: Floats
    factor: Floats

    def chosen(self, row: int, column: int) -> str:
        """Why it gets this configuration."""
        gain = self.gain[row]
        valid = self.table.valid[row]
        base = int(np.where(valid, gain, np.inf).argmin())
        times = gain[column] / gain[base]
        parts = []
        if base == column:
            parts.append(f"{self.name(column)}: its smallest goodput")
        else:
            parts.append(f"{self.name(column)}: goodput {times:.1f} times {self._one(base)}")
        parts += self._other_type(row, column, base)
        parts.append(self._not_more(row, column, base))
        return "; ".join(p for p in parts if p)

    def waits(self, row: int) -> str:
        """Why it gets nothing."""
        valid = self.table.valid[row]
        if not valid.any():
            return "no GPUs of this cluster fit its directive and its model"
        best = int(np.where(valid, self.scaled[row], 0.0).argmax())
        if self.table.held[row] >= 0:
            return f"others gain more from its GPUs; {self.name(best)} would be its best"
        return f"all GPUs that it could use help others more; {self.name(best)} would be its best"

    def _other_type(self, row: int, column: int, base: int) -> list[str]:
        """What the best configuration of another type would give."""
        columns = self.table.configurations
        others = self.table.valid[row] & (columns.kind != columns.kind[column])
        if not others.any():
            return []
        gain = self.gain[row]
        best = int(np.where(others, gain, 0.0).argmax())
        ratio = gain[best] / gain[column]
        if ratio <= 1 - _ALIKE:
            return [f"{self.name(best)} would give {gain[best] / gain[base]:.1f}"]
        if ratio < 1 + _ALIKE:
            return [f"{self.name(best)} would give as much"]
        why = "others gain more from those"
        if self.table.held[row] == column and self.scaled[row, best] <= gain[column]:
            why = "not worth a restart"
        return [f"{self.name(best)} would give {gain[best] / gain[base]:.1f}, {why}"]

    def _not_more(self, row: int, column: int, base: int) -> str:
        """Why it does not get more of this type."""
        columns = self.table.configurations
        same = columns.kind == columns.kind[column]
        gpus, gain = columns.gpus, self.gain[row]
        more = self.table.valid[row] & same & (gpus > gpus[column])
        if not more.any():
            return self._bound(row, column)
        best = int(np.where(more, gain, 0.0).argmax())
        if gain[best] <= gain[column] * (1 + _ALIKE):
            return "more would not make it faster"
        if self.table.held[row] == column and self.scaled[row, best] <= gain[column]:
            return (
                f"{gpus[best]} would be {gain[best] / gain[column] - 1:.0%} faster,"
                f" but a restart takes more (factor {self.factor[row]:.2f})"
            )
        return f"{gpus[best]} would give {gain[best] / gain[base]:.1f}, others gain more"

    def _bound(self, row: int, column: int) -> str:
        """What keeps it from more GPUs when no configuration has more."""
        columns, job = self.table.configurations, self.table.candidates[row]
        sizes = job.directive.sizes(columns.types[columns.kind[column]])
        if job.rigid or not len(sizes) or columns.gpus[column] >= sizes[-1]:
            return ""
        unit = job.directive.unit_for(columns.types[columns.kind[column]])
        if columns.gpus[column] * 2 > self.table.cap[row] * unit:
            return f"no more than {self.table.cap[row] * unit} before it was measured on more"
        return ""

    def name(self, column: int) -> str:
        """GPUs and type of a column: `8 a100`."""
        columns = self.table.configurations
        kind = columns.types[columns.kind[column]]
        return f"{columns.gpus[column]} {kind or 'GPUs'}"

    def _one(self, column: int) -> str:
        name = self.name(column)
        return f"one {name[2:]}" if name.startswith("1 ") else name
