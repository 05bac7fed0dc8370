"""`selastic update`: a new directive, a new layout, or both. Pure.

The layout is checked against the directive that will be in force, so that one command can
change both; a command that is invalid in part is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_elastic.controller.server.request_dispatcher import RequestRefusedError
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.directive import Directive, DirectiveError
from slurm_elastic.core.execution.execution_plan import ExecutionPlan, ExecutionPlanError
from slurm_elastic.core.execution.possible_plans import misfit

#: Word for the job's own choice of a layout.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class DirectiveUpdate:
    """Directive and layout that were ordered for a job.

    Attributes:
        override: text of the directive that replaces the submitted one; "": none.
        layout: text of the layout or execution plan to run in; "": the job's own choice.
    """

    override: str = ""
    layout: str = ""


def updated(job: Job, layout: str, args: Mapping[str, Any]) -> tuple[DirectiveUpdate, str]:
    """Return the orders of a job after a command, and the command's effect as text.

    Args:
        job: elastic, with its present override.
        layout: its present layout as ordered; "": none.
        args: `elastic` (text of a directive) or `layout` (text of a layout or execution plan, or
            `AUTO`), or both.

    Raises:
        RequestRefusedError: in one line why not; nothing of the command is to be done.
    """
    elastic, layout_text = args.get("elastic"), args.get("layout")
    if elastic is None and layout_text is None:
        raise RequestRefusedError("update: nothing to change: give elastic or layout")
    try:
        replacement = Directive.parse(elastic) if elastic is not None else None
    except DirectiveError as error:
        raise RequestRefusedError(str(error)) from None
    directive = replacement or job.directive
    if directive is None:
        raise RequestRefusedError("not an elastic job")
    override = str(replacement or job.override or "")
    effects = [f"--elastic={replacement}"] if replacement else []
    if layout_text is not None:
        new_layout = _layout(layout_text)
        if new_layout and (problem := _obstacle(new_layout, directive)):
            raise RequestRefusedError(problem)
        layout = str(new_layout) if new_layout else ""
        effects.append(_layout_words(new_layout, job))
    elif layout and misfit(ExecutionPlan.parse(layout), directive):
        effects.append(f"layout {layout} is no longer possible: the job's own choice")
        layout = ""
    return DirectiveUpdate(override, layout), "; ".join(effects)


def _obstacle(plan: ExecutionPlan, directive: Directive) -> str:
    """Return why a plan cannot be ordered, or ""."""
    if obstacle := plan.obstacle_to_training():
        return f"plan {plan}: {obstacle}"
    return misfit(plan, directive)


def _layout(text: str) -> ExecutionPlan | None:
    try:
        return None if text == AUTO else ExecutionPlan.parse(text)
    except ExecutionPlanError as error:
        raise RequestRefusedError(f"{error}, or auto") from None


def _layout_words(layout: ExecutionPlan | None, job: Job) -> str:
    if layout is None:
        return "layout auto: the job's own choice"
    held = job.allocation.gpus if job.allocation else 0
    later = f" as soon as it has {layout.world} GPUs" if held != layout.world else ""
    return f"layout {layout}{later}"
