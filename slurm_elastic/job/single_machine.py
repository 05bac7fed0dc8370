"""`esrun` outside Slurm: the same ranks on one machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from slurm_elastic.core.report import Report
from slurm_elastic.job.environment.world_variables import inexact_line, world_variables
from slurm_elastic.job.in_place_restart import InPlaceRestart
from slurm_elastic.job.launch import free_port, log_line
from slurm_elastic.job.launchers.accumulation_option import own_accumulation, with_accumulation
from slurm_elastic.job.launchers.adaptation import WorldShape, adapt, expand
from slurm_elastic.job.rank_socket import RESTART_CODE, SOCKET_VARIABLE, socket_address
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.signals.signal_scripts import SIGNAL_SCRIPT
from slurm_elastic.job.slurm_env import STEP_VARIABLE, master_port
from slurm_elastic.job.srun import (
    WITHOUT_LIBUV,
    may_contain_launcher,
    torch_environment,
    without_libuv,
)

_STOP_S = 10.0
_POLL_S = 0.02
#: Seconds for a signal to be sent to all ranks.
_SIGNAL_S = 5.0
_FORWARDED = frozenset(
    (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
)


def run(
    program: Sequence[str], ranks: int, *, gpus: str = "all", micro_batches: int | None = None
) -> int:
    """Run `ranks` processes to their end; return 0, or the exit code of the first that failed.

    The first failure ends the others. A program that exits with `RESTART_CODE` is started again,
    as in a job. Signals go to the programs of the ranks, also where a rank is a shell.

    Args:
        program: command that each rank runs.
        ranks: number of processes.
        gpus: "all" visible GPUs are visible to each rank, or "one".
        micro_batches: of one optimizer step over all ranks, for `world_variables`.
    """
    own_line = own_accumulation(program, micro_batches)
    program, line = with_accumulation(program, micro_batches, ranks)
    for text in filter(None, (line, own_line)):
        log_line(text)
    program, is_launcher = _adapted(program, ranks)
    state = ReportState(Report(job_id=0, run=0, phase="starting", gpus=ranks))
    listener = _listener()
    server = RankSocketServer(state, listener)
    server.start()
    in_place = InPlaceRestart(state, server)
    socket_path = f"@{listener.getsockname()[1:].decode()}"
    mark = step_mark(os.getpid())
    children: list[subprocess.Popen[bytes]] = []
    ended = False

    def forward(number: int, _frame: object) -> None:
        nonlocal ended
        if number == signal.SIGINT and sys.stdin.isatty():
            return  # the terminal has sent it to the ranks too
        ended = ended or number in (signal.SIGTERM, signal.SIGINT)
        _send(signal.Signals(number), mark, children)

    for number in _FORWARDED:
        signal.signal(number, forward)
    if micro_batches and (line := inexact_line(micro_batches, ranks)):
        log_line(line)
    attempt = 0
    while True:
        port = free_port(master_port(os.getpid(), 0, attempt))
        try:
            for rank in range(1 if is_launcher else ranks):
                if ended:
                    break
                env = _environment(os.environ, rank, ranks, port=port, restarts=attempt)
                env |= {SOCKET_VARIABLE: socket_path, STEP_VARIABLE: mark}
                env |= world_variables(
                    {}, world=ranks, micro_batches=micro_batches, for_accelerate=not own_line
                )
                if gpus == "one" and ranks > 1:
                    env |= _own_device(os.environ, rank, ranks)
                command = _for_launcher(env, program, ranks) if is_launcher else program
                children.append(subprocess.Popen(command, env=env))
            code = _wait(children) if children else 128 + signal.SIGTERM
        finally:
            _stop(children, mark, signalled=ended)
        if ended or not in_place.should_restart(code):
            return code
        children.clear()
        attempt += 1


def step_mark(pid: int) -> str:
    """Return `SLURM_ELASTIC_STEP` of the ranks that an esrun with this process id starts here."""
    return f"local-{pid}"


def _adapted(program: Sequence[str], ranks: int) -> tuple[Sequence[str], bool]:
    """Return the command line to run, and whether it is a launcher that starts the ranks."""
    if ranks > 1 and may_contain_launcher(program):
        adapted = adapt(program, WorldShape(1, ranks, without_libuv=without_libuv()))
        if adapted is not None:
            return adapted.program, adapted.per_node
    return program, False


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


def _stop(children: Sequence[subprocess.Popen[bytes]], mark: str, *, signalled: bool) -> None:
    """End the ranks that still run: SIGTERM unless they have it already, SIGKILL after a while."""
    if None in [child.poll() for child in children]:
        if not signalled:
            _send(signal.SIGTERM, mark, children)
        _wait_for_all(children)
    if None in [child.poll() for child in children]:
        _send(signal.SIGKILL, mark, children)
    for child in children:
        child.wait()


def _send(number: signal.Signals, mark: str, children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send a signal to the programs of all ranks, also below shells; SIGKILL to all processes."""
    name = number.name.removeprefix("SIG")
    command = ["sh", "-c", SIGNAL_SCRIPT, "esrun", name, mark, str(os.getpid())]
    try:
        code = subprocess.run(
            command,
            check=False,
            timeout=_SIGNAL_S,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        code = 1
    if code:  # no /proc, for instance
        for child in children:
            child.send_signal(number)


def _environment(
    env: Mapping[str, str], rank: int, ranks: int, *, port: int, restarts: int
) -> dict[str, str]:
    return {
        **(WITHOUT_LIBUV if without_libuv() else {}),
        **({"OMP_NUM_THREADS": "1"} if ranks > 1 else {}),  # as torchrun
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **env,
        **torch_environment(f"local-{os.getpid()}", nodes=1, restarts=restarts),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SLURM_ELASTIC_RESTART": "0",
    }


def _for_launcher(env: dict[str, str], program: Sequence[str], ranks: int) -> list[str]:
    """Remove the rank from the environment of a launcher; return its command line."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        del env[name]
    shape = {"ESRUN_LOCAL_RANKS": ranks, "ESRUN_NUM_PROCESSES": ranks, "ESRUN_NODE_RANK": 0}
    env.setdefault("SLURM_ELASTIC_RUN_ID", env["TORCHELASTIC_RUN_ID"])
    env |= {name: str(value) for name, value in shape.items()}
    return expand(program, env)


def _own_device(env: Mapping[str, str], rank: int, ranks: int) -> dict[str, str]:
    listed = env.get("CUDA_VISIBLE_DEVICES")
    devices = listed.split(",") if listed else [str(number) for number in range(ranks)]
    return {"CUDA_VISIBLE_DEVICES": devices[rank]} if ranks <= len(devices) else {}
