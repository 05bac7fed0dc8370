"""What `selastic profile` asks of a run, in the environment of its ranks, and how a run answers.

The training library heeds this by itself. Any other script may, with or without this module; it
needs nothing but the standard library:

    from slurm_elastic.job import profile_request

    asked = profile_request.asked()
    if asked:
        ...  # asked.warm_up + asked.steps steps, on repeated data if asked.synthetic
        profile_request.answer(steps=asked.steps, seconds=measured, batch=per_gpu)   # on rank 0

>>> found = asked({"SLURM_ELASTIC_PROFILE": "/run/a.json", "SLURM_ELASTIC_PROFILE_STEPS": "30",
...                "SLURM_ELASTIC_PROFILE_BLOCKS": "synthetic,warm"})
>>> found.steps, found.synthetic, found.blocks
(30, True, ('synthetic', 'warm'))
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BLOCKS", "COLD", "SYNTHETIC", "WARM", "ProfileRequest", "answer", "asked"]

#: Where the data of a block come from: the first batch over and over; storage, nothing of it in
#: the page cache; memory, as the same samples have been read just before.
SYNTHETIC, COLD, WARM = "synthetic", "cold", "warm"
BLOCKS = (SYNTHETIC, COLD, WARM)

_PREFIX = "SLURM_ELASTIC_PROFILE"
#: What a script may print instead of writing the file; times are decimal seconds.
_LINE = re.compile(
    r"^selastic-profile: steps=(?P<steps>\d+) seconds=(?P<seconds>\d+(?:\.\d+)?)"
    r"(?: batch=(?P<batch>\d+))?\s*$",
    re.ASCII | re.MULTILINE,
)
#: Of one block.
_MOST_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What is to be run.

    Attributes:
        result: file for the answer.
        blocks: of `BLOCKS`, in this order; a run may leave out all but the first.
        steps: to be timed in each block.
        warm_up: steps before them, in each block, that are not timed.
        batch: samples per GPU and step; None: what the script would take on `gpus` GPUs.
        gpus: of the largest configuration that is measured; 0: not known.
        data: files and directories that the cold blocks are to find out of the page cache.
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
        """The variables that `asked` reads."""
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
    """What is asked of this process; None: it is not profiled.

    Args:
        environment: the process's by default.

    Raises:
        ValueError: the variables are damaged.
    """
    env = os.environ if environment is None else environment
    result = env.get(_PREFIX, "")
    if not result:
        return None
    blocks = tuple(filter(None, env.get(f"{_PREFIX}_BLOCKS", WARM).split(",")))
    if not blocks or set(blocks) - set(BLOCKS):
        raise ValueError(f"{_PREFIX}_BLOCKS: some of {', '.join(BLOCKS)} are needed")
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
    """Say how long the first block's steps took; for scripts, on rank 0, once.

    Args:
        steps: that were timed, at least 1.
        seconds: of all of them.
        batch: samples per GPU and step.
        to: what was asked; None: the environment says it.
    """
    to = to or asked()
    if to is not None:
        one = {"block": to.blocks[0], "seconds": [seconds / steps] * steps}
        write(to.result, [one], {"batch": batch})


def write(path: Path, blocks: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write an answer; it is whole or not there.

    Args:
        path: of the file.
        blocks: name and seconds of each step: {"block": …, "seconds": […]}.
        facts: of the training, by name, for the profile.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"blocks": list(blocks), "facts": dict(facts)}), encoding="utf-8")
    partial.replace(path)


def printed(output: str, block: str) -> dict[str, Any] | None:
    """The answer in a program's output, as in a file; None: there is no such line.

    >>> printed("selastic-profile: steps=2 seconds=0.5 batch=8", "warm")["blocks"]
    [{'block': 'warm', 'seconds': [0.25, 0.25]}]
    """
    *_, found = (None, *_LINE.finditer(output))
    if found is None or not 0 < (steps := int(found["steps"])) <= _MOST_STEPS:
        return None
    each = float(found["seconds"]) / steps
    return {
        "blocks": [{"block": block, "seconds": [each] * steps}],
        "facts": {"batch": int(found["batch"])} if found["batch"] else {},
    }
