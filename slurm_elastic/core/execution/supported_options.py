"""Text of the execution plans that a training can carry out, as its library reports them.

Words, separated by commas, each of which allows a part of a plan
(`slurm_elastic.core.execution.execution_plan`):

    stages=N     the model can be cut into up to N pipeline stages
    tensor       layers can be divided among ranks (tensor=2, 4 or 8)
    shard        replicas can divide parameters (shard=full)
    mesh         both at once (tensor=2+shard=full): older libraries can do each, but not both
    slices       replicas whose ranks share layers can divide the state of the optimizer
                 (tensor=2+shard=optimizer)
    sliced-stages replicas of a pipeline stage can divide the state of the optimizer
                 (2x2+shard=optimizer)
    recompute    the script asks for recomputation: each plan with options has to name it
    recomputable layers can run again in the backward pass, where a plan asks for it
    own-shard=S  the script's own choice divides state among replicas: S is full or optimizer
    own-tensor=N the script's own choice shares layers among N ranks

A word that is missing is not possible. Unknown words are ignored: a newer library may send more.

>>> options = SupportedOptions.parse("recompute,tensor,stages=6,later=3")
>>> options.stages, options.tensor, options.shard, options.recompute
(6, True, False, True)
>>> str(options)
'stages=6,tensor,recompute'
>>> SupportedOptions.parse("")
SupportedOptions(stages=1, tensor=False, shard=False, mesh=False, slices=False, \
sliced_stages=False, recompute=False, recomputable=False, \
own_sharding=<Sharding.NONE: 'none'>, own_tensor=1)
>>> SupportedOptions.parse("stages=1")
Traceback (most recent call last):
    ...
slurm_elastic.core.execution.supported_options.SupportedOptionsError: supported options \
'stages=1': 'stages=1' is invalid: expected stages=N with N from 2 to 4096

Code inside jobs imports this module: standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.execution.execution_plan import Sharding
from slurm_elastic.core.layout import MAX_WORLD

#: Ranks that may share the weights of layers, all of which `tensor` stands for (our choice).
TENSOR_DEGREES = (2, 4, 8)
#: Most stages of a text.
MAX_STAGES = 4096
#: Longest text.
_MOST_TEXT = 128
_WORD = re.compile("(?P<name>[a-z][a-z0-9_-]*)(=(?P<value>[A-Za-z0-9._-]+))?", re.ASCII)
_COUNT = re.compile("[1-9][0-9]{0,4}", re.ASCII)
#: Words without a value, in the order of the canonical text.
_FLAGS = ("tensor", "shard", "mesh", "slices", "sliced-stages", "recompute", "recomputable")
#: Fields of words that have another name.
_FIELDS = {
    "sliced-stages": "sliced_stages", "own-shard": "own_sharding", "own-tensor": "own_tensor",
}  # fmt: skip
#: Values of `own-shard`.
_OWN_SHARDINGS = {s.value: s for s in (Sharding.OPTIMIZER, Sharding.FULL)}


class SupportedOptionsError(InvalidInputError):
    """An invalid text of supported options; the message is one line with value and remedy."""


@dataclass(frozen=True, slots=True)
class SupportedOptions:
    """Parts of execution plans that a training can carry out; `str` gives the canonical text.

    Attributes:
        stages: most pipeline stages that the model can be cut into; 1: it cannot be cut.
        tensor: whether layers can be divided among 2, 4 or 8 ranks.
        shard: whether replicas can divide parameters.
        mesh: whether replicas whose ranks share layers can do so, too.
        slices: whether such replicas can divide the state of the optimizer.
        sliced_stages: whether replicas of a pipeline stage can divide the state of the optimizer.
        recompute: whether the script itself asks for recomputation, which each plan has to keep.
        recomputable: whether layers can run again in the backward pass.
        own_sharding: what replicas divide by the script's own choice.
        own_tensor: ranks that share layers by the script's own choice.

    Raises:
        SupportedOptionsError: the number of stages is out of range.
    """

    stages: int = 1
    tensor: bool = False
    shard: bool = False
    mesh: bool = False
    slices: bool = False
    sliced_stages: bool = False
    recompute: bool = False
    recomputable: bool = False
    own_sharding: Sharding = Sharding.NONE
    own_tensor: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= MAX_STAGES:
            raise SupportedOptionsError(
                f"supported options: {self.stages} stages is invalid: expected 1 to {MAX_STAGES}"
            )

    @classmethod
    def parse(cls, text: str) -> SupportedOptions:
        """Parse a text; "" is a training that can carry out plans of whole replicas only.

        Raises:
            SupportedOptionsError: it is invalid.
        """
        shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
        if len(text) > _MOST_TEXT:
            raise SupportedOptionsError(
                f"supported options {shown}: the text is invalid: expected at most {_MOST_TEXT}"
                " characters"
            )
        fields: dict[str, Any] = {}
        for word in text.split(",") if text else ():
            match = _WORD.fullmatch(word)
            if match is None:
                raise SupportedOptionsError(
                    f"supported options {shown}: {word[:40]!r} is invalid: expected words such as"
                    " stages=4,tensor,shard,recompute"
                )
            name, value = match["name"], match["value"]
            if name in fields:
                raise SupportedOptionsError(
                    f"supported options {shown}: {name} is given twice; leave one out"
                )
            if name == "stages":
                fields[name] = _count(value or "", word, shown, most=MAX_STAGES)
            elif name == "own-tensor":
                fields[name] = _count(value or "", word, shown, most=MAX_WORLD)
            elif name == "own-shard":
                fields[name] = _own_sharding(value or "", word, shown)
            elif name in _FLAGS:
                if value is not None:
                    raise SupportedOptionsError(
                        f"supported options {shown}: {word[:40]!r} is invalid: expected {name}"
                        " without a value"
                    )
                fields[name] = True
        return cls(**{_FIELDS.get(name, name): value for name, value in fields.items()})

    def __str__(self) -> str:
        words = [f"stages={self.stages}"] if self.stages > 1 else []
        words += [name for name in _FLAGS if getattr(self, _FIELDS.get(name, name))]
        if self.own_sharding is not Sharding.NONE:
            words.append(f"own-shard={self.own_sharding.value}")
        if self.own_tensor > 1:
            words.append(f"own-tensor={self.own_tensor}")
        return ",".join(words)


def _count(value: str, word: str, shown: str, *, most: int) -> int:
    number = int(value) if _COUNT.fullmatch(value) else 0
    if not 2 <= number <= most:
        name = word.partition("=")[0]
        raise SupportedOptionsError(
            f"supported options {shown}: {word[:40]!r} is invalid: expected {name}=N with N from 2"
            f" to {most}"
        )
    return number


def _own_sharding(value: str, word: str, shown: str) -> Sharding:
    if value not in _OWN_SHARDINGS:
        raise SupportedOptionsError(
            f"supported options {shown}: {word[:40]!r} is invalid: expected own-shard=full or"
            " own-shard=optimizer"
        )
    return _OWN_SHARDINGS[value]
