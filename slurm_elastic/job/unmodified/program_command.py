"""The command of an unmodified script, which a batch script may choose anew at each start.

A program that is started again in the same run of its job gets the arguments of that run. A batch
script that names the newest checkpoint in them (`--resume out/step_200`) would then train on from
an old one. So a program may only be started again if the batch script has chosen the same command
after newer checkpoints had been completed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Beginnings of variables that name no checkpoint: those of Slurm, and numbers of GPUs and threads,
#: which a checkpoint may have for a name, too (`ckpt/0`).
_OTHERS = (
    *("SLURM", "SRUN_", "SBATCH_", "SPANK_", "_SLURM", "_SPANK"),
    *("CUDA_", "ROCR_", "HIP_", "ZE_", "GPU_DEVICE_ORDINAL", "OMP_", "MKL_", "USE_LIBUV", "SHLVL"),
)
_SEPARATORS = re.compile(r"[\s/=,:;'\"]+")


def command_digest(program: Sequence[str], pattern: str, environ: Mapping[str, str]) -> str:
    """Return a digest of a program's arguments and of the variables that name a checkpoint.

    Args:
        program: with its arguments.
        pattern: glob pattern of the checkpoints.
        environ: of the program.
    """
    paths = glob.glob(pattern, recursive=True)  # noqa: PTH207 - may be absolute
    checkpoints = {Path(path).name for path in paths}
    named = [
        (name, value)
        for name, value in environ.items()
        if not name.startswith(_OTHERS) and checkpoints & set(_SEPARATORS.split(value))
    ]
    text = json.dumps([list(program), sorted(named)])
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
