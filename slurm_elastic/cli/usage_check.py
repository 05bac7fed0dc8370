"""`selastic usage --check`: compares the usage of each run with Slurm's accounting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from slurm_elastic.cli import formatting

if TYPE_CHECKING:
    from slurm_elastic.rpc.usage_answers import RunUsage
    from slurm_elastic.slurm.accounting import AccountedRun


def compared(
    counted: Sequence[RunUsage], accounted: Iterable[AccountedRun], *, since: float
) -> tuple[int, list[str]]:
    """Return the number of runs that agree to the second, and a line for each that does not.

    Runs that began before `since` (epoch s), or that have not ended, are left out. Where sacct
    does not show the number of a run (before Slurm 24.11), runs are compared by their start.
    """
    in_slurm = {
        (r.job_id, r.run, r.start): r for r in accounted if r.start >= since and r.end is not None
    }
    in_ledger = {
        (c["job_id"], c["run"], round(c["start"])): c for c in counted if c["start"] >= since
    }
    counted_jobs = {c["job_id"] for c in counted}
    equal, lines = 0, []
    for key, ledger_run in sorted(in_ledger.items()):
        name = f"{formatting.clean(ledger_run['display_id'])} run {ledger_run['run']}"
        job_id, _, start = key
        slurm_run = in_slurm.pop(key, None) or in_slurm.pop((job_id, None, start), None)
        if ledger_run["end"] is None or not ledger_run["settled"]:
            if slurm_run is not None:
                lines.append(f"{name}: not settled yet; repeat in a minute")
            elif ledger_run["end"] is not None:
                lines.append(f"{name}: sacct has no record of it, or not of its end")
            continue
        if slurm_run is None:
            lines.append(f"{name}: sacct has no record of it, or not of its end")
        elif (line := _difference(ledger_run, slurm_run)) != "":
            lines.append(f"{name}: {line}")
        else:
            equal += 1
    for (_, run, _), slurm_run in sorted(in_slurm.items()):
        run_text = "" if run is None else f" run {run}"
        elastic = slurm_run.submitted is not None or slurm_run.job_id in counted_jobs
        if elastic and slurm_run.gpus and slurm_run.seconds:
            gpu_s = slurm_run.gpus * slurm_run.seconds
            name = formatting.clean(slurm_run.display_id)
            lines.append(
                f"{name}{run_text}: 0 GPU s, sacct {gpu_s}: not recorded by the controller (yet)"
            )
    return equal, lines


def _difference(ledger_run: RunUsage, slurm_run: AccountedRun) -> str:
    if ledger_run["gpus"] < 1:  # by shards, of which sacct counts no GPU
        differs = round(ledger_run["seconds"]) != slurm_run.seconds
        seconds = f"{round(ledger_run['seconds'])} s of half of a GPU, sacct {slurm_run.seconds} s"
        return seconds if differs else ""
    if slurm_run.gpus is None:
        return "sacct has no number of GPUs: add gres/gpu to AccountingStorageTRES"
    counted, accounted = (
        round(ledger_run["gpus"] * ledger_run["seconds"]),
        slurm_run.gpus * slurm_run.seconds,
    )
    if (ledger_run["gpus"], round(ledger_run["seconds"])) == (slurm_run.gpus, slurm_run.seconds):
        return ""
    return (
        f"{counted} GPU s, sacct {accounted}: {ledger_run['gpus']} GPUs for"
        f" {round(ledger_run['seconds'])} s"
        f" against {slurm_run.gpus} for {slurm_run.seconds} s"
    )
