"""What a job reports of its steps, compared with times that are taken apart from the training.

On a GPU the library uses events, which stop nothing; here the GPU is waited for around each pass.
One layer of the model costs as much as eight of the others, and has to stand out in the profile.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from tests.gpu.part_program import part_main, serve_orders, start_ranks, synchronize
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter

#: Steps of the training; the library looks into some of them.
STEPS = 60
_INPUTS, _CLASSES = 64, 10
_WIDE = 8.0
#: Of a report, and of a row of its layer profile.
_FIELDS = (
    "step_time_s", "data_s", "forward_s", "backward_s", "sync_s", "optimizer_s",
    "peak_memory_bytes", "grad_sqr", "grad_var",
)  # fmt: skip
_LAYER = ("name", "forward_s", "backward_s")


def run(setting: KitSetting, rows: RowWriter) -> None:
    """Train, and compare."""
    with rows.trial("measurements"):
        width, share = (128, 64) if setting.small else (4096, 2048)
        options = {"folder": str(setting.folder), "width": width, "share": share}
        start_ranks(setting.ranks, "measurements", options)
        answer = json.loads((setting.folder / "answer.json").read_text(encoding="utf-8"))
        reported, true = answer["reported"], answer["true"]
        for name in ("step_time_s", "data_s", "optimizer_s", "sync_s"):
            rows.measured(f"reported: {name}", reported[name] * 1e3, "ms")
        for name in ("forward_s", "backward_s"):
            ratio, note = reported[name] / true[name], f"{true[name] * 1e3:.3g} ms by itself"
            rows.timed(f"{name}, by that of the pass alone", ratio, 0.75, 1.25, note=note)
        parts = ("data_s", "forward_s", "backward_s", "sync_s", "optimizer_s")
        total = sum(reported[name] for name in parts) / reported["step_time_s"]
        rows.timed("all parts, by the whole step", total, 0.7, 1.3)
        layers = {layer["name"]: layer for layer in answer["layers"]}
        for key in ("forward_s", "backward_s"):
            plain = statistics.median(layers[f"plain{number}"][key] for number in range(4))
            ratio = layers["wide"][key] / plain
            rows.timed(
                f"wide layer, {key} by that of the others", ratio, 0.75 * _WIDE, 1.25 * _WIDE
            )
        ratio = sum(layer["forward_s"] for layer in layers.values()) / reported["forward_s"]
        rows.timed("sum of the layers, by forward_s", ratio, 0.75, 1.25)
        least = 4 * answer["parameter_bytes"]  # gradients, and two moments of the optimizer
        rows.check(
            "peak_memory_bytes",
            reported["peak_memory_bytes"] / 1e9,
            ok=reported["peak_memory_bytes"] >= least,
            expected=f"at least {least / 1e9:.3g} GB",
            unit="GB",
        )
        for name in ("grad_sqr", "grad_var"):
            value = reported[name]
            # An estimate of a squared norm that would be negative is reported as 0.
            ok = value is not None and 0 <= value < float("inf")
            shown = "none" if value is None else value
            rows.check(f"gradient noise: {name}", shown, ok=ok, expected="a number, 0 or above")


def rank(options: dict[str, Any]) -> None:
    """Train as one rank; rank 0 writes what it reported, and what it measured itself."""
    reports = serve_orders()
    from slurm_elastic.training import init  # noqa: PLC0415, I001 - before torch

    import os  # noqa: PLC0415

    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    torch.manual_seed(0)
    width, share = options["width"], options["share"]
    batch = share * int(os.environ["WORLD_SIZE"])
    layers: list[Any] = [("first", nn.Linear(_INPUTS, width))]
    layers += [(f"plain{number}", nn.Linear(width, width)) for number in range(4)]
    wide = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
    layers += [("wide", wide), ("last", nn.Linear(width, _CLASSES))]
    points = torch.randn(4 * batch, _INPUTS)
    labels = (points @ torch.randn(_INPUTS, _CLASSES)).argmax(dim=1)
    loss_fn = nn.CrossEntropyLoss()
    job = init(
        layers,
        loss_fn,
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        torch.utils.data.TensorDataset(points, labels),
        global_batch=batch,
        epochs=STEPS // 4,
        checkpoint_dir=Path(options["folder"]) / "ckpt",
        checkpoint_every_s=1e9,
    )
    for one in job:
        job.step(one)
    if job.rank == 0:
        passes = _passes(job.model, loss_fn, points[:share])
        profiles = [report["profile"] for report in reports if report.get("profile")]
        answer = {
            "reported": {name: _middle(reports, name) for name in _FIELDS},
            "true": passes,
            "layers": [dict(zip(_LAYER, row, strict=False)) for row in profiles[-1]],
            "parameter_bytes": sum(p.numel() * p.element_size() for p in job.model.parameters()),
        }
        (Path(options["folder"]) / "answer.json").write_text(json.dumps(answer))
    job.finish()


def _middle(reports: list[dict[str, Any]], name: str) -> float | None:
    """Return the median of a field over the reports that have it; None: there is none."""
    values = [report[name] for report in reports if report.get(name) is not None]
    return statistics.median(values) if values else None


def _passes(model: Any, loss_fn: Any, points: Any) -> dict[str, float]:
    """Return median seconds of a forward and a backward pass, the copy to the device included."""
    import torch  # noqa: PLC0415

    device = next(model.parameters()).device
    targets = torch.zeros(len(points), dtype=torch.long)
    if device.type == "cuda":
        points, targets = points.pin_memory(), targets.pin_memory()
    times: dict[str, list[float]] = {"forward_s": [], "backward_s": []}
    for _ in range(15):
        stamps = []
        for phase in ("forward", "backward", ""):
            synchronize(device)
            stamps.append(time.perf_counter())
            if phase == "forward":
                moved = points.to(device, non_blocking=True)
                loss = loss_fn(model(moved), targets.to(device, non_blocking=True))
            elif phase == "backward":
                loss.backward()
        model.zero_grad(set_to_none=True)
        times["forward_s"].append(stamps[1] - stamps[0])
        times["backward_s"].append(stamps[2] - stamps[1])
    return {name: statistics.median(values[5:]) for name, values in times.items()}


if __name__ == "__main__":
    part_main(run, rank)
