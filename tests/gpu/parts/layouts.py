"""Restarts in other layouts: replicas, stages, divided parameters, on the CUDA and NCCL paths.

A training of 24 steps, started again after every three or four in another layout, has to give the
losses of an undisturbed one. The controller's order names the layout; rank 0 sends itself SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.part_program import (
    STOPPED,
    no_sharding,
    part_main,
    read_lines,
    serve_orders,
    start_ranks,
)
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter

SAMPLES, BATCH, EPOCHS = 96, 24, 6
STEPS = EPOCHS * SAMPLES // BATCH
#: A start but the last is stopped after so many more steps; the ranks agree on it in the next one.
TURN = 3
#: Largest relative difference of a loss: that of float32 sums in another order.
LIMIT = 1e-5
#: Walks by their least number of ranks; names as in docs/training-layouts.md.
WALKS = {
    1: ["1x1", "1x1"],
    2: ["1x1", "1x2", "2x1", "1x1"],
    3: ["1x1", "1x2", "3x1", "2-1", "1x3", "1x1"],
    4: ["1x1", "2x2", "1x4", "4x1", "1x2x2", "2-1", "1x1"],
    8: ["1x1", "2x4", "8x1", "4x2", "1x8", "3-1", "2x2x2", "1x1"],
}
#: The same, of plans whose ranks share weights.
SHARED = {
    2: ["1x1", "1x1+tensor=2", "2x1", "1x1+tensor=2+recompute"],
    4: ["1x1+tensor=2", "2x1+tensor=2", "1x2+tensor=2", "1x1+tensor=4", "1x1"],
}
#: The same, of replicas of such ranks that divide parameters.
MESH = ["2x1+tensor=2+shard=full", "4x1+shard=full", "2x1+tensor=2+shard=full+recompute", "1x1"]


def run(setting: KitSetting, rows: RowWriter) -> None:
    """Walk, and compare."""
    most = setting.ranks
    with rows.trial("undisturbed, 1 rank"):
        reference = _walk(setting, "undisturbed", ["1x1"])
        walk = WALKS[max(size for size in WALKS if size <= most)]
        _compare(rows, "replicas and stages", walk, setting, reference)
        if reason := no_sharding(most):
            rows.not_run("FSDP2 (shard=True)", reason)
        else:
            sharded = [f"{most}x1", "1x1", f"{max(1, most // 2)}x1", f"{most}x1"]
            _compare(rows, "FSDP2 (shard=True)", sharded, setting, reference, shard=True)
        if most < 2:
            rows.not_run("shared weights (tensor=N)", "needs 2 GPUs")
            rows.not_run("gradients in buckets", "needs 2 GPUs")
        else:
            shared = SHARED[max(size for size in SHARED if size <= most)]
            options = {"overlap": "buckets"}
            _compare(rows, "shared weights (tensor=N)", shared, setting, reference, **options)
            # They leave in buckets after the steps in which layers are measured.
            _compare(rows, "gradients in buckets", [f"{most}x1"], setting, reference, **options)
        if reason := no_sharding(most) or ("needs 4 GPUs" if most < 4 else ""):
            rows.not_run("mesh (tensor=N, shard=full)", reason)
        else:
            _compare(rows, "mesh (tensor=N, shard=full)", MESH, setting, reference)
    with rows.trial("dropout"):
        same = [f"{most}x1"]
        reference = _walk(setting, "dropout", same, dropout=0.2)
        _compare(rows, "dropout", same * 3, setting, reference, dropout=0.2)
    if most < 2:
        rows.not_run("pipedream", "needs 2 GPUs")
        return
    with rows.trial("pipedream"):
        lines = _walk(setting, "pipedream", [f"1x{min(most, 4)}"], schedule="pipedream")
        losses = [line["loss"] for line in lines]
        first, last = (statistics.fmean(part) for part in (losses[:4], losses[-4:]))
        expected = "less than in the first epoch"
        rows.check("pipedream: loss of the last epoch", last, ok=last < first, expected=expected)


def _compare(
    rows: RowWriter,
    name: str,
    walk: Sequence[str],
    setting: KitSetting,
    reference: list[dict[str, Any]],
    **options: Any,
) -> None:
    """Walk through these layouts; compare with the losses of an undisturbed training."""
    with rows.trial(name):
        lines = _walk(setting, name.split(maxsplit=1)[0] + "-walk", walk, **options)
        losses, expected = ({x["step"]: x["loss"] for x in run} for run in (lines, reference))
        expected_layouts = [plan.partition("+")[0] for plan in walk]
        rows.check(
            f"{name}: layouts, in order",
            " ".join(dict.fromkeys(f"{x['start']}:{x['layout']}" for x in lines)),
            ok=[x["layout"] for x in lines if x["first"]] == expected_layouts,
            expected=" ".join(f"{number}:{text}" for number, text in enumerate(expected_layouts)),
        )
        done = sorted(x["step"] for x in lines) == list(range(1, STEPS + 1))
        rows.check(f"{name}: steps, each once", len(lines), ok=done, expected=str(STEPS))
        off = max(abs(losses[s] / expected[s] - 1) for s in losses.keys() & expected.keys())
        rows.at_most(f"{name}: largest relative difference of a loss", off, LIMIT)
        seen = Counter((x["epoch"], i) for x in lines for i in x["samples"])
        once = len(seen) == EPOCHS * SAMPLES and set(seen.values()) == {1}
        value, each = f"{len(seen)} of {EPOCHS * SAMPLES}", "each once"
        rows.check(f"{name}: samples of all epochs", value, ok=once, expected=each)
        starts = [x["age_s"] for x in lines if x["first"]]
        rows.measured(
            f"{name}: start of a process to its first step, median", statistics.median(starts), "s"
        )


def _walk(
    setting: KitSetting, name: str, walk: Sequence[str], **options: Any
) -> list[dict[str, Any]]:
    """Train through these layouts; return a line for each step, with the samples of all ranks."""
    folder = setting.folder / name
    folder.mkdir()
    for number, layout in enumerate(walk):
        last = number == len(walk) - 1
        until = STEPS if last else (number + 1) * TURN
        rank_options = {"folder": str(folder), "layout": layout, "until": until, "start": number}
        rank_options |= {"width": 32 if setting.small else 1024} | options
        start_ranks(
            _world(layout), "layouts", rank_options, code=0 if last else STOPPED
        )  # fmt: skip
    lines = read_lines(folder / "steps-rank0.jsonl")
    by_step = {line["step"]: line for line in lines}
    for path in folder.glob("samples-rank*.jsonl"):
        for line in read_lines(path):
            by_step[line["step"]].setdefault("samples", []).extend(line["samples"])
    return lines


def _world(layout: str) -> int:
    from slurm_elastic.core.execution.execution_plan import ExecutionPlan  # noqa: PLC0415

    return ExecutionPlan.parse(layout).world


def rank(options: dict[str, Any]) -> None:
    """Train as one rank until a step."""
    folder = Path(options["folder"])
    os.environ["SLURM_ELASTIC"] = "1-64,parallel=hybrid"
    layout, _, plan_options = options["layout"].partition("+")
    serve_orders(layout=layout, plan=options["layout"] if plan_options else "")
    from slurm_elastic.training import init  # noqa: PLC0415, I001 - before torch
    from slurm_elastic.training.measure.step_times import process_age  # noqa: PLC0415

    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    width = options["width"]
    layers: list[Any] = [("front", torch.nn.Linear(16, width)), ("front_act", torch.nn.Tanh())]
    for number in range(8):
        layers += [
            (f"mid{number}", torch.nn.Linear(width, width)),
            (f"act{number}", torch.nn.Tanh()),
        ]
    layers += [("drop", torch.nn.Dropout(options.get("dropout", 0.0)))]
    layers += [("back", torch.nn.Linear(width, 4))]
    points = torch.randn(SAMPLES, 16, generator=generator)
    labels = (points @ torch.randn(16, 4, generator=generator)).argmax(dim=1)
    job = init(
        layers,
        torch.nn.CrossEntropyLoss(),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        torch.utils.data.TensorDataset(points, labels),
        global_batch=BATCH,
        epochs=EPOCHS,
        checkpoint_dir=folder / "ckpt",
        seed=3,
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
        micro_batch=3,
        checkpoint_every_s=1e9,
        shard=options.get("shard", False),
        overlap=options.get("overlap", "none"),
        schedule=options.get("schedule", "1f1b"),
    )
    first = True
    with (
        (folder / f"steps-rank{job.rank}.jsonl").open("a", buffering=1) as steps,
        (folder / f"samples-rank{job.rank}.jsonl").open("a", buffering=1) as samples,
    ):
        for batch in job:
            loss = job.step(batch)
            samples.write(json.dumps({"step": batch.step, "samples": batch.indices}) + "\n")
            line = {"step": batch.step, "epoch": batch.epoch, "loss": loss, "layout": job.layout}
            line |= {"start": options["start"], "first": first, "age_s": process_age()}
            first = False
            steps.write(json.dumps(line) + "\n")
            if batch.step == options["until"] < STEPS and job.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
    job.finish()


if __name__ == "__main__":
    part_main(run, rank)
