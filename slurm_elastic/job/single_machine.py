"""`esrun` outside Slurm: the same ranks on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from slurm_elastic.core.report import Report
from slurm_elastic.job.in_place_restart import InPlaceRestart
from slurm_elastic.job.launch import free_port
from slurm_elastic.job.rank_socket import RESTART_CODE, SOCKET_VARIABLE, socket_address
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.slurm_env import master_port
from slurm_elastic.job.srun import without_libuv

_STOP_S = 10.0
_POLL_S = 0.02


def run(program: Sequence[str], ranks: int) -> int:
    """Run `ranks` processes to their end; return 0, or the exit code of the first that failed.

    The first failure ends the others. A program that exits with `RESTART_CODE` is started again,
    as in a job.
    """
    state = ReportState(Report(job_id=0, run=0, phase="starting", gpus=ranks))
    listener = _listener()
    server = RankSocketServer(state, listener)
    server.start()
    in_place = InPlaceRestart(state, server)
    socket_path = f"@{listener.getsockname()[1:].decode()}"
    children: list[subprocess.Popen[bytes]] = []
    ended = False

    def forward(number: int, _frame: object) -> None:
        nonlocal ended
        ended = ended or number == signal.SIGTERM
        for child in children:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the ranks too
    attempt = 0
    while True:
        port = free_port(master_port(os.getpid(), 0, attempt))
        try:
            for rank in range(ranks):
                env = _environment(os.environ, rank, ranks, port=port, socket_path=socket_path)
                children.append(subprocess.Popen(program, env=env))
            code = _wait(children)
        finally:
            _stop(children)
        if ended or not in_place.should_restart(code):
            return code
        children.clear()
        attempt += 1


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_address(f"@slurm-elastic-{os.getpid()}-{os.urandom(6).hex()}"))
    listener.listen(16)
    return listener


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [child.poll() for child in children]
        failed = next((code for code in codes if code), 0)
        if failed == RESTART_CODE:
            _wait_for_all(children)
        if failed:
            return 128 - failed if failed < 0 else failed
        if None not in codes:
            return 0
        if len(children) == 1:
            children[0].wait()
        else:
            time.sleep(_POLL_S)


def _wait_for_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all ranks to end by themselves: each may need the others until then."""
    end = time.monotonic() + _STOP_S
    while None in [child.poll() for child in children] and time.monotonic() < end:
        time.sleep(_POLL_S)


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


def _environment(
    env: Mapping[str, str], rank: int, ranks: int, *, port: int, socket_path: str
) -> dict[str, str]:
    gpus = env.get("CUDA_VISIBLE_DEVICES")
    devices = gpus.split(",") if gpus else [str(number) for number in range(ranks)]
    own_device = {"CUDA_VISIBLE_DEVICES": devices[rank]} if 1 < ranks <= len(devices) else {}
    return {
        **({"USE_LIBUV": "0"} if without_libuv() else {}),
        **env,
        **own_device,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SLURM_ELASTIC_RESTART": "0",
        SOCKET_VARIABLE: socket_path,
    }
