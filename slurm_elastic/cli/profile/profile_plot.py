"""Plot of `selastic profile --plot`: the step of each configuration as a stacked bar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.cli.formatting import clean, gpus
from slurm_elastic.cli.profile.profile_report import STALLS, cold
from slurm_elastic.simulator import plots

if TYPE_CHECKING:
    from slurm_elastic.profiler.profile_file import ProfiledConfiguration, StepProfile

#: Colour and hatch of each part of a step; the hatch distinguishes them without colours.
_LOOKS = {
    "compute": ("#999999", ""),
    "interconnect": (plots.COLOURS[0], "////"),
    "network": (plots.COLOURS[1], "...."),
    "prep": (plots.COLOURS[2], "xxxx"),
    "fetch": (plots.COLOURS[4], "----"),
}
_MS = 1e3


def draw(profile: StepProfile, path: Path) -> None:
    """Draw a profile.

    Raises:
        PlotError: matplotlib is not installed, or the file cannot be written.
    """
    plt = plots.matplotlib()
    rows = profile.configurations
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 1.6 + 0.5 * len(rows)), layout="constrained")
        bar_starts = [0.0] * len(rows)
        for part in ("compute", *STALLS):
            times = [getattr(c, part) for c in rows]
            widths = [t.seconds * _MS if t else 0.0 for t in times]
            if not any(widths):
                continue
            colour, hatch = _LOOKS[part]
            axes.barh(
                range(len(rows)), widths, left=bar_starts, color=colour, hatch=hatch,
                edgecolor="white", label=part,
            )  # fmt: skip
            bar_starts = [a + b for a, b in zip(bar_starts, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [_name(c) for c in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, max(cold(c) for c in rows) * _MS * 1.02)
        axes.set_xlabel("ms per step")
        axes.grid(visible=False, axis="y")
        name = clean(profile.application or profile.model) or "training"
        axes.set_title(f"Parts of a step of {name}")
        figure.legend(loc="outside lower center", ncols=5)
        plots.save(figure, path)
        plt.close(figure)


def _name(c: ProfiledConfiguration) -> str:
    text = gpus(c.gpus, c.gpu_type)
    return f"{text} on {c.nodes} nodes" if c.nodes > 1 else text
