"""Dispatch of requests to the functions that answer them: from a `View` to JSON objects.

The schema of every answer is documented in docs/cli-json.md and typed in `rpc/answers.py` and its
neighbours. The daemon's `RequestHandler.question` calls `answer`:

    dispatch.answer("explain", view, viewer, args, history=rows)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurm_elastic.controller.queries import job_answers, round_answers, topology_answer
from slurm_elastic.controller.queries.show_answer import show
from slurm_elastic.controller.queries.view import (
    HistoryRow,
    NoAnswerError,
    Particulars,
    SegmentRow,
    TransitionRow,
    View,
    Viewer,
)
from slurm_elastic.controller.state.job_ending import EndedJob

__all__ = [
    "HistoryRow",
    "NoAnswerError",
    "Particulars",
    "SegmentRow",
    "TransitionRow",
    "View",
    "Viewer",
    "answer",
    "find",
]


def find(view: View, name: str) -> tuple[int, ...]:
    """Return the raw ids of the jobs named `4711`, `4711_3`, or by an array's `4711`: all tasks.

    Empty when the snapshot has none.
    """
    ids = view.snapshot.named.get(name)
    if ids:
        return ids
    raw = int(name) if name.isascii() and name.isdigit() else 0
    return (raw,) if raw in view.snapshot.job else ()


def answer(
    op: str,
    view: View,
    viewer: Viewer,
    args: Mapping[str, Any],
    *,
    history: Sequence[HistoryRow] = (),
    segments: Sequence[SegmentRow] = (),
    particulars: Particulars | None = None,
    ended: EndedJob | None = None,
) -> dict[str, Any]:
    """Answer one request of `rpc.requests` (all but `check`).

    Args:
        op: status, show, explain, plan, history, usage or topology.
        view: the controller's view.
        viewer: the caller.
        args: the request's arguments as `requests` passes them on (`job_ids`: tuple of raw ids).
        history: for explain, show and history: rows of the jobs asked for (history without a
            job: the newest rows of all), oldest first.
        particulars: for show: of the requested job.
        ended: for explain and show: the record of the requested job if it has ended.
        segments: for usage: rows that overlap args["start"]..args["end"] (epoch s or absent).

    Raises:
        NoAnswerError: the request has no answer; one line says why.
    """
    if op == "explain":
        return dict(job_answers.explain(view, viewer, _single_job(view, args), history, ended))
    if op == "show":
        job_id, with_layers = _single_job(view, args), bool(args.get("profile"))
        return dict(
            show(
                view,
                viewer,
                job_id,
                history,
                particulars=particulars,
                layers=with_layers,
                ended=ended,
            )
        )
    if op == "status":
        return dict(job_answers.status(view, viewer, everything=bool(args.get("all"))))
    if op == "plan":
        return dict(round_answers.plan(view, viewer, with_program=bool(args.get("program"))))
    if op == "history":
        return dict(round_answers.history(view, viewer, history))
    if op == "topology":
        return dict(topology_answer.topology(view, viewer))
    if op == "usage":
        start, end, user = args.get("start"), args.get("end"), args.get("user")
        return dict(
            round_answers.usage(
                view,
                viewer,
                segments,
                start=start,
                end=end,
                user=user or "",
                runs=bool(args.get("runs")),
            )
        )
    raise NoAnswerError(f"request {op!r} is unknown")


def _single_job(view: View, args: Mapping[str, Any]) -> int:
    ids: tuple[int, ...] = tuple(args.get("job_ids", ()))
    if not ids:
        raise NoAnswerError("which job? give its id")
    if len(ids) > 1:
        named = [view.snapshot.job[i].display_id for i in ids if i in view.snapshot.job]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        raise NoAnswerError(f"an array: name one task, e.g. {', '.join(named[:3])}{more}")
    return ids[0]
