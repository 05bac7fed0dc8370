"""Overhead of the training library, compared with the same loop in plain DistributedDataParallel.

    python -m benchmarks.overhead [--models cnn,mlp,mlp-accumulating] [--rounds 10] [--json]
    python -m benchmarks.overhead --plain fsdp2 [...]

Two ranks of this machine, gloo, one process group, started by `esrun --local 2` so that reports
are sent; where torch sees GPUs, NCCL and `--ranks` of them (`make test-gpu`). Arms take turns of a
few steps, in an order drawn anew for every turn, so that a busy machine slows all of them alike:

    ddp        DistributedDataParallel, DataLoader with DistributedSampler, the usual five lines
    library    `slurm_elastic.training`, everything as by default
    unmeasured the same without looking into steps
    freezing   the library, and layers watched for convergence (none freezes)

With `--plain fsdp2` two arms: `fully_shard` of each layer, and the library with `shard=True`.

A round is so many steps of each arm that one of them is looked into, as in a long training; the
layer profile, of ten steps once per start, and checkpoints are not in it. Ratios are sums
over all rounds, CPU seconds of both ranks and wall seconds of rank 0; in brackets the 95 %
interval of a bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.rank_processes import run_ranks

RANKS = 2
#: Arms by the plain loop that they are compared with; it comes first.
ARMS = {"ddp": ("ddp", "library", "unmeasured", "freezing"), "fsdp2": ("fsdp2", "library")}
#: What is compared, where both are measured: name, arm, with which.
RATIOS = (
    ("library / ddp", "library", "ddp"),
    ("library / fsdp2", "library", "fsdp2"),
    ("unmeasured / ddp", "unmeasured", "ddp"),
    ("measuring: library / unmeasured", "library", "unmeasured"),
    ("watching: freezing / library", "freezing", "library"),
)
_RESAMPLES = 10_000
#: Steps of each arm before the first round: imports, allocations, the layer profile.
_WARM_UP = 25


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead")
    parser.add_argument("--models", default=BY_DEFAULT, help="some of " + ", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turn", type=int, default=5, help="steps of an arm before the next one")
    parser.add_argument("--plain", choices=tuple(ARMS), default="ddp", help="%(default)s")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    models = args.models.split(",")
    for name in models:
        if name not in MODELS:
            parser.error(f"model {name} is unknown; known: {', '.join(MODELS)}")
    if args.rank:
        _rank(args.rank, MODELS[models[0]](), args.plain, rounds=args.rounds, turn=args.turn)
        return
    options = {"rounds": args.rounds, "turn": args.turn, "ranks": args.ranks}
    figures = {name: measure(name, args.plain, **options) for name in models}
    if args.json:
        print(json.dumps(figures))
    else:
        for name, one in figures.items():
            _show(name, one)


def measure(
    model: str, plain: str = "ddp", *, rounds: int, turn: int, ranks: int = RANKS
) -> dict[str, Any]:
    """Return one model's step times by arm, and ratios with their intervals."""
    with tempfile.TemporaryDirectory() as out:
        arguments = [
            *("--rank", out, "--models", model, "--plain", plain),
            *("--rounds", str(rounds), "--turn", str(turn)),
        ]
        run_ranks(ranks, "benchmarks.overhead", arguments)
        times = [
            json.loads((Path(out) / f"rank{rank}.json").read_text(encoding="utf-8"))
            for rank in range(ranks)
        ]
    cpu = {
        arm: [sum(pair) for pair in zip(*(t[arm]["cpu_s"] for t in times), strict=True)]
        for arm in ARMS[plain]
    }
    wall = {arm: list(times[0][arm]["wall_s"]) for arm in ARMS[plain]}
    steps = times[0]["steps"]
    return {
        "rounds": rounds,
        "steps": steps,
        "step": {
            arm: {
                "wall_s": sum(wall[arm]) / (rounds * steps),
                "cpu_s": sum(cpu[arm]) / (rounds * steps * ranks),
            }
            for arm in ARMS[plain]
        },
        "ratios": {
            name: {"cpu": ratio(cpu[one], cpu[other]), "wall": ratio(wall[one], wall[other])}
            for name, one, other in RATIOS
            if {one, other} <= set(ARMS[plain])
        },
    }  # fmt: skip


def ratio(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of the sums, and the 95 % interval of a bootstrap over pairs.

    >>> [round(x, 3) for x in ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])]
    [2.0, 2.0, 2.0]
    """
    draw = random.Random(0)
    pairs = list(zip(ones, others, strict=True))
    ratios = []
    for _ in range(_RESAMPLES):
        sample = draw.choices(pairs, k=len(pairs))
        ratios.append(sum(a for a, _ in sample) / sum(b for _, b in sample))
    ratios.sort()
    cut = _RESAMPLES // 40
    return [sum(ones) / sum(others), ratios[cut], ratios[-cut - 1]]


def _cnn() -> dict[str, Any]:
    """Return a model of four convolutions with few parameters, 64 images per step."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    layers: list[Any] = []
    channels = 3
    for width, stride in ((32, 1), (64, 2), (64, 1), (128, 2)):
        conv = nn.Conv2d(channels, width, 3, stride=stride, padding=1)
        layers += [conv, nn.GroupNorm(8, width), nn.ReLU()]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    inputs, targets = torch.randn(1024, 3, 32, 32), torch.randint(10, (1024,))
    return {"model": nn.Sequential(*layers), "data": (inputs, targets), "batch": 64, "micro": None}


def _mlp(micro: int | None = None) -> dict[str, Any]:
    """Return a model of 3.2 million parameters, 256 samples per step."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    layers: list[Any] = []
    for _ in range(3):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    inputs, targets = torch.randn(2048, 1024), torch.randint(10, (2048,))
    model = nn.Sequential(*layers, nn.Linear(1024, 10))
    return {"model": model, "data": (inputs, targets), "batch": 256, "micro": micro}


def _wide() -> dict[str, Any]:
    """Return a model of 134 million parameters, 1024 samples per step: for GPUs."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    layers: list[Any] = [nn.Linear(64, 4096), nn.ReLU()]
    for _ in range(8):
        layers += [nn.Linear(4096, 4096), nn.ReLU()]
    inputs, targets = torch.randn(8192, 64), torch.randint(10, (8192,))
    model = nn.Sequential(*layers, nn.Linear(4096, 10))
    return {"model": model, "data": (inputs, targets), "batch": 1024, "micro": None}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "cnn": _cnn,
    "mlp": _mlp,
    "mlp-accumulating": lambda: _mlp(micro=32),
    "wide": _wide,
}
#: Not the one for GPUs.
BY_DEFAULT = "cnn,mlp,mlp-accumulating"


def _plain(case: dict[str, Any], job: Any, plain: str) -> Iterator[None]:
    """Yield steps of the usual loop, for ever."""
    import torch  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: PLC0415

    ranks, gpu = job.world_size, torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    if ranks == 1:  # the library makes a process group only for several ranks
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
    model: Any = case["model"].to(device)
    if plain == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow

        for layer in [m for m in model if any(True for _ in m.parameters())]:
            fully_shard(layer)
        synchronized = fully_shard(model).set_requires_gradient_sync
    else:
        model = DistributedDataParallel(model, device_ids=[device.index] if gpu else None)

        def synchronized(on: bool) -> None:
            model.require_backward_grad_sync = on

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss_fn = torch.nn.CrossEntropyLoss()
    dataset = TensorDataset(*case["data"])
    share = case["batch"] // ranks
    micro = min(case["micro"] or share, share)
    pieces = share // micro
    sampler: Any = DistributedSampler(dataset, num_replicas=ranks, rank=job.rank)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        loader = iter(DataLoader(dataset, batch_size=micro, sampler=sampler, pin_memory=gpu))
        for _ in range(len(dataset) // case["batch"]):
            optimizer.zero_grad()
            total = torch.zeros((), device=device)
            for piece in range(pieces):
                inputs, targets = (x.to(device, non_blocking=True) for x in next(loader))
                synchronized(piece == pieces - 1)
                loss = loss_fn(model(inputs), targets) / pieces
                loss.backward()
                total += loss.detach()
            optimizer.step()
            total.item()
            yield


def _ours(job: Any) -> Iterator[None]:
    """Yield steps of the library's loop, for ever."""
    for batch in job:
        job.step(batch)
        yield


def _rank(out: Path, case: dict[str, Any], plain: str, *, rounds: int, turn: int) -> None:
    """Run one of the ranks; it writes its times to rankN.json."""
    from slurm_elastic.training import Freezing, init  # noqa: PLC0415, I001 - before torch
    from slurm_elastic.training.measure.step_times import SELDOM, SOON, WARM_UP  # noqa: PLC0415

    import copy  # noqa: PLC0415

    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = init(
        copy.deepcopy(case["model"]),
        torch.nn.CrossEntropyLoss(),
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        torch.utils.data.TensorDataset(*case["data"]),
        global_batch=case["batch"],
        micro_batch=case["micro"],
        epochs=1_000_000,
        checkpoint_dir=out / "ckpt",
        checkpoint_every_s=1e9,
        # Watched from the first step on, and never certified.
        freeze=Freezing(begin=1.0, settled=1e9) if plain == "ddp" else "off",
        shard=plain == "fsdp2",
    )
    arms = ARMS[plain]
    loops = {plain: _plain(case, job, plain), "library": _ours(job)}
    timer, freezer = job._reporter.timer, job._freezer  # noqa: SLF001 - what is switched
    # The run's first save would otherwise come 15 seconds after the first step.
    job._checkpoint_manager.hurry()  # noqa: SLF001
    looks_at = dict.fromkeys(arms, WARM_UP + SOON + 1)

    def take(arm: str, steps: int) -> tuple[float, float]:
        """Return (wall, CPU) seconds of so many steps."""
        timer.on = arm in ("library", "freezing")
        timer._steps_done = looks_at[arm]  # noqa: SLF001
        job._freezer = freezer if arm == "freezing" else None  # noqa: SLF001
        loop = loops.get(arm, loops["library"])
        torch.distributed.barrier()
        _settled()
        begun = time.perf_counter(), time.process_time()
        for _ in range(steps):
            next(loop)
        _settled()
        taken = time.perf_counter() - begun[0], time.process_time() - begun[1]
        looks_at[arm] = timer._steps_done  # noqa: SLF001
        return taken

    next(loops[plain])  # makes the process group of a single rank
    for arm in arms:
        take(arm, _WARM_UP)
        looks_at[arm] = WARM_UP + SOON + 1
    draw = random.Random(7)
    times: dict[str, Any] = {arm: {"wall_s": [], "cpu_s": []} for arm in arms}
    for _ in range(rounds):
        sums = {arm: [0.0, 0.0] for arm in arms}
        for first in range(0, SELDOM, turn):
            for arm in draw.sample(arms, k=len(arms)):
                for i, value in enumerate(take(arm, min(turn, SELDOM - first))):
                    sums[arm][i] += value
        for arm, (wall, cpu) in sums.items():
            times[arm]["wall_s"].append(wall)
            times[arm]["cpu_s"].append(cpu)
    times["steps"] = SELDOM
    (out / f"rank{job.rank}.json").write_text(json.dumps(times), encoding="utf-8")
    torch.distributed.barrier()
    job.finish()


def _settled() -> None:
    """Wait until a GPU has done what it was given."""
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['rounds']} rounds of {found['steps']} steps of each arm")
    for arm, step in found["step"].items():
        print(f"  {arm:<11} step {step['wall_s'] * 1e3:6.1f} ms, CPU {step['cpu_s'] * 1e3:6.1f} ms")
    for label, one in found["ratios"].items():
        cpu, wall = (f"{r[0]:.3f} ({r[1]:.3f} to {r[2]:.3f})" for r in (one["cpu"], one["wall"]))
        print(f"  {label:<32} CPU {cpu}, step {wall}")


if __name__ == "__main__":
    main()
