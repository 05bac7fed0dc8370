"""Options of the recorded trainings, and the record that their ranks write."""

import argparse
import json
import time
from pathlib import Path

import torch


def recording_options() -> argparse.ArgumentParser:
    """Return the options that all recorded trainings have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--save-every", type=int, help="steps between two saves")
    parser.add_argument("--stop-at", type=int, default=0, help="end after this step")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds per step")
    return parser


class StepRecorder:
    """Record of the steps of one rank: a line of JSON for each step in `steps.RANK`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._folder, self._pause_s = options.out, options.sleep
        self._folder.mkdir(parents=True, exist_ok=True)
        self._samples: list[int] = []
        self._losses: list[float] = []

    def add(self, numbers: torch.Tensor, loss: torch.Tensor) -> None:
        """Add a micro-batch to the present step."""
        self._samples += numbers.tolist()
        self._losses.append(float(loss.detach()))

    def write(self, *, rank: int, world: int, **fields: float) -> None:
        """Write the line of a step; on all ranks, as the recorded loss is the mean of theirs."""
        time.sleep(self._pause_s)
        loss = torch.tensor(self._losses).mean()
        if world > 1:
            torch.distributed.all_reduce(loss)
        line = {
            **fields,
            "loss": float(loss) / world,
            "samples": self._samples,
            "rank": rank,
            "world": world,
        }
        with (self._folder / f"steps.{rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._samples, self._losses = [], []
