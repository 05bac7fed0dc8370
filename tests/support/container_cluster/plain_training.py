"""Training that needs nothing but Python, written as people write one for torchrun.

    python3 plain_training.py [sockets|torch]

All ranks share the samples of a step and add up their gradients, so that the loss of a step is that
of an undisturbed run only if every rank has computed its part. They add up by sockets, for which
rank 0 listens at MASTER_ADDR:MASTER_PORT, or by torch. Rank 0 saves out/ckpt.json at USR2 and now
and then; all read it when they begin. In the directory of the run, each rank adds a line to
`ranks`, and rank 0 one to `steps` for each step. The file `stop` ends the training; where the file
`fails-on` has the number of ranks, rank 0 fails and the others hang; with the file `in-place` the
checkpoint is overwritten, in as many seconds as that says.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TextIO

STEP_S = 0.25
SAVE_EVERY = 40
POINTS, WEIGHTS, RATE = 12, 4, 0.002
CONNECT_S = HANG_S = 120.0


def loss_and_gradient(weights: list[float], step: int, rank: int, world: int) -> list[float]:
    """Return a rank's part of the loss, and of its gradient by each weight."""
    numbers = random.Random(step)
    points = [[numbers.gauss(0, 1) for _ in range(WEIGHTS)] for _ in range(POINTS)]
    total = [0.0] * (1 + WEIGHTS)
    for point in points[rank::world]:
        error = sum((w - 1) * x for w, x in zip(weights, point, strict=True))
        total[0] += error**2
        for i, x in enumerate(point, start=1):
            total[i] += 2 * error * x
    return total


def undisturbed_losses(steps: int) -> Iterator[float]:
    """Yield the loss of each step on one rank that nothing disturbs."""
    weights = [0.0] * WEIGHTS
    for step in range(steps):
        loss, *gradient = loss_and_gradient(weights, step, 0, 1)
        yield loss
        weights = [w - RATE * g for w, g in zip(weights, gradient, strict=True)]


class Group(Protocol):
    """Ranks that add up numbers."""

    def sum(self, numbers: list[float]) -> list[float]:
        """Return the sums over all ranks, in each of them."""
        ...


class SocketGroup:
    """Ranks that send their numbers to rank 0 as lines of JSON; an error if one of them is gone."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        port = int(os.environ["MASTER_PORT"])
        if rank == 0:
            with socket.create_server(("", port)) as server:
                server.settimeout(CONNECT_S)
                peers = [server.accept()[0] for _ in range(world - 1)]
        else:
            peers = [self._connect((os.environ["MASTER_ADDR"], port))]
        self._files = [peer.makefile("rw") for peer in peers]

    @staticmethod
    def _connect(address: tuple[str, int]) -> socket.socket:
        end = time.monotonic() + CONNECT_S
        while True:
            try:
                return socket.create_connection(address)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def sum(self, numbers: list[float]) -> list[float]:
        if self._rank:
            self._send(numbers)
            return self._received(self._files[0])
        rows = [numbers, *map(self._received, self._files)]
        total = [sum(column) for column in zip(*rows, strict=True)]
        self._send(total)
        return total

    def _send(self, numbers: list[float]) -> None:
        for file in self._files:
            print(json.dumps(numbers), file=file, flush=True)

    @staticmethod
    def _received(file: TextIO) -> list[float]:
        line = file.readline()
        if not line:
            raise ConnectionError("a rank has ended")
        return json.loads(line)


class TorchGroup:
    """Ranks that add up by torch's all-reduce."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - not every node has it

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        self._torch = torch

    def sum(self, numbers: list[float]) -> list[float]:
        tensor = self._torch.tensor(numbers, dtype=self._torch.float64)
        self._torch.distributed.all_reduce(tensor)
        return tensor.tolist()


def append(name: str, row: dict[str, object]) -> None:
    """Add a line to a file."""
    with Path(name).open("a") as file:
        file.write(json.dumps(row) + "\n")


def description(start: str) -> dict[str, object]:
    """Return the environment of this rank, with the name of its start."""
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
    slurm = "SLURM_PROCID SLURM_NTASKS SLURM_NODEID SLURM_NNODES SLURM_JOB_ID"
    row: dict[str, object] = {n: int(os.environ[n]) for n in [*names.split(), *slurm.split()]}
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    row["gpu"] = visible[int(os.environ["LOCAL_RANK"])]
    return row | {"node": os.environ["SLURMD_NODENAME"], "start": start}


def save(checkpoint: Path, text: str) -> None:
    """Replace the checkpoint, or overwrite it in two pieces."""
    checkpoint.parent.mkdir(exist_ok=True)
    in_place = Path("in-place")
    if not in_place.exists():
        new = checkpoint.with_suffix(".tmp")
        new.write_text(text)
        new.rename(checkpoint)
        return
    with checkpoint.open("w") as file:
        file.write(text[: len(text) // 2])
        file.flush()
        time.sleep(float(in_place.read_text()))
        file.write(text[len(text) // 2 :])


def main(kind: str = "sockets") -> None:
    signals: list[bool] = []
    signal.signal(signal.SIGUSR2, lambda *_: signals.append(True))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group: Group = TorchGroup() if kind == "torch" else SocketGroup(rank, world)
    weights, step = [0.0] * WEIGHTS, 0
    checkpoint = Path("out/ckpt.json")
    if checkpoint.exists():
        weights, step = json.loads(checkpoint.read_text())
    append("ranks", description(f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{step}"))
    fails_on = Path("fails-on")
    if fails_on.exists() and world == int(fails_on.read_text()):
        time.sleep(HANG_S if rank else 0.0)
        sys.exit(3)
    while True:
        time.sleep(STEP_S)
        ends = [float(Path("stop").exists()), float(len(signals))]
        loss, *rest = group.sum([*loss_and_gradient(weights, step, rank, world), *ends])
        gradient, (stops, saves) = rest[:WEIGHTS], rest[WEIGHTS:]
        weights = [w - RATE * g for w, g in zip(weights, gradient, strict=True)]
        step += 1
        if rank == 0:
            append("steps", {"step": step, "loss": loss, "world": world})
        if stops or saves or step % SAVE_EVERY == 0:
            signals.clear()
            if rank == 0:
                save(checkpoint, json.dumps([weights, step]))
            group.sum([0.0])
        if stops:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
    # torch's threads sometimes abort a process that ends just after a collective.
    os._exit(0)
