"""Emulation of a GPU of known speed, for the test cluster.

In the test cluster all "GPUs" share the host's few CPUs. So the example scripts
do a small real computation and then sleep until the step has taken as long as
it would on such a device. Sleeps are where a GPU would compute: in each layer's forward and
backward pass, and for the communication in the step's first all-reduce (without one, just before
the optimizer's update).

Layers (modules with parameters of their own) take equal parts of a step, a third of each forward
and two thirds backward. Frozen layers have no backward pass, and nine tenths of the communication
shrink with the parameters that are still sent, so that the step shortens as the layer profile of
the training library predicts.

Speeds and communication times come from the file that the environment variable
EMULATED_DEVICES names, or /etc/slurm-elastic/devices.toml:

    [speed]                # relative; `rate` samples per second at 1.0
    v100 = 1.0
    a100 = 2.0
    [communication]        # seconds per step, by the widest tier the job spans
    gpu = 0.0              # a single GPU
    node = 0.005
    rack = 0.02
    spine = 0.08
    [types]                # optional; else the features in slurm.conf are used
    g01 = "a100"
    [racks]
    g01 = "rack1"

Applications differ in their gain from a faster device: `typed` (the default) runs at the speeds of
the file, `even` at 1.0 on every type.

Without the file nothing is emulated. Only the examples use this module.
"""

from __future__ import annotations

import os
import re
import socket
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

APPLICATIONS = ("typed", "even")
DEFAULT_FILE = Path("/etc/slurm-elastic/devices.toml")
SLURM_CONF = Path("/etc/slurm/slurm.conf")


@dataclass
class Device:
    """One emulated GPU.

    Attributes:
        kind: its type, e.g. "a100".
        samples_per_s: its speed.
        communication_s: seconds per step of communication with the job's other GPUs.
    """

    kind: str
    samples_per_s: float
    communication_s: float
    _begun: float = 0.0
    _samples: int = 0
    _communicated: bool = False
    _parameters: list[Any] = field(default_factory=list)

    def attach(self, model: Any, optimizer: Any) -> None:
        """Slow the training of this model on this rank down to the device's speed."""
        import torch

        self._parameters = list(model.parameters())
        layers = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        model.register_forward_pre_hook(self._begin)
        for i, layer in enumerate(layers):
            layer.register_forward_hook(self._pauses((i + 1) / len(layers) / 3))
            # Backward passes begin with the last layer; a frozen layer has none.
            first = next(layer.parameters(recurse=False))
            first.register_post_accumulate_grad_hook(
                self._pauses(1 / 3 + 2 / 3 * (1 - i / len(layers)))
            )
        optimizer.register_step_pre_hook(self._communicate)
        if torch.distributed.is_available():
            torch.distributed.all_reduce = self._slowed(torch.distributed.all_reduce)

    def _begin(self, _module: Any, inputs: Any) -> None:
        self._begun = time.monotonic()
        self._samples = len(inputs[0])
        self._communicated = False

    def _pauses(self, part: float) -> Any:
        """Return a hook that waits until this part of the step's computing would be done."""

        def pause(*_: Any) -> None:
            left = self._begun + part * self._samples / self.samples_per_s - time.monotonic()
            time.sleep(max(0.0, left))

        return pause

    def _communicate(self, *_: Any) -> None:
        if not self._communicated:
            sizes = [(p.numel(), p.requires_grad) for p in self._parameters]
            sent = sum(n for n, trains in sizes if trains) / max(1, sum(n for n, _ in sizes))
            time.sleep(self.communication_s * (0.1 + 0.9 * sent))
        self._communicated = True

    def _slowed(self, all_reduce: Any) -> Any:
        def slowed(*arguments: Any, **options: Any) -> Any:
            self._communicate()
            return all_reduce(*arguments, **options)

        return slowed


def device(rate: float, application: str = "typed", *, communication: float = 1.0) -> Device | None:
    """Return the device of this rank; None where nothing is emulated.

    Args:
        rate: samples per second on a device of speed 1.
        application: one of `APPLICATIONS`.
        communication: factor of the file's seconds of communication.
    """
    file = Path(os.environ.get("EMULATED_DEVICES", DEFAULT_FILE))
    if not file.is_file():
        return None
    table = tomllib.loads(file.read_text())
    types, racks = dict(table.get("types", {})), dict(table.get("racks", {}))
    if SLURM_CONF.is_file():
        for node, kind, rack in _features(SLURM_CONF.read_text()):
            types.setdefault(node, kind)
            racks.setdefault(node, rack)
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    speeds = table["speed"]
    kind = os.environ.get("EMULATED_TYPE") or types.get(here, next(iter(speeds)))
    tier = _tier(_nodes() or [here], racks, int(os.environ.get("WORLD_SIZE", "1")))
    speed = 1.0 if application == "even" else speeds[kind]
    seconds = communication * table.get("communication", {}).get(tier, 0.0)
    return Device(kind, rate * speed, seconds)


def _features(conf: str) -> list[tuple[str, str, str]]:
    """Return (node, type, rack) of the test cluster's node lines."""
    return re.findall(r"^NodeName=(\S+) .*Feature=(\w+),(\w+)", conf, re.MULTILINE)


def _nodes() -> list[str]:
    return expand(os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", "")))


def _tier(nodes: list[str], racks: dict[str, str], world: int) -> str:
    if world == 1:
        return "gpu"
    if len(set(nodes)) == 1:
        return "node"
    return "rack" if len({racks.get(node, "") for node in nodes}) == 1 else "spine"


def expand(folded: str) -> list[str]:
    """Return the node names of Slurm's short form.

    >>> expand("g[01-03,07],h5")
    ['g01', 'g02', 'g03', 'g07', 'h5']
    """
    names = []
    for prefix, ranges in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?", folded):
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else ()
            names += [f"{prefix}{number:0{len(first)}d}" for number in numbers] or [prefix]
    return names
