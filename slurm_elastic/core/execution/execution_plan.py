"""Text of an execution plan: a layout, and the options with which its ranks compute.

A plan is a layout (`slurm_elastic.core.layout`) followed by options, each after a `+`:

    tensor=N            N ranks share the weights of every layer
    shard=optimizer     replicas divide the state of the optimizer
    shard=full          replicas divide parameters and gradients, too
    shard=offload       the state of the optimizer is in the memory of the host
    recompute           activations are computed again in the backward pass
    accumulation=N      micro-batches of a replica in a step beyond the first

An `accumulation` that is not named is the job's own choice; other options are off. A layout is a
plan without options. All plans of a job train it equally: the global batch does not belong to a
plan.

>>> plan = ExecutionPlan.parse("4x2+recompute+tensor=2")
>>> plan.replicas, plan.stages, plan.tensor, plan.world
(4, 2, 2, 16)
>>> str(plan)
'4x2+tensor=2+recompute'
>>> ExecutionPlan.parse("4x1+shrad")
Traceback (most recent call last):
    ...
slurm_elastic.core.execution.execution_plan.ExecutionPlanError: plan '4x1+shrad': option 'shrad' \
is invalid: expected tensor=N, shard=optimizer|full|offload, recompute or accumulation=N

Code inside jobs imports this module: standard library only.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.layout import MAX_WORLD, LayoutText, LayoutTextError

#: Longest text.
_MOST_TEXT = 256
#: Most micro-batches beyond the first.
_MOST_ACCUMULATION = 65535
_NUMBER = re.compile("[1-9][0-9]{0,4}", re.ASCII)


class ExecutionPlanError(InvalidInputError):
    """An invalid execution plan; the message is one line with value and remedy."""


class Sharding(enum.Enum):
    """State of the training that replicas divide among them."""

    #: Every replica holds all of it.
    NONE = "none"
    #: State of the optimizer (ZeRO, stages 1 and 2).
    OPTIMIZER = "optimizer"
    #: Parameters and gradients as well (ZeRO stage 3, FSDP).
    FULL = "full"
    #: State of the optimizer, divided, and its step are in the memory of the host.
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A parsed execution plan; `str` gives its canonical text, which parses to an equal plan.

    Attributes:
        layout: replicas, stages and spatial groups; each of its ranks stands for `tensor` GPUs.
        tensor: ranks that share the weights of every layer (tensor parallelism).
        sharding: see `Sharding`.
        recompute: whether activations are computed again in the backward pass.
        accumulation: micro-batches of a replica in a step beyond the first; None: the job's own
            choice.

    Raises:
        ExecutionPlanError: a number is out of range, or two options exclude each other.
    """

    layout: LayoutText
    tensor: int = 1
    sharding: Sharding = Sharding.NONE
    recompute: bool = False
    accumulation: int | None = None

    def __post_init__(self) -> None:
        if self.tensor < 1:
            raise ExecutionPlanError(f"plan: tensor={self.tensor} is invalid: expected at least 1")
        if self.accumulation is not None and not 0 <= self.accumulation <= _MOST_ACCUMULATION:
            raise ExecutionPlanError(
                f"plan: accumulation={self.accumulation} is invalid: expected 0 to"
                f" {_MOST_ACCUMULATION}"
            )
        if self.world > MAX_WORLD:
            raise ExecutionPlanError(
                f"plan {self}: {self.world} ranks is invalid: expected at most {MAX_WORLD}"
            )
        if self.sharding is Sharding.FULL and self.stages > 1:
            raise ExecutionPlanError(
                f"plan {self} is invalid: shard=full gathers whole layers, stages divide them;"
                " leave one of both out"
            )

    @classmethod
    def parse(cls, text: str) -> ExecutionPlan:
        """Parse the text of a plan.

        Raises:
            ExecutionPlanError: it is invalid.
        """
        shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
        head, *options = text.split("+")
        try:
            plan = cls(LayoutText.parse(head))
        except LayoutTextError as error:
            raise ExecutionPlanError(str(error)) from None
        if len(text) > _MOST_TEXT:
            raise ExecutionPlanError(
                f"plan {shown} is invalid: expected at most {_MOST_TEXT} characters"
            )
        named: set[str] = set()
        fields: dict[str, int | bool | Sharding] = {}
        for option in options:
            name, value = _option(option, shown)
            if name in named:
                raise ExecutionPlanError(f"plan {shown}: {name} is given twice; leave one out")
            named.add(name)
            fields[_FIELDS.get(name, name)] = value
        return replace(plan, **fields)  # type: ignore[arg-type]

    def __str__(self) -> str:
        options = [f"+tensor={self.tensor}"] if self.tensor > 1 else []
        if self.sharding is not Sharding.NONE:
            options.append(f"+shard={self.sharding.value}")
        if self.recompute:
            options.append("+recompute")
        if self.accumulation is not None:
            options.append(f"+accumulation={self.accumulation}")
        return str(self.layout) + "".join(options)

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.layout.stages

    @property
    def space(self) -> int:
        """Ranks that share every sample, cut in space."""
        return self.layout.space

    @property
    def replicas(self) -> int:
        """Replicas of the stage that has fewest."""
        return min(self.layout.replicas)

    @property
    def world(self) -> int:
        """GPUs in all."""
        return self.layout.world * self.tensor

    @property
    def plain(self) -> bool:
        """Whether the plan has no options, and is a layout only."""
        return self == ExecutionPlan(self.layout)

    def obstacle_to_training(self) -> str:
        """Return why the training library cannot carry the plan out, or "".

        Such plans are for models and the simulator.
        """
        if self.sharding is Sharding.OFFLOAD:
            return "shard=offload cannot be trained with, only simulated; use shard=full"
        if self.space > 1 and not self.plain:
            return "spatial groups have no options; leave them out"
        return ""


_FIELDS = {"shard": "sharding"}


def _option(text: str, shown: str) -> tuple[str, int | bool | Sharding]:
    """Return name and value of one option."""
    name, given, value = text.partition("=")
    if name == "recompute" and not given:
        return name, True
    if name == "shard" and value in {s.value for s in Sharding} - {Sharding.NONE.value}:
        return name, Sharding(value)
    number = _NUMBER.fullmatch(value)
    if name in {"tensor", "accumulation"} and number:
        return name, int(value)
    if name == "accumulation" and value == "0":
        return name, 0
    raise ExecutionPlanError(
        f"plan {shown}: option {text[:40]!r} is invalid: expected tensor=N,"
        " shard=optimizer|full|offload, recompute or accumulation=N"
    )
