"""Arguments and directives with which a script can keep its own loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.job import profile_request


class LoopError(InvalidInputError):
    """A use of the loop that cannot be right."""


def check_arguments(global_batch: int, micro_batch: int | None, objects: Mapping[str, Any]) -> None:
    """Check the arguments of `ElasticLoop`.

    Raises:
        LoopError: an invalid one.
    """
    for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise LoopError(f"ElasticLoop: {name}: {value!r} is invalid: expected at least 1")
    if micro_batch and micro_batch > global_batch:
        raise LoopError(
            f"ElasticLoop: micro_batch: {micro_batch} is invalid: expected at most global_batch,"
            f" {global_batch}"
        )
    if not objects:
        raise LoopError(
            "ElasticLoop: no objects is invalid: expected what the training changes, such as"
            " model=model, optimizer=optimizer"
        )
    if profile_request.asked() is not None:
        raise LoopError(
            "ElasticLoop: selastic profile is invalid: expected a script with init, or one that"
            " answers by slurm_elastic.job.profile_request"
        )


def check_directive(directive: Directive | None, global_batch: int) -> str:
    """Check that the directive requests nothing that needs `init`.

    Returns:
        A line for the log, or "".

    Raises:
        LoopError: it does.
    """
    if directive is None:
        return ""
    for name, value, plain in (
        ("parallel", directive.parallel, "data"),
        ("freeze", directive.freeze, "off"),
    ):
        if value != plain:
            raise LoopError(
                f"ElasticLoop: directive: {name}={value} is invalid: expected {name}={plain}, as"
                " the script owns its passes; leave it out, or use slurm_elastic.training.init"
            )
    if directive.batch and not directive.batch[0] <= global_batch <= directive.batch[1]:
        raise LoopError(
            f"ElasticLoop: directive: batch={directive.batch[0]}-{directive.batch[1]} is invalid:"
            f" expected a range with global_batch, {global_batch}, which this loop keeps"
        )
    if directive.batch and directive.batch[0] < directive.batch[1]:
        return f"directive: the batch stays {global_batch}, as only init changes it"
    return ""
