"""`selastic profile` on this machine, with a delay planted in the loader that it has to find."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from slurm_elastic.profiler import profiling_runs
from slurm_elastic.profiler.profile_store import ProfileStore
from slurm_elastic.profiler.profiling_plan import ProfiledShape, blocks, needs
from slurm_elastic.profiler.profiling_runs import ProfilingRequest
from slurm_elastic.profiler.runners import LocalRunner
from tests.gpu.part_program import part_main
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter

#: Samples per GPU, and seconds by which each of them is late.
BATCH, DELAY_S = 8, 0.004
_TIMEOUT_S = 120.0


def run(setting: KitSetting, rows: RowWriter) -> None:
    """Profile one GPU and all of them."""
    with rows.trial("profile"):
        shapes = tuple(ProfiledShape(1, gpus) for gpus in sorted({1, setting.ranks}))
        options = {"folder": str(setting.folder), "width": 64 if setting.small else 4096}
        command = [sys.executable, "-m", "tests.gpu.parts.profiling", "--rank", json.dumps(options)]
        request = ProfilingRequest(
            program=tuple(command),
            needs=tuple(
                needs(
                    shapes,
                    repeats=1 if setting.small else 3,
                    blocks=blocks(cold=False, whole_runs=False),
                )
            ),
            steps=5 if setting.small else 20,
            warm_up=2 if setting.small else 5,
            batch=BATCH,
            data=(),
            whole_runs=False,
            timeout_s=_TIMEOUT_S,
        )
        store = ProfileStore(setting.folder / "profile", {}, again=False)
        runner = LocalRunner(setting.ranks)
        failures = profiling_runs.run(request, runner, store, lambda *_: None)
        for failure in failures:
            name = f"run on {failure.launch.shape}"
            rows.check(name, failure.reason, ok=False, expected="no error")
            sys.stderr.write("\n".join((name, *failure.tail, "")))
        profile = profiling_runs.profile(
            store, application="", gpu_type="", batch=BATCH, whole_runs=False
        )
        for one in profile.configurations:
            name = f"{one.gpus} GPUs"
            for part in ("compute", "interconnect", "prep"):
                value = getattr(one, part)
                rows.measured(f"{name}: {part}", value.seconds * 1e3 if value else "unknown", "ms")
            if one.prep is None:
                rows.check(f"{name}: prep", "unknown", ok=False, expected="a time")
                continue
            planted = BATCH * DELAY_S
            name = f"{name}: prep, by the planted {planted * 1e3:.0f} ms"
            rows.timed(name, one.prep.seconds / planted, 0.85, 1.25)


def rank(options: dict[str, Any]) -> None:
    """Train as one rank, as the profiler asks."""
    from slurm_elastic.training import init  # noqa: PLC0415, I001 - before torch

    import torch  # noqa: PLC0415

    width = options["width"]

    class Late(torch.utils.data.Dataset):
        """Samples that take a while to prepare."""

        def __len__(self) -> int:
            return 1 << 14

        def __getitem__(self, index: int) -> Any:
            time.sleep(DELAY_S)
            return torch.full((width,), index / 1e4), index % 4

    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    job = init(
        torch.nn.Sequential(*layers, torch.nn.Linear(width, 4)),
        torch.nn.CrossEntropyLoss(),
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        Late(),
        global_batch=BATCH,
        epochs=1,
        checkpoint_dir=Path(options["folder"]) / "ckpt",
    )
    for batch in job:
        job.step(batch)
    job.finish()


if __name__ == "__main__":
    part_main(run, rank)
