"""`esrun` outside Slurm: the same ranks on one machine, for trying things out."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from slurm_elastic.job.launch import free_port
from slurm_elastic.job.slurm_env import master_port
from slurm_elastic.job.srun import without_libuv

_STOP_S = 10.0
_LOOK_S = 0.02


def run(program: Sequence[str], ranks: int) -> int:
    """Run `ranks` processes until all end; the first failure ends the others and is returned."""
    port = free_port(master_port(os.getpid(), 0, 0))
    children = [
        subprocess.Popen(program, env=_environment(os.environ, rank, ranks, port))
        for rank in range(ranks)
    ]

    def forward(number: int, _frame: object) -> None:
        for child in children:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the ranks as well
    try:
        return _wait(children)
    finally:
        _stop(children)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [child.poll() for child in children]
        failed = next((code for code in codes if code), 0)
        if failed:
            return 128 - failed if failed < 0 else failed
        if None not in codes:
            return 0
        if len(children) == 1:
            children[0].wait()
        else:
            time.sleep(_LOOK_S)


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    end = time.monotonic() + _STOP_S
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, end - time.monotonic()))
        if child.poll() is None:
            child.kill()


def _environment(env: Mapping[str, str], rank: int, ranks: int, port: int) -> dict[str, str]:
    gpus = env.get("CUDA_VISIBLE_DEVICES")
    devices = gpus.split(",") if gpus else [str(number) for number in range(ranks)]
    pick = {"CUDA_VISIBLE_DEVICES": devices[rank]} if 1 < ranks <= len(devices) else {}
    return {
        **({"USE_LIBUV": "0"} if without_libuv() else {}),
        **env,
        **pick,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SLURM_ELASTIC_RESTART": "0",
    }
