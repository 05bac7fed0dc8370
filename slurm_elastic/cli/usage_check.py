"""`selastic usage --check`: what was counted against Slurm's accounting, run by run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from slurm_elastic.cli import formatting
from slurm_elastic.slurm.accounting import AccountedRun

if TYPE_CHECKING:
    from slurm_elastic.rpc.answers import RunUsage


def compared(
    counted: Sequence[RunUsage], accounted: Iterable[AccountedRun], *, since: float
) -> tuple[int, list[str]]:
    """How many runs agree to the second, and a line for each that does not.

    Runs that began before `since` (epoch s), or that are not over, are left out.
    """
    theirs = {
        (r.job_id, r.run, r.start): r for r in accounted if r.start >= since and r.end is not None
    }
    ours = {(c["job_id"], c["run"], round(c["start"])): c for c in counted if c["start"] >= since}
    known = {c["job_id"] for c in counted}
    equal, lines = 0, []
    for key, one in sorted(ours.items()):
        name = f"{formatting.clean(one['display_id'])} run {one['run']}"
        other = theirs.pop(key, None)
        if one["end"] is None or not one["settled"]:
            if other is not None:
                lines.append(f"{name}: not settled yet; ask again in a minute")
            elif one["end"] is not None:
                lines.append(f"{name}: sacct does not know it, or not that it is over")
            continue
        if other is None:
            lines.append(f"{name}: sacct does not know it, or not that it is over")
        elif (line := _difference(one, other)) != "":
            lines.append(f"{name}: {line}")
        else:
            equal += 1
    for (_, run, _), other in sorted(theirs.items()):
        elastic = other.submitted is not None or other.job_id in known
        if elastic and other.gpus and other.seconds:
            gpu_s = other.gpus * other.seconds
            name = formatting.clean(other.display_id)
            lines.append(f"{name} run {run}: 0 GPU s, sacct {gpu_s}: nobody saw it (yet)")
    return equal, lines


def _difference(one: RunUsage, other: AccountedRun) -> str:
    if other.gpus is None:
        return "sacct does not say how many GPUs: AccountingStorageTRES lacks gres/gpu"
    mine, theirs = round(one["gpus"] * one["seconds"]), other.gpus * other.seconds
    if (one["gpus"], round(one["seconds"])) == (other.gpus, other.seconds):
        return ""
    return (
        f"{mine} GPU s, sacct {theirs}: {one['gpus']} GPUs for {round(one['seconds'])} s"
        f" against {other.gpus} for {other.seconds} s"
    )
