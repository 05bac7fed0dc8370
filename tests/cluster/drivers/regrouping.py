"""A rank of a program that regroups, without torch: it only says and does what esrun sees of it.

Rank 0 takes companions in once all their ranks have signed in with a file, and lets those go that
esrun does not list any more. With the word `stubborn` new ranks never leave by themselves, with
`late` they never sign in. A file `finish` ends the program.
"""

import os
import signal
import sys
import time
from pathlib import Path

from slurm_elastic.job.rank_socket import RankSocket

HERE = Path.cwd()


def wait_for(*names: str) -> None:
    """Wait until one of these files exists, or this directory does not."""
    while HERE.exists() and not any((HERE / name).exists() for name in names):
        time.sleep(0.05)


def join(companion: str) -> None:
    """Run as a rank of a companion."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "CUDA_VISIBLE_DEVICES",
        "MASTER_ADDR",
        "SLURM_JOB_ID",
    )
    line = " ".join([os.environ["SLURMD_NODENAME"], *(os.environ.get(n, "-") for n in names)])
    with (HERE / "newcomers").open("a") as file:
        file.write(f"{line}\n")
    if "late" not in sys.argv:
        (HERE / f"ready-{companion}-{os.environ['LOCAL_RANK']}").touch()
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_for("never")
    wait_for(f"leave-{companion}", "finish")


def lead() -> None:
    """Run as rank 0."""
    socket = RankSocket.connect()
    assert socket is not None
    while socket.companions is None and HERE.exists():
        socket.wait(0.1)
    socket.send({"phase": "training", "step": 1})
    socket.send_group({"can": True, "port": 40000})
    members: dict[str, int] = {}
    generation = 0
    while HERE.exists() and not (HERE / "finish").exists():
        socket.orders()
        desired = socket.companions or {}
        ready = {
            companion: ranks
            for companion, ranks in desired.items()
            if len(list(HERE.glob(f"ready-{companion}-*"))) == ranks
        }
        if ready != members:
            for companion in members.keys() - ready.keys():
                (HERE / f"leave-{companion}").touch()
            generation, members = generation + 1, ready
            socket.send_group(
                {"generation": generation, "companions": members, "step": 7, "pause_s": 0.01}
            )
        time.sleep(0.05)


if "SLURM_ELASTIC_JOIN" in os.environ:
    join(os.environ["SLURM_ELASTIC_JOIN"])
elif os.environ["RANK"] == "0":
    lead()
else:
    wait_for("finish")
