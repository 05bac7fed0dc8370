"""`selastic status` and `selastic show`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import client, formatting, options
from slurm_elastic.cli.exit_codes import REFUSED, SILENT, USAGE, CliError
from slurm_elastic.cli.reason_text import text as reason_text
from slurm_elastic.cli.tables import Column, TableLayout, render
from slurm_elastic.core.nodelist import fold

if TYPE_CHECKING:
    from slurm_elastic.rpc.answers import JobRow, PartitionRow, ProbableStart, StatusAnswer, Waiting
    from slurm_elastic.rpc.decision_answers import ShowAnswer


def _gpus_held(row: JobRow) -> str:
    """Return the number of GPUs that a job holds; `1/2` for half of one, `-` for none."""
    if row.get("half"):
        return "1/2"
    return str(row["gpus"]) if row["gpus"] else "-"


_COLUMNS = (
    Column("JOBID", lambda r: r["display_id"], right=True),
    Column("NAME", lambda r: r["name"], most=20),
    Column("USER", lambda r: r["user"], most=12),
    Column("GPUS", _gpus_held, right=True),
    Column("WANTS", lambda r: r["wants"]),
    Column("TYPE", lambda r: r["gpu_type"] or "any"),
    Column("WHERE", lambda r: placement_text(r)),  # noqa: PLW0108 - defined below
    Column("SPEED", lambda r: _running(r, formatting.speed(r))),
    Column("PROGRESS", lambda r: _running(r, formatting.percent(r["progress"])), right=True),
    Column("RESIZES", lambda r: _running(r, str(r["resizes"])), right=True),
    Column("PARTITION", lambda r: r["partition"]),
    Column("STATE", lambda r: r["state"]),
    Column("NODES", lambda r: formatting.nodes(r["where"])),
    Column("HELD", lambda r: "yes" if r["held"] else "no"),
)
_DEFAULT = tuple(c.header for c in _COLUMNS[:10])


@options.verb
@click.option("-a", "--all", "all_", is_flag=True, help="Show all rigid jobs, too.")
@click.option(
    "-w",
    "--watch",
    metavar="SECONDS",
    is_flag=False,
    flag_value=2.0,
    type=click.FloatRange(min=0.5),
    help="Repeat every SECONDS (2); on a terminal, redraw in place.",
)
@options.table
@options.as_json
def status(
    *, all_: bool, watch: float | None, format_: str, noheader: bool, parsable: bool, json_: bool
) -> None:
    """Show the GPUs of each partition, and the elastic jobs.

    Of each job: GPUs held and requested, nodes, speed, progress and resizes so far. A rigid job is
    shown when GPUs are kept for it.
    """
    layout = options.layout(format_, noheader, parsable)
    if json_ and watch:
        raise CliError("--json and --watch exclude each other", USAGE)
    if json_:
        options.put_json(client.ask("status", all=all_))
    elif watch is None:
        options.put(lines(_status_answer(all_), layout))
    elif sys.stdout.isatty():
        _redraw(all_, layout, watch)
    else:
        while True:
            options.put([*lines(_status_answer(all_), layout), ""])
            sys.stdout.flush()
            time.sleep(watch)


@options.verb
@click.argument("what", metavar="[job]", required=True)
@click.argument("job", metavar="JOBID", required=False)
@click.option(
    "--profile", is_flag=True, help="Print its layer profile, the input of `selastic partition`."
)
@options.as_json
def show(what: str, job: str | None, profile: bool, json_: bool) -> None:
    """Show everything known of one job.

    `selastic show job 4711` is like `scontrol show job 4711`.
    """
    if job is None:
        what, job = "job", what
    if what not in ("job", "jobs"):
        raise CliError(
            f'show: "{formatting.clean(what)}" is unknown; write `show job {job}`', USAGE
        )
    answer: Any = client.ask("show", jobs=[job], profile=profile or None)
    if json_:
        options.put_json(answer)
    elif profile:
        options.put_json(_profile(answer))
    else:
        options.put(details(answer))


def _profile(answer: ShowAnswer) -> dict[str, Any]:
    profile = answer["profile"]
    if profile is None:
        raise CliError(
            f"job {answer['job']['display_id']} has no layer profile (yet): it is measured in the"
            " first steps of programs that use slurm_elastic.training",
            REFUSED,
        )
    return profile


def lines(answer: StatusAnswer, layout: TableLayout) -> list[str]:
    """Return the lines of `status`: notes, partitions, jobs."""
    jobs = render(answer["jobs"], _COLUMNS, _DEFAULT, layout)
    if layout.parsable or not layout.header:
        return jobs
    notes = [f"note: {reason_text(n)}" for n in answer["notes"]]
    if answer["mode"] != "act":
        notes.insert(0, f"note: mode is {answer['mode']}: no job is changed")
    head = notes + [_partition(p) for p in answer["partitions"]]
    indented = [f"  {line}" for line in jobs] if answer["jobs"] else ["  no elastic jobs"]
    return head + indented


def placement_text(row: JobRow) -> str:
    """Return the nodes of a running job, or what a pending one waits for."""
    transition = row["transition"]
    if transition:
        change = (
            f"-> {formatting.clean(transition['target'])} ({formatting.phase(transition['state'])})"
        )
        return f"{formatting.places(row['where'])} {change}".lstrip()
    if row["stopped"]:
        return f"held: {reason_text(row['stopped'])}"
    if row["waiting"] is not None:
        count, reason = formatting.gpus(row["waiting"]["gpus"], ""), waits_for(row["waiting"])
        text = f"waiting for {count}" + (f": {reason}" if reason else "")
        start = probable_start(row["waiting"])
        return text + (f"; probably starts at {formatting.clock(start['median'])}" if start else "")
    text = formatting.places(row["where"])
    return f"{text} (held)" if row["held"] else text


def waits_for(waiting: Waiting) -> str:
    """Return which jobs free the GPUs, `4711 gives them in about 6 s`; "" if unknown."""
    givers = waiting["givers"]
    if givers:
        names = " and ".join(g["display_id"] for g in givers[:3])
        waits_s = [g["in_s"] for g in givers if g["in_s"] is not None]
        time_text = (
            f" in about {formatting.span(round(max(waits_s)))}"
            if len(waits_s) == len(givers)
            else ""
        )
        verb = "gives" if len(givers) == 1 else "give"
        if not any(g["under_way"] for g in givers):
            verb = "is to give" if len(givers) == 1 else "are to give"
        return f"{names} {verb} them{time_text}"
    if boots := waiting.get("boots"):  # a controller of an older release sends none
        return f"{formatting.clean(fold(boots))} must boot for it"
    if waiting["kept"]:
        return f"{sum(waiting['kept'].values())} are kept for it"
    if waiting["leased"]:
        return "the controller starts it"
    reason = waiting["slurm_reason"]
    if reason == "BeginTime" and waiting["begin_time"]:
        return f"starts at {formatting.clock(waiting['begin_time'])}"
    return "" if reason in ("", "None") else formatting.clean(reason)


def probable_start(waiting: Waiting) -> ProbableStart | None:
    """Return when a job will probably start; None: unknown, or its GPUs are about to be free."""
    if waiting["givers"] or waiting["kept"]:
        return None
    return waiting.get("starts")  # a controller of an older release sends none


def details(answer: ShowAnswer) -> list[str]:
    """`scontrol show`'s form: Key=value, grouped."""
    job, now = answer["job"], answer["time"]

    def pairs(**values: object) -> str:
        shown = ((k, "-" if v in (None, "") else formatting.clean(v)) for k, v in values.items())
        return "   " + " ".join(f"{k}={v}" for k, v in shown)

    def seconds(value: float | None) -> str:
        return "-" if value is None else formatting.span(value).replace(" ", "")

    out = [
        pairs(JobId=job["display_id"], JobName=job["name"])[3:],
        pairs(User=job["user"], Account=answer["account"], QOS=answer["qos"]),
        pairs(State=job["state"], Partition=job["partition"], Restarts=answer["run"]),
        pairs(Elastic=answer["override"] or answer["directive"], Submitted=answer["directive"]),
        pairs(GPUs=job["gpus"], Type=job["gpu_type"], Where=formatting.places(job["where"])),
        pairs(
            SubmitTime=formatting.clock(answer["submit_time"], now),
            StartTime=formatting.clock(answer["start_time"], now),
            EndTime=formatting.clock(answer["end_time"], now),
            TimeLimit=_limit(answer["time_limit_s"]),
            **(
                {"ExtendedBy": formatting.duration(answer["extended_s"])}
                if answer["extended_s"]
                else {}
            ),
        ),
        pairs(
            Speed=formatting.speed(job).replace(" ", ""),
            Step=answer["step"],
            Progress=formatting.percent(job["progress"]),
            GlobalBatch=answer["global_batch"],
        ),
        pairs(
            Proven=_yes(answer["proven"]),
            Reporting=_yes(answer["reporting"]),
            Checkpoint=seconds(answer["checkpoint_s"]),
            Restart=seconds(answer["restart_s"]),
            LastCheckpointStep=answer["checkpoint_step"],
        ),
        *([pairs(Stopped=reason_text(job["stopped"]))] if job["stopped"] else []),
        pairs(
            Held=_yes(job["held"]),
            Resizes=job["resizes"],
            Unmanaged=reason_text(job["unmanaged_reason"]),
        ),
    ]
    out += [pairs(**row) for row in _running_pairs(answer)]
    out += [
        pairs(
            Measured=f"{formatting.digits(m['samples_per_s'])}samples/s",
            GPUs=m["gpus"],
            Type=m["gpu_type"],
            Nodes=m["nodes"],
        )
        for m in answer["measurements"]
    ]
    model = answer["model"]
    if model:
        scale = model["noise_scale"]
        out.append(
            pairs(
                Application=model["application"],
                Class=model["job_class"],
                Batch=model["batch"],
                NoiseScale=None if scale is None else formatting.digits(scale),
                Observed=model["observed"],
            )
        )
        out += [
            pairs(
                Goodput=f"{formatting.digits(t['goodput'])}samples/s" if t["goodput"] else None,
                GPUs=t["gpus"],
                Type=t["gpu_type"],
                Nodes=t["nodes"],
                Observed=t["observed"],
                Uncertainty=_share(t.get("uncertainty")),
            )
            for t in (*model["types"], *(model.get("sizes") or []))
        ]
    return out


def _running_pairs(answer: ShowAnswer) -> list[dict[str, object]]:
    """Return layout, frozen layers and the parts of a step, as far as reported."""
    rows: list[dict[str, object]] = []
    running = answer["running"]
    if running and running["layout"]:
        count = running.get("micro_batches")  # a controller of an older release sends none
        stages = {"MicroBatches": count} if count else {}
        # Neither does it send the plan.
        text = running.get("plan") or running["layout"]
        row = {"Layout": text, **stages, "Ordered": answer["ordered_layout"]}
        rows.append(row)
    elif answer["ordered_layout"]:
        rows.append({"Layout": None, "Ordered": answer["ordered_layout"]})
    if answer["ordered_batch"] is not None:
        rows.append({"Batch": answer["global_batch"], "Ordered": answer["ordered_batch"]})
    if running and running["layers"] is not None:
        rows.append(
            {
                "Layers": running["layers"],
                "Frozen": running["frozen"],
                "Penalty": _share(running["penalty"]),
                "Certified": running["certified"],
                "CertifiedPenalty": _share(running["certified_penalty"]),
                "Ordered": answer["ordered_frozen"],
            }
        )
    if running and running["forward_s"] is not None:
        rows.append(
            {
                "Data": _step(running["data_s"]),
                "Forward": _step(running["forward_s"]),
                "Backward": _step(running["backward_s"]),
                "Sync": _step(running["sync_s"]),
                "Optimizer": _step(running["optimizer_s"]),
            }
        )
    length = answer.get("length")  # a controller of an older release sends none
    if length:
        rows.append(
            {
                "PredictedMedian": formatting.duration(length["median_s"]),
                "Predicted90": formatting.duration(length["p90_s"]),
                "Basis": f"{length['basis']}:{length['jobs']}",
            }
        )
    exchange = answer.get("exchange")  # a controller of an older release sends none
    if exchange:
        exposed = exchange["exposed"]
        share = None if exposed is None else f"{exposed:.0%}"
        rows.append({"Exchange": exchange["schedule"], "Exposed": share})
    peak = running["peak_memory_bytes"] if running else None
    if peak is not None or answer["profile_layers"]:
        rows.append(
            {
                "PeakMemory": None if peak is None else formatting.size(peak).replace(" ", ""),
                "ProfiledLayers": answer["profile_layers"],
                "ProfileBatch": answer["profile_batch"],
            }
        )
    return rows


def _status_answer(all_jobs: bool) -> StatusAnswer:
    answer: Any = client.ask("status", all=all_jobs)
    answer["notes"] = [*client.role_notes(), *answer["notes"]]
    return answer  # type: ignore[no-any-return]


def _redraw(all_jobs: bool, layout: TableLayout, seconds: float) -> None:
    """Redraw the newest state in place, until Ctrl-C."""
    from rich.live import Live  # noqa: PLC0415 - slow to import
    from rich.text import Text  # noqa: PLC0415

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                text = "\n".join(lines(_status_answer(all_jobs), layout))
            except CliError as error:
                if error.exit_code != SILENT:
                    raise
                text = f"selastic: {error}"  # it may be restarting
            stamp = time.strftime("%H:%M:%S")
            live.update(Text(f"every {seconds:g} s, {stamp}\n{text}", no_wrap=True), refresh=True)
            time.sleep(seconds)


def _partition(row: PartitionRow) -> str:
    types = ", ".join(f"{count} {kind}" for kind, count in row["types"].items() if kind)
    parts = [
        f"PARTITION {formatting.clean(row['name'])}",
        formatting.gpus(row["gpus"], "") + (f" ({formatting.clean(types)})" if types else ""),
        f"{row['elastic'] + row['rigid']} in use: {row['elastic']} elastic, {row['rigid']} rigid",
        f"{row['idle']} idle",
    ]
    if row.get("asleep"):  # a controller of an older release sends none
        parts.append(f"{row['asleep']} asleep")
    if row["unavailable"]:
        parts.append(f"{row['unavailable']} unavailable")
    if row.get("unmanaged"):
        parts.append(f"{row['unmanaged']} more on nodes with several types or slices")
    if row["waiting"]:
        parts.append(f"{row['waiting']} job{'s' if row['waiting'] > 1 else ''} waiting")
    return "   ".join(parts)


def _running(row: JobRow, text: str) -> str:
    return "" if row["waiting"] is not None else text


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.2g}%"


def _step(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds:.3g}s" if seconds >= 1 else f"{1000 * seconds:.3g}ms"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _limit(seconds: int | None) -> str:
    return "UNLIMITED" if seconds is None else formatting.duration(seconds)
