"""The command of an unmodified script, which a batch script may choose anew at each start.

A program that is started again in the same run of its job gets the arguments of that run. A batch
script that names the newest checkpoint in them (`--resume out/step_200`) would then train on from
an old one. So a program may only be started again if the batch script has chosen the same command
after newer checkpoints had been completed.

The command is all arguments, standard input, and those variables that differ between two runs and
name a checkpoint. A variable that is always the same names none, even if its value is also the name
of one (`0` of Orbax's `ckpt/0`).

Where the batch script may have chosen it by the number of GPUs (`size_words`), the command has to
have been the same on two of them, with all variables.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Beginnings of variables that name no checkpoint, and differ between runs: those of Slurm, and
#: numbers of GPUs.
_OTHERS = (
    *("SLURM", "SRUN_", "SBATCH_", "SPANK_", "_SLURM", "_SPANK"),
    *("CUDA_VISIBLE_", "ROCR_VISIBLE_", "HIP_VISIBLE_", "ZE_AFFINITY_", "GPU_DEVICE_ORDINAL"),
)
#: Variables that ranks get from esrun, or that do not change a training.
_REPLACED = frozenset(
    (
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "HOSTNAME", "OMP_NUM_THREADS"),
    )
)
_SEPARATORS = re.compile(r"[\s/=,:;'\"]+")
#: Prefix of the digest of a value that names a checkpoint, and number of hexadecimal digits of
#: digests.
_NAMED, _DIGITS = "*", 16


def program_command(
    program: Sequence[str], pattern: str, environ: Mapping[str, str], stdin: bytes = b""
) -> str:
    """Return a program's arguments and variables, as digests in one line of JSON.

    Args:
        program: with its arguments.
        pattern: glob pattern of the checkpoints.
        environ: of the program.
        stdin: what it reads, such as a here-document.
    """
    words = [*program, _digest(stdin.decode(errors="surrogateescape"))] if stdin else [*program]
    paths = glob.glob(pattern, recursive=True)  # noqa: PTH207 - may be absolute
    checkpoints = {Path(path).name for path in paths}
    variables, replaced = {}, []
    for name, value in sorted(environ.items()):
        if not name.startswith(_OTHERS):
            is_named = not checkpoints.isdisjoint(_SEPARATORS.split(value))
            variables[_digest(name)] = _NAMED * is_named + _digest(value)
            if name in _REPLACED:
                replaced.append(_digest(name))
    body = {"program": _digest(json.dumps(words)), "variables": variables, "replaced": replaced}
    return json.dumps(body)


def repeats_command(command: str, earlier: str) -> bool:
    """Return whether a command names the checkpoints that an earlier one has named.

    Args:
        command: of a run (`program_command`).
        earlier: of the run before.
    """
    try:
        new, old = json.loads(command), json.loads(earlier)
        values, before = dict(new["variables"]), dict(old["variables"])
        if new["program"] != old["program"]:
            return False
    except (ValueError, TypeError, KeyError):
        return bool(command) and command == earlier
    names = (name for name in values | before if values.get(name) != before.get(name))
    return all(_is_same(str(values.get(name, "")), str(before.get(name, ""))) for name in names)


def is_equal_command(command: str, earlier: str) -> bool:
    """Return whether all that a rank gets of two commands is the same.

    Args:
        command: of a run (`program_command`).
        earlier: of a run on another number of GPUs.
    """
    try:
        new, old = json.loads(command), json.loads(earlier)
        values, before = dict(new["variables"]), dict(old["variables"])
        replaced = {*new["replaced"], *old["replaced"]}
        if new["program"] != old["program"]:
            return False
    except (ValueError, TypeError, KeyError):
        return False
    return all(
        str(values.get(name, "")).lstrip(_NAMED) == str(before.get(name, "")).lstrip(_NAMED)
        for name in values | before
        if name not in replaced
    )


def _is_same(value: str, before: str) -> bool:
    """Return whether two digests of a variable are of one value, or of values without a name."""
    if value.lstrip(_NAMED) == before.lstrip(_NAMED):
        return True
    return not value.startswith(_NAMED) and not before.startswith(_NAMED)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]
