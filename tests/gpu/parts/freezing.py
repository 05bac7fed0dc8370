"""Frozen front layers on GPUs: what is sent, and what a step takes (`benchmarks.freezing`)."""

from __future__ import annotations

from typing import Any

from benchmarks.freezing import BLOCKS, saving
from tests.gpu.part_program import part_main
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter


def run(setting: KitSetting, rows: RowWriter) -> None:
    """Measure, and check that frozen layers are not sent and not computed backward."""
    width, steps, rounds = (64, 3, 1) if setting.small else (4096, 12, 4)
    with rows.trial("freezing"):
        by_prefix = saving(steps=steps, rounds=rounds, width=width, ranks=setting.ranks)
        none, all_frozen = by_prefix[0], by_prefix[-1]
        for row in by_prefix:
            name = f"{row['frozen']} of {BLOCKS} blocks frozen"
            part = 1 - row["frozen"] / BLOCKS
            # The last layer and the control values are always sent.
            target = all_frozen["bytes"] + part * (none["bytes"] - all_frozen["bytes"])
            if setting.ranks > 1:
                rows.check(
                    f"{name}: sent in a step",
                    row["bytes"] / 1e6,
                    ok=abs(row["bytes"] - target) <= 0.01 * none["bytes"],
                    expected=f"{target / 1e6:.4g} MB",
                    unit="MB",
                )
            rows.measured(f"{name}: step", row["step_s"] * 1e3, "ms")
        ratio = all_frozen["step_s"] / none["step_s"]
        rows.timed("all blocks frozen: step, by that of none", ratio, 0.0, 0.8)


def rank(options: dict[str, Any]) -> None:
    """Do nothing: the ranks are those of the benchmark."""
    raise SystemExit(f"freezing has no ranks of its own: {options}")


if __name__ == "__main__":
    part_main(run, rank)
