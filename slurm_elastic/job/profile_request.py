"""Request of `selastic profile` to a run, in the environment of its ranks, and the run's answer.

The training library answers by itself. Any other script can, with or without this module, which
needs the standard library only:

    from slurm_elastic.job import profile_request

    request = profile_request.asked()
    if request:
        ...  # request.warm_up + request.steps steps, on repeated data if request.synthetic
        profile_request.answer(steps=request.steps, seconds=measured, batch=per_gpu)   # on rank 0

>>> request = asked({"SLURM_ELASTIC_PROFILE": "/run/a.json", "SLURM_ELASTIC_PROFILE_STEPS": "30",
...                "SLURM_ELASTIC_PROFILE_BLOCKS": "synthetic,warm"})
>>> request.steps, request.synthetic, request.blocks
(30, True, ('synthetic', 'warm'))
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BLOCKS", "COLD", "SYNTHETIC", "WARM", "ProfileRequest", "answer", "asked"]

#: Source of a block's data: the first batch, repeated; storage, with an empty page cache; memory,
#: as the same samples have just been read.
SYNTHETIC, COLD, WARM = "synthetic", "cold", "warm"
BLOCKS = (SYNTHETIC, COLD, WARM)

_PREFIX = "SLURM_ELASTIC_PROFILE"
#: Line that a script can print instead of writing the file; times are decimal seconds.
_LINE = re.compile(
    r"^selastic-profile: steps=(?P<steps>\d+) seconds=(?P<seconds>\d+(?:\.\d+)?)"
    r"(?: batch=(?P<batch>\d+))?\s*$",
    re.ASCII | re.MULTILINE,
)
#: Limit for one block.
_MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """A profiling run, as requested.

    Attributes:
        result: file for the answer.
        blocks: of `BLOCKS`, in this order; a run may omit all but the first.
        steps: number of timed steps in each block.
        warm_up: number of steps before them, in each block, that are not timed.
        batch: samples per GPU and step; None: the script's own on `gpus` GPUs.
        gpus: of the largest configuration that is measured; 0: unknown.
        data: files and directories to be removed from the page cache before cold blocks.
    """

    result: Path
    blocks: tuple[str, ...]
    steps: int = 20
    warm_up: int = 5
    batch: int | None = None
    gpus: int = 0
    data: tuple[str, ...] = ()

    @property
    def synthetic(self) -> bool:
        """Whether the first block repeats one batch."""
        return self.blocks[:1] == (SYNTHETIC,)

    def environment(self) -> dict[str, str]:
        """Return the variables that `asked` reads."""
        return {
            _PREFIX: str(self.result),
            f"{_PREFIX}_BLOCKS": ",".join(self.blocks),
            f"{_PREFIX}_STEPS": str(self.steps),
            f"{_PREFIX}_WARM_UP": str(self.warm_up),
            f"{_PREFIX}_BATCH": "" if self.batch is None else str(self.batch),
            f"{_PREFIX}_GPUS": str(self.gpus),
            f"{_PREFIX}_DATA": json.dumps(self.data),
        }


def asked(environment: Mapping[str, str] | None = None) -> ProfileRequest | None:
    """Return the request to this process; None if it is not profiled.

    Args:
        environment: the process's by default.

    Raises:
        ValueError: the variables are invalid.
    """
    env = os.environ if environment is None else environment
    result = env.get(_PREFIX, "")
    if not result:
        return None
    blocks = tuple(filter(None, env.get(f"{_PREFIX}_BLOCKS", WARM).split(",")))
    if not blocks or set(blocks) - set(BLOCKS):
        raise ValueError(f"{_PREFIX}_BLOCKS: expected some of {', '.join(BLOCKS)}")
    batch = env.get(f"{_PREFIX}_BATCH", "")
    return ProfileRequest(
        result=Path(result),
        blocks=blocks,
        steps=int(env.get(f"{_PREFIX}_STEPS") or 20),
        warm_up=int(env.get(f"{_PREFIX}_WARM_UP") or 0),
        batch=int(batch) if batch else None,
        gpus=int(env.get(f"{_PREFIX}_GPUS") or 0),
        data=tuple(json.loads(env.get(f"{_PREFIX}_DATA") or "[]")),
    )


def answer(
    *, steps: int, seconds: float, batch: int | None = None, to: ProfileRequest | None = None
) -> None:
    """Write the time of the first block's steps; for scripts, on rank 0, once.

    Args:
        steps: number of timed steps, at least 1.
        seconds: total time of these steps.
        batch: samples per GPU and step.
        to: the request; by default that of the environment.
    """
    to = to or asked()
    if to is not None:
        block = {"block": to.blocks[0], "seconds": [seconds / steps] * steps}
        write(to.result, [block | {"ended": time.time()}], {"batch": batch})


def write(path: Path, blocks: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write an answer atomically.

    Args:
        path: of the file.
        blocks: name, seconds of each step, and, where known, the time (epoch s) after the last
            one: {"block": …, "seconds": […], "ended": …}.
        facts: about the training, by name, for the profile.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"blocks": list(blocks), "facts": dict(facts)}), encoding="utf-8")
    partial.replace(path)


def printed(output: str, block: str) -> dict[str, Any] | None:
    """Return the answer in a program's output, in the form of the file; None without one.

    >>> printed("selastic-profile: steps=2 seconds=0.5 batch=8", "warm")["blocks"]
    [{'block': 'warm', 'seconds': [0.25, 0.25]}]
    """
    *_, line = (None, *_LINE.finditer(output))
    if line is None or not 0 < (steps := int(line["steps"])) <= _MAX_STEPS:
        return None
    step_s = float(line["seconds"]) / steps
    return {
        "blocks": [{"block": block, "seconds": [step_s] * steps}],
        "facts": {"batch": int(line["batch"])} if line["batch"] else {},
    }
