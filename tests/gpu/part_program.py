"""What the programs of the parts have in common.

A part is one module. Without `--rank` it runs the part; with it, it is one of the ranks that the
part starts under `esrun --local`, and gets its options as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support.rank_processes import run_ranks, shared_gpus
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job.rank_socket import SOCKET_VARIABLE, socket_address
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter

#: Exit code of ranks that SIGTERM has ended (`slurm_elastic.training.signals.STOPPED`).
STOPPED = 143


def part_main(
    run: Callable[[KitSetting, RowWriter], None], rank: Callable[[dict[str, Any]], None]
) -> None:
    """Run a part, or one of its ranks, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rank", type=json.loads)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank)
        return
    # A shell starts what it runs in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = RowWriter(args.rows, checks_times=args.device == "cuda" and not shared_gpus())
    run(KitSetting(args.device, args.ranks, args.folder), rows)


def start_ranks(ranks: int, part: str, options: dict[str, Any], *, code: int = 0) -> None:
    """Run ranks of a part to their end.

    Args:
        ranks: number of them.
        part: its name.
        options: of the ranks.
        code: exit code that is expected.

    Raises:
        SystemExit: another exit code; with the output of all ranks.
    """
    arguments = ["--rank", json.dumps(options)]
    run_ranks(ranks, f"tests.gpu.parts.{part}", arguments, expected=code)


def serve_orders(**orders: Any) -> list[dict[str, Any]]:
    """Take the place of esrun's socket in rank 0, so that it gets orders.

    To be called before `init`.

    Returns:
        The fields of each report; grows as they come. Stays empty on other ranks.
    """
    reports: list[dict[str, Any]] = []
    if os.environ.get("RANK", "0") != "0":
        return reports
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = f"@gpu-kit-{os.getpid()}-{os.urandom(6).hex()}"
    listener.bind(socket_address(address))
    listener.listen()
    state = ReportState(Report(job_id=0, run=0, phase="starting"))
    state.receive(Orders(seq=1, report_every_s=0.0, **orders), authoritative=True)
    RankSocketServer(state, listener, on_report=lambda fields: reports.append({**fields})).start()
    os.environ[SOCKET_VARIABLE] = address
    return reports


def no_sharding(ranks: int) -> str:
    """Return why parameters cannot be sharded here (FSDP2), or ""."""
    if ranks < 2:
        return "needs 2 GPUs"
    from slurm_elastic.training.parallel.fsdp import unsupported  # noqa: PLC0415

    return unsupported()


def rank_device() -> Any:
    """Return the torch.device of this rank: its GPU, or the CPU."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def synchronize(device: Any) -> None:
    """Wait until a GPU has finished; a CPU always has."""
    if device.type == "cuda":
        import torch  # noqa: PLC0415

        torch.cuda.synchronize(device)


def wait_until(condition: Callable[[], Any], what: str, *, within_s: float) -> Any:
    """Return the first true value of a condition.

    Raises:
        TimeoutError: there was none within that time.
    """
    end = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {within_s:.0f} s")
        time.sleep(0.02)
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file, but one that is being written; none: no such file."""
    if not path.exists():
        return []
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]
