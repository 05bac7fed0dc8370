"""What the machine is, and which versions run on it: `python -m tests.gpu.machine` prints JSON.

A program of its own: a driver that does not answer must not stop the kit.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Variables that change what is measured.
_VARIABLES = ("CUDA_", "HIP_", "ROCR_", "NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "GLOO_")
_PATIENCE_S = 120.0


class NoMachineError(Exception):
    """A machine that could not be asked; the message is one line."""


def ask(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the result of `describe` in a process with these variables.

    Raises:
        NoMachineError: there is no torch, or it does not answer.
    """
    command = [sys.executable, "-m", "tests.gpu.machine"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=dict(environment), capture_output=True, text=True,
            timeout=_PATIENCE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NoMachineError(
            f"torch does not answer within {_PATIENCE_S:.0f} s: see whether the GPU's driver works"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        if "No module named 'torch'" in lines[-1]:
            raise NoMachineError(
                f"no torch in {sys.executable}: name the Python of your trainings,"
                " make test-gpu PYTHON=…/bin/python"
            )
        raise NoMachineError(f"torch cannot be used: {lines[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def describe() -> dict[str, Any]:
    """Return names and versions; None where there is none."""
    import torch  # noqa: PLC0415, I001 - the first that is named if it is missing
    import numpy  # noqa: PLC0415
    from torch.cuda import nccl  # noqa: PLC0415

    from slurm_elastic import __version__  # noqa: PLC0415

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(number) for number in range(count)]
    gpus = [
        {
            "name": one.name,
            "memory_bytes": one.total_memory,
            "capability": f"{one.major}.{one.minor}",
        }
        for one in found
    ]
    has_nccl = count and torch.distributed.is_nccl_available()
    # A build for AMD's GPUs calls them CUDA's.
    return {
        "host": socket.gethostname(),
        "system": _system(),
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "slurm-elastic": __version__,
        "commit": _commit(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "NCCL": ".".join(map(str, nccl.version())) if has_nccl else None,
        "cuDNN": torch.backends.cudnn.version() if count else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        .partition("\n")[0],
        "numpy": numpy.__version__,
        "gpus": gpus,
        "topology": _output("nvidia-smi", "topo", "-m") if count > 1 else "",
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }  # fmt: skip


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Return the tree's commit, with a mark if files were changed; "": no git repository."""
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    return text.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    print(json.dumps(describe()))
