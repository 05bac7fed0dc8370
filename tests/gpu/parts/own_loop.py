"""`ElasticLoop` on the GPU: DistributedDataParallel, FSDP2 and mixed precision over restarts.

The script keeps its loop and its process group (NCCL); the library's control group is gloo.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.gpu.part_program import (
    STOPPED,
    no_sharding,
    part_main,
    rank_device,
    read_lines,
    start_ranks,
)
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter

SAMPLES, BATCH, MICRO, EPOCHS = 96, 24, 3, 8
STEPS = EPOCHS * SAMPLES // BATCH
#: Steps of each start but the last; with some more until the ranks agree that they stop.
TURN, STEP_S = 5, 0.03
#: Largest relative difference of a loss: of float32 sums in another order; of float16, in which
#: the same number of ranks repeats every digit but for the order in which kernels add up.
LIMIT, HALF_LIMIT = 1e-5, 1e-3


def run(setting: KitSetting, rows: RowWriter) -> None:
    """Train with each kind of loop, interrupted and undisturbed."""
    most = setting.ranks
    with rows.trial("undisturbed, 1 rank"):
        reference = _walk(setting, "undisturbed", [1])
        _compare(rows, "DDP", [most, 1, most], setting, reference)
        if reason := no_sharding(most):
            rows.not_run("FSDP2", reason)
        else:
            _compare(rows, "FSDP2", [most, 1, most], setting, reference, kind="fsdp2")
    if setting.device != "cuda":
        rows.not_run("float16 with GradScaler", "needs a GPU")
        return
    with rows.trial("float16 with GradScaler"):
        half = _walk(setting, "half", [most], kind="float16")
        name = "float16 with GradScaler"
        _compare(rows, name, [most] * 3, setting, half, kind="float16", limit=HALF_LIMIT)


def _compare(
    rows: RowWriter,
    name: str,
    walk: list[int],
    setting: KitSetting,
    reference: dict[int, float],
    *,
    kind: str = "ddp",
    limit: float = LIMIT,
) -> None:
    with rows.trial(name):
        losses = _walk(setting, f"{kind}-walk", walk, kind=kind)
        ranks = ", ".join(map(str, walk))
        done = sorted(losses) == list(range(1, STEPS + 1))
        rows.check(f"{name}: steps on {ranks} ranks", len(losses), ok=done, expected=str(STEPS))
        off = max(abs(losses[step] / reference[step] - 1) for step in losses)
        rows.at_most(f"{name}: largest relative difference of a loss", off, limit)


def _walk(
    setting: KitSetting, name: str, walk: list[int], *, kind: str = "ddp"
) -> dict[int, float]:
    """Train on these numbers of ranks, one after the other; return the losses by step."""
    folder = setting.folder / name
    folder.mkdir()
    for number, ranks in enumerate(walk):
        last = number == len(walk) - 1
        options = {"folder": str(folder), "kind": kind, "width": 32 if setting.small else 1024}
        options["stops"] = not last
        start_ranks(ranks, "own_loop", options, code=0 if last else STOPPED)
    return {line["step"]: line["loss"] for line in read_lines(folder / "losses.jsonl")}


def rank(options: dict[str, Any]) -> None:
    """Train as one rank, as a script of one's own would."""
    from slurm_elastic.training import ElasticLoop  # noqa: PLC0415, I001 - before torch

    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    gpu, half = torch.cuda.is_available(), options["kind"] == "float16"
    device = rank_device()
    if gpu:
        torch.cuda.set_device(device)
    if os.environ["WORLD_SIZE"] != "1":
        distributed.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    model: Any = _model(options["width"]).to(device)
    if distributed.is_initialized():
        if options["kind"] == "fsdp2":
            from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow

            fully_shard(model)
        else:
            model = DistributedDataParallel(model, device_ids=[device.index] if gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=half)
    folder = Path(options["folder"])
    loop = ElasticLoop(
        folder / "ckpt", global_batch=BATCH, micro_batch=MICRO, seed=3, checkpoint_every_s=1e9,
        model=model, optimizer=optimizer, scaler=scaler,
    )  # fmt: skip
    points = torch.randn(SAMPLES, 16, generator=generator)
    labels = (points @ torch.randn(16, 4, generator=generator)).argmax(dim=1)
    loader = loop.loader(torch.utils.data.TensorDataset(points, labels))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for _ in loop.epochs(EPOCHS):
        for inputs, targets in loader:
            with torch.autocast(device.type, torch.float16, enabled=half):
                output = model(inputs.to(device))
            loss = torch.nn.functional.cross_entropy(output.float(), targets.to(device))
            total += loss.detach() * loop.loss_weight / loop.world_size
            scaler.scale(loss * loop.loss_weight).backward()
            if not loop.last_micro_batch:
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if distributed.is_initialized():
                distributed.all_reduce(total)
            step = loop.step + 1
            if loop.rank == 0:
                with (folder / "losses.jsonl").open("a") as losses:
                    losses.write(json.dumps({"step": step, "loss": float(total)}) + "\n")
                if options["stops"] and step == (loop.resumed_from or 0) + TURN:
                    os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(STEP_S)
            total.zero_()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _model(width: int) -> Any:
    import torch  # noqa: PLC0415

    layers: list[Any] = [torch.nn.Linear(16, width), torch.nn.Tanh()]
    for _ in range(4):
        layers += [torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Dropout(0.1)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 4))


if __name__ == "__main__":
    part_main(run, rank)
