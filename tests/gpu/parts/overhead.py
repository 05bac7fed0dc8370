"""A step of the library, by that of plain DDP and FSDP2 (`benchmarks.overhead`)."""

from __future__ import annotations

from typing import Any

from benchmarks.overhead import measure
from tests.gpu.part_program import no_sharding, part_main
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter


def run(setting: KitSetting, rows: RowWriter) -> None:
    """Compare; nothing is expected of the figures."""
    # Where steps are shortest overhead weighs most; `wide` keeps a GPU busy.
    models = ("mlp",) if setting.small else ("mlp", "mlp-accumulating", "wide")
    rounds = 1 if setting.small else 10
    for plain in ("ddp", "fsdp2"):
        for model in models:
            name = f"{plain}, {model}"
            if plain == "fsdp2" and (reason := no_sharding(setting.ranks)):
                rows.not_run(name, reason)
                continue
            if model == "mlp-accumulating" and 256 % (32 * setting.ranks):
                rows.not_run(name, "needs 1, 2, 4 or 8 ranks: equal micro-batches")
                continue
            with rows.trial(name):
                figures = measure(model, plain, rounds=rounds, turn=5, ranks=setting.ranks)
                rows.measured(f"{name}: step", figures["step"][plain]["wall_s"] * 1e3, "ms")
                for label, ratios in figures["ratios"].items():
                    for what, (value, low, high) in ratios.items():
                        rows.measured(
                            f"{model}: {label}, {'CPU' if what == 'cpu' else 'step'}",
                            f"{value:.3f} ({low:.3f} to {high:.3f})",
                        )


def rank(options: dict[str, Any]) -> None:
    """Do nothing: the ranks are those of the benchmark."""
    raise SystemExit(f"overhead has no ranks of its own: {options}")


if __name__ == "__main__":
    part_main(run, rank)
