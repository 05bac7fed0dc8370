"""Program of a companion: it keeps its job running until the esrun of the base ends it.

It starts no ranks: esrun does, with srun. It ends the ranks on its node, and itself, when esrun
orders it, closes the connection, or sends nothing for some time. Exit code 0 if it
was ordered to end, else 1.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slurm_elastic.job.companions.companion_channel import (
    HANDSHAKE_S,
    HOSTS_VARIABLE,
    PORT_VARIABLE,
    SECRET_VARIABLE,
    SILENCE_S,
    CompanionChannel,
    CompanionChannelError,
    CompanionPlace,
    prove_to_esrun,
)
from slurm_elastic.job.rank_socket import JOIN_VARIABLE
from slurm_elastic.job.slurm_env import COMPANION_VARIABLE, STEP_VARIABLE

#: Seconds in which processes that are killed must have gone.
_KILL_S = 3.0
#: Seconds in which ranks end by themselves when the base is lost.
_SAVE_S = 10.0
_PAUSE_S = 0.02


def main(env: Mapping[str, str] = os.environ) -> int:
    """Run until the base does not need this job any more; return the exit code."""
    wakeup = _wake_by_sigterm()
    try:
        job_id = int(env["SLURM_JOB_ID"])
        channel = _connect(env[HOSTS_VARIABLE].split(","), int(env[PORT_VARIABLE]))
        place = CompanionPlace.from_environment(env)
        mark = prove_to_esrun(channel, env[SECRET_VARIABLE], job_id, place)
    except (CompanionChannelError, KeyError, ValueError) as error:
        sys.stderr.write(f"companion: esrun of the base: {error}\n")
        return 1
    try:
        told = _follow(channel, wakeup)
    except CompanionChannelError as error:
        sys.stderr.write(f"companion: esrun of the base: {error}\n")
        told = False
        wait_for_ranks(mark)
    kill_ranks(mark)
    return 0 if told else 1


def _wake_by_sigterm() -> socket.socket:
    """Return a socket that becomes readable when SIGTERM comes, which does nothing else."""
    wakeup, write_end = socket.socketpair()
    for end in (wakeup, write_end):
        end.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write_end.detach(), warn_on_full_buffer=False)
    return wakeup


def _connect(hosts: list[str], port: int) -> CompanionChannel:
    """Connect to the first host that answers."""
    problem = "no host is named"
    for host in hosts:
        try:
            return CompanionChannel(socket.create_connection((host, port), timeout=HANDSHAKE_S))
        except OSError as error:
            problem = f"{host}:{port}: {error.strerror or error}"
    raise CompanionChannelError(problem)


def _follow(channel: CompanionChannel, wakeup: socket.socket) -> bool:
    """Answer esrun until it orders the end of this job; return whether it has."""
    heard = time.monotonic()
    while (remaining_s := heard + SILENCE_S - time.monotonic()) > 0:
        descriptors = [channel.fileno(), wakeup.fileno()]
        readable = select.select(descriptors, [], [], remaining_s)[0]
        if wakeup.fileno() in readable:
            wakeup.recv(64)
            # The ranks leave at the next step; Slurm ends those that do not, after KillWait.
            channel.send(terminated=True)
        if channel.fileno() not in readable:
            continue
        channel.read()
        while message := channel.receive(0):
            heard = time.monotonic()
            if message.get("end"):
                return True
            channel.send(pong=True)
    raise CompanionChannelError(f"it has been silent for {SILENCE_S:.0f} s")


def wait_for_ranks(mark: str) -> None:
    """Wait until the ranks of a training that they have joined end by themselves.

    One of them may save what the base has not saved. Others are not waited for: they could
    write where a requeued base reads.
    """
    end = time.monotonic() + _SAVE_S
    while any(map(_has_joined, marked_processes(mark))) and time.monotonic() < end:
        time.sleep(10 * _PAUSE_S)


def _has_joined(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    return any(entry.startswith(f"{JOIN_VARIABLE}=".encode()) for entry in environment)


def kill_ranks(mark: str) -> None:
    """Send SIGKILL to all processes on this node that have this mark, until none is left.

    The step would end with the job, but only after KillWait if a rank ignores SIGTERM.
    """
    end = time.monotonic() + _KILL_S
    while time.monotonic() < end:
        marked = marked_processes(mark)
        if not marked:
            return
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def marked_processes(mark: str) -> list[int]:
    """Return the ids of the processes with this mark in their environment, but for srun's."""
    entries = {f"{name}={mark}".encode() for name in (STEP_VARIABLE, COMPANION_VARIABLE)}
    marked = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if entries.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                continue
            # srun runs beside esrun, which needs what it prints; Slurm's own name, not the user's.
            if (folder / "comm").read_text().strip() != "srun":
                marked.append(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return marked


if __name__ == "__main__":
    sys.exit(main())
