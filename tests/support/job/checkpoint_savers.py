"""Savers of known libraries as sequences of writes, in the order in which each library writes.

The orders were read in the sources of the versions that docs/esrun-scripts.md names.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

#: Moves a file to its name; the path of the other is that of the write.
RENAME = b"<rename>"
Write: TypeAlias = tuple[str, bytes]
#: Writes of each rank, in phases that a barrier separates.
Phases: TypeAlias = list[list[list[Write]]]


def zipped(text: str, size: int = 40) -> bytes:
    """Return a small file like those of torch.save."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", text + "x" * size)
    return buffer.getvalue()


def halves(name: str, data: bytes) -> list[Write]:
    """Return two writes of a file: its first half, and all of it."""
    return [(name, data[: len(data) // 2]), (name, data)]


def in_full_length(name: str, data: bytes) -> list[Write]:
    """Return two writes of a file whose length is set before its contents are written."""
    half = len(data) // 2
    return [(name, data[:half] + bytes(len(data) - half)), (name, data)]


def _state(step: int) -> bytes:
    return json.dumps({"global_step": step, "log": [{"a": 1}]}, indent=2).encode() + b"\n"


def hf_trainer(step: int, ranks: int, *, old: bool = False) -> Phases:
    """transformers' Trainer; old: before 4.36."""
    folder = f"checkpoint-{step}"

    def rng(rank: int) -> list[Write]:
        name = f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"
        return halves(f"{folder}/{name}", zipped(f"{step} {rank}"))

    model = [
        *halves(f"{folder}/pytorch_model.bin", zipped(f"model {step}")),
        *halves(f"{folder}/training_args.bin", zipped("arguments")),
        *halves(f"{folder}/optimizer.pt", zipped(f"optimizer {step}")),
        *halves(f"{folder}/scheduler.pt", zipped(f"scheduler {step}")),
    ]
    state = halves(f"{folder}/trainer_state.json", _state(step))
    first = [*model, *state, *rng(0)] if old else [*model, *rng(0), *state]
    return [[first, *[rng(rank) for rank in range(1, ranks)]]]


def dcp(step: int, ranks: int, *, folder: str = "") -> Phases:
    """torch.distributed.checkpoint.save."""
    folder = folder or f"step-{step}"
    index = f"{step} index".encode()
    return [
        [halves(f"{folder}/__{r}_0.distcp", f"{step} shard {r}".encode()) for r in range(ranks)],
        [
            [
                *halves(f"{folder}/.metadata.tmp", index),
                (f"{folder}/.metadata", RENAME + f"{folder}/.metadata.tmp".encode()),
            ]
        ],
    ]


def lightning_sharded(step: int, ranks: int) -> Phases:
    """Lightning's FSDPStrategy and ModelParallelStrategy with sharded state."""
    folder = f"epoch={step}.ckpt"
    meta = halves(f"{folder}/meta.pt", zipped(f"meta {step}"))
    return [*dcp(step, ranks, folder=folder), [meta]]


def deepspeed(step: int, ranks: int, *, zipfiles: bool = True) -> Phases:
    """DeepSpeedEngine.save_checkpoint: rank 0 does not wait before it writes `latest`."""
    tag = f"global_step{step}"

    def part(name: str) -> list[Write]:
        data = zipped(f"{name} {step}") if zipfiles else f"{name} {step}".encode() * 9
        return halves(f"{tag}/{name}", data)

    parts = [part(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt") for r in range(ranks)]
    parts[0] = [
        *part("mp_rank_00_model_states.pt"),
        *parts[0],
        (f"{tag}/zero_to_fp32.py", b"# script"),
        ("latest", tag.encode()),
    ]
    return [parts]


def safetensors(text: str, size: int = 40) -> bytes:
    """Return a small file like those of the library safetensors."""
    values = text.encode() + b"x" * size
    entry = {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}
    header = json.dumps({"weight": entry}).encode()
    return len(header).to_bytes(8, "little") + header + values


def accelerate(step: int, ranks: int) -> Phases:
    """Accelerator.save_state with a registered object."""
    folder = f"checkpoint_{step}"

    def random_states(rank: int) -> list[Write]:
        return halves(f"{folder}/random_states_{rank}.pkl", zipped(f"{step} {rank}"))

    first = [
        *in_full_length(f"{folder}/model.safetensors", safetensors(f"model {step}")),
        *halves(f"{folder}/optimizer.bin", zipped(f"optimizer {step}")),
        *halves(f"{folder}/scheduler.bin", zipped(f"scheduler {step}")),
        *random_states(0),
        *halves(f"{folder}/custom_checkpoint_0.pkl", zipped(f"custom {step}")),
    ]
    return [[first, *[random_states(rank) for rank in range(1, ranks)]]]


def accelerate_fsdp(step: int, ranks: int) -> Phases:
    """Accelerator.save_state of a training with FSDP and sharded state."""
    folder = f"checkpoint_{step}"

    def random_states(rank: int) -> list[Write]:
        return halves(f"{folder}/random_states_{rank}.pkl", zipped(f"{step} {rank}"))

    first = [*halves(f"{folder}/scheduler.bin", zipped(f"scheduler {step}")), *random_states(0)]
    return [
        *dcp(step, ranks, folder=f"{folder}/pytorch_model_fsdp_0"),
        *dcp(step, ranks, folder=f"{folder}/optimizer_0"),
        [first, *[random_states(rank) for rank in range(1, ranks)]],
    ]


def accelerate_alone(step: int, ranks: int) -> Phases:
    """Accelerator.save_state, which a script calls in its main process only."""
    return accelerate(step, min(ranks, 1))


def generic(step: int, ranks: int) -> Phases:
    """A directory of files of no known format, one per rank and a last one."""
    folder = f"step_{step:06d}"
    return [
        [halves(f"{folder}/part{r}", f"{step} part {r}".encode()) for r in range(ranks)],
        [halves(f"{folder}/optimizer", f"{step} optimizer".encode())],
    ]


def two_files(step: int, _ranks: int) -> Phases:
    """Two files that are overwritten at each save."""
    return [
        [
            [
                *halves("model.pt", zipped(f"model {step}")),
                *halves("optimizer.pt", zipped(f"optimizer {step}", 60)),
            ]
        ]
    ]


def one_file(step: int, _ranks: int) -> Phases:
    """One file that is overwritten at each save."""
    return [[halves("ckpt.pt", zipped(f"model {step}"))]]


def single_files(step: int, _ranks: int) -> Phases:
    """One file per save, of a new name."""
    return [[halves(f"epoch={step:04d}-val_loss=0.{9 - step % 9}.ckpt", zipped(f"{step}"))]]


@dataclass
class SaverScript:
    """Script whose ranks write one save after the other.

    Attributes:
        home: directory of its checkpoints.
        clock: seconds since the epoch that its files get.
    """

    home: Path
    clock: Callable[[], float]

    def write(self, write: Write) -> None:
        """Do one write."""
        name, data = write
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if data.startswith(RENAME):
            (self.home / data.removeprefix(RENAME).decode()).rename(path)
            return
        path.write_bytes(data)
        now_ns = int(self.clock() * 1e9)
        os.utime(path, ns=(now_ns, now_ns))


def in_order(phases: Phases, choices: Sequence[int]) -> list[Write]:
    """Return the writes of all ranks, interleaved by the choices; barriers are kept."""
    writes = []
    pending_choices = list(choices)
    for phase in phases:
        pending = [list(rank) for rank in phase if rank]
        while pending:
            choice = pending_choices.pop() if pending_choices else 0
            rank = pending[choice % len(pending)]
            writes.append(rank.pop(0))
            pending = [rank for rank in pending if rank]
    return writes
