"""`selastic usage --check`: compares the usage of each run with Slurm's accounting."""

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
    """Return the number of runs that agree to the second, and a line for each that does not.

    Runs that began before `since` (epoch s), or that have not ended, are left out.
    """
    in_slurm = {
        (r.job_id, r.run, r.start): r for r in accounted if r.start >= since and r.end is not None
    }
    in_ledger = {
        (c["job_id"], c["run"], round(c["start"])): c for c in counted if c["start"] >= since
    }
    known = {c["job_id"] for c in counted}
    equal, lines = 0, []
    for key, one in sorted(in_ledger.items()):
        name = f"{formatting.clean(one['display_id'])} run {one['run']}"
        other = in_slurm.pop(key, None)
        if one["end"] is None or not one["settled"]:
            if other is not None:
                lines.append(f"{name}: not settled yet; repeat in a minute")
            elif one["end"] is not None:
                lines.append(f"{name}: sacct has no record of it, or not of its end")
            continue
        if other is None:
            lines.append(f"{name}: sacct has no record of it, or not of its end")
        elif (line := _difference(one, other)) != "":
            lines.append(f"{name}: {line}")
        else:
            equal += 1
    for (_, run, _), other in sorted(in_slurm.items()):
        elastic = other.submitted is not None or other.job_id in known
        if elastic and other.gpus and other.seconds:
            gpu_s = other.gpus * other.seconds
            name = formatting.clean(other.display_id)
            lines.append(
                f"{name} run {run}: 0 GPU s, sacct {gpu_s}: not recorded by the controller (yet)"
            )
    return equal, lines


def _difference(one: RunUsage, other: AccountedRun) -> str:
    if other.gpus is None:
        return "sacct has no number of GPUs: add gres/gpu to AccountingStorageTRES"
    counted, accounted = round(one["gpus"] * one["seconds"]), other.gpus * other.seconds
    if (one["gpus"], round(one["seconds"])) == (other.gpus, other.seconds):
        return ""
    return (
        f"{counted} GPU s, sacct {accounted}: {one['gpus']} GPUs for {round(one['seconds'])} s"
        f" against {other.gpus} for {other.seconds} s"
    )
