"""Worlds of forked ranks, with the environment that esrun gives them.

The test process imports the frameworks once; a launcher would import them anew in each rank of
each attempt, which takes most of the time of such a test. The test process itself never computes.
"""

import contextlib
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job.environment.world_variables import world_variables
from slurm_elastic.job.launch import free_port
from slurm_elastic.job.rank_socket import SOCKET_VARIABLE, socket_address
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState

TIMEOUT_S = 240.0


class FakeEsrun:
    """esrun's end of the rank socket: keeps reports, gives orders."""

    def __init__(self) -> None:
        self.path = f"@slurm-elastic-test-{os.urandom(6).hex()}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(socket_address(self.path))
        self._listener.listen()
        self.state = ReportState(Report(job_id=7, run=0, phase="training", kind="script"))
        self.reports: list[dict] = []
        self._seq = 0
        RankSocketServer(self.state, self._listener, on_report=self.reports.append).start()

    def order(self, action: str, notice: int | None = None) -> None:
        self._seq += 1
        orders = Orders(seq=self._seq, action=action, notice=notice, report_every_s=0.0)
        self.state.receive(orders, authoritative=True)

    def wait_for(self, field: str, least: int) -> None:
        """Wait until the newest value of a field is at least this."""
        end = time.monotonic() + TIMEOUT_S
        while max((r[field] for r in self.reports if field in r), default=-1) < least:
            assert time.monotonic() < end, f"no {field} of {least} in {self.reports[-3:]}"
            time.sleep(0.01)


class World:
    """Forked ranks that run one attempt of a training."""

    def __init__(
        self,
        program: Callable[[], object],
        *,
        ranks: int,
        start: int | None = None,
        micro_batches: int | None = None,
        esrun: FakeEsrun | None = None,
        log: Path | None = None,
    ) -> None:
        port = free_port(20000 + int.from_bytes(os.urandom(2), "big") % 12000)
        shared = world_variables({}, world=ranks, start_world=start, micro_batches=micro_batches)
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
        shared |= {"OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {SOCKET_VARIABLE: esrun.path} if esrun else {}
        sys.stdout.flush()
        sys.stderr.flush()
        self.pids = [self._fork(program, shared, rank, log) for rank in range(ranks)]

    @staticmethod
    def _fork(
        program: Callable[[], object], shared: dict[str, str], rank: int, log: Path | None
    ) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setpgid(0, 0)
            os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
            output = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            # pytest has replaced both, and makes warnings errors.
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            warnings.resetwarnings()
            program()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:  # noqa: BLE001 - as the interpreter does at its end
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self) -> list[int]:
        """Return the exit codes of all ranks; the failure of one ends the others."""
        codes: dict[int, int] = {}
        end = time.monotonic() + TIMEOUT_S
        while len(codes) < len(self.pids):
            for pid in [pid for pid in self.pids if pid not in codes]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            if any(codes.values()) or time.monotonic() > end:
                self._kill(pid for pid in self.pids if pid not in codes)
            time.sleep(0.02)
        return [codes[pid] for pid in self.pids]

    def kill(self) -> None:
        """End all ranks at once, as the end of a job does."""
        self._kill(self.pids)
        self.wait()

    @staticmethod
    def _kill(pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run(program: Callable[[], object], log: Path, **options: Any) -> Sequence[int]:
    """Run one attempt to its end; return the exit codes."""
    return World(program, log=log, **options).wait()
