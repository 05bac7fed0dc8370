"""Throughput of checkpoints: how long training waits for one, and how long a restart reads it.

The folder is on the file system that `--folder` names. Bytes are those of the files; the page cache
is neither dropped nor bypassed, so reading is usually from memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from tests.gpu.part_program import STOPPED, no_sharding, part_main, start_ranks, synchronize
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter

#: Saves that are measured; the first one, which is read back, does not count.
SAVES = 4


def run(setting: KitSetting, rows: RowWriter) -> None:
    """Measure each way of saving."""
    _measure(rows, "rank 0 writes", setting)
    _measure(rows, "in the background", setting, background=True)
    if reason := no_sharding(setting.ranks):
        rows.not_run("all ranks write (shard=True)", reason)
    else:
        _measure(rows, "all ranks write (shard=True)", setting, shard=True)


def _measure(rows: RowWriter, name: str, setting: KitSetting, **options: Any) -> None:
    with rows.trial(name):
        folder = setting.folder / "-".join(("run", *options))
        folder.mkdir()
        # 252 million parameters: 3 GB with the two moments of AdamW.
        width, layers = (128, 4) if setting.small else (4096, 15)
        options |= {"folder": str(folder), "width": width, "layers": layers}
        for number in (1, 2):
            start_ranks(setting.ranks, "checkpoints", options | {"start": number}, code=STOPPED)
        first, second = (json.loads((folder / f"start-{n}").read_text()) for n in (1, 2))
        newest = max((folder / "ckpt").glob("step_*"), key=lambda path: int(path.name[5:]))
        size = sum(path.stat().st_size for path in newest.iterdir()) / 1e9
        # In the background not every step is saved.
        wait = max if options.get("background") else statistics.median
        waits = wait(first["waits_s"])
        rows.measured(f"{name}: size", size, "GB")
        rows.measured(f"{name}: training waits", waits, "s")
        if not options.get("background"):
            rows.measured(f"{name}: written", size / waits, "GB/s")
        rows.measured(f"{name}: restored in", second["restore_s"], "s")
        rows.measured(f"{name}: read", size / second["restore_s"], "GB/s")
        ok = second["resumed_from"] == first["step"]
        expected = f"step {first['step']}"
        rows.check(f"{name}: restored", f"step {second['resumed_from']}", ok=ok, expected=expected)
        value, saved = second["sum_before"], first["sum_after"]
        ok = math.isclose(value, saved, rel_tol=1e-12)
        expected = f"{saved:.14g}"
        rows.check(f"{name}: sum of the weights", f"{value:.14g}", ok=ok, expected=expected)
        shutil.rmtree(folder)


def rank(options: dict[str, Any]) -> None:
    """Save after each of some steps; rank 0 writes how long that took."""
    from slurm_elastic.training import init  # noqa: PLC0415, I001 - before torch

    import torch  # noqa: PLC0415

    folder, width = Path(options["folder"]), options["width"]
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, width)]
    layers += [torch.nn.Linear(width, width) for _ in range(options["layers"])]
    points = torch.randn(1024, 16)
    job = init(
        torch.nn.Sequential(*layers, torch.nn.Linear(width, 4)),
        torch.nn.CrossEntropyLoss(),
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        torch.utils.data.TensorDataset(points, (points[:, 0] > 0).long()),
        global_batch=64,
        epochs=1000,
        checkpoint_dir=folder / "ckpt",
        checkpoint_every_s=0.0,
        keep=1,
        shard=options.get("shard", False),
        background_saves=options.get("background", False),
    )
    values: dict[str, Any] = {"resumed_from": job.resumed_from, "restore_s": job._restore_s}
    values["sum_before"] = _sum(job)
    waits: list[float] = []
    ended: float | None = None
    for number, batch in enumerate(job):
        if ended is not None:
            waits.append(time.perf_counter() - ended)
        job.step(batch)
        if number >= SAVES:
            # The ranks agree to stop during the next step, which is saved as well.
            values |= {"step": batch.step, "sum_after": _sum(job), "waits_s": waits[1:SAVES]}
            if job.rank == 0:
                (folder / f"start-{options['start']}").write_text(json.dumps(values))
                os.kill(os.getpid(), signal.SIGTERM)
        synchronize(job.device)
        ended = time.perf_counter()


def _sum(job: Any) -> float:
    """Return the sum of all weights over all ranks, exact enough to tell two states apart."""
    import torch  # noqa: PLC0415

    total = torch.zeros((), dtype=torch.float64, device=job.device)
    for parameter in job.model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        total += local.detach().double().sum()
    if job.world_size > 1:
        torch.distributed.all_reduce(total)
    return float(total)


if __name__ == "__main__":
    part_main(run, rank)
