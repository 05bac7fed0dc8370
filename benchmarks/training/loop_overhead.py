"""Overhead of `ElasticLoop`, compared with the same loop without it.

    python -m benchmarks.training.loop_overhead [--rounds 20]
        [--models tiny,cnn,mlp,mlp-accumulating]
    python -m benchmarks.training.loop_overhead --models gpt --source ~/nanoGPT

Two ranks of this machine, gloo, one process group, started by `esrun --local 2` so that reports are
sent. Both arms are DistributedDataParallel with the same model; they take turns of a few steps in
one run, in an order drawn anew for every turn, so that a busy machine slows both alike:

    plain      DataLoader with DistributedSampler
    elastic    `loop.loader`, boundaries and measurements as by default

`gpt`, `trainer`, `gan` and `stream` are loops as published scripts have them (`script_loops`); with
`--source` the first two take nanoGPT's or minGPT's model from there. `tiny` is a model whose step
takes about two milliseconds: the most that a boundary can cost. Ratios are sums over all rounds,
wall seconds of rank 0 and CPU seconds of both ranks; in brackets the 95 % interval of a bootstrap
over rounds. Checkpoints are not in them.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import overhead
from benchmarks.overhead import RANKS, ratio
from benchmarks.support.rank_processes import run_ranks
from benchmarks.training.script_loops import CASES, LoopCase

ARMS = ("plain", "elastic")
_WARM_UP = 25


def _tiny() -> dict[str, Any]:
    """Return a model of 1,000 parameters, 32 samples per step."""
    import torch  # noqa: PLC0415

    inputs, targets = torch.randn(2048, 32), torch.randint(10, (2048,))
    model = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.ReLU(), torch.nn.Linear(24, 10))
    return {"model": model, "data": (inputs, targets), "batch": 32, "micro": None}


SAMPLES: dict[str, Callable[[], dict[str, Any]]] = {"tiny": _tiny} | overhead.MODELS
MODELS = (*SAMPLES, *CASES)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.loop_overhead")
    by_default = f"tiny,{overhead.BY_DEFAULT}"
    parser.add_argument("--models", default=by_default, help="some of " + ", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turn", type=int, default=10, help="steps of an arm before the other")
    parser.add_argument("--source", type=Path, help="folder of nanoGPT or minGPT")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in args.models.split(","):
        if name not in MODELS:
            parser.error(f"model {name} is unknown; known: {', '.join(MODELS)}")
        if args.source and not args.source.is_dir():
            parser.error(f"--source {args.source} is invalid: expected a folder")
        if args.rank:
            _rank(args.rank, name, args.source, rounds=args.rounds, turn=args.turn)
        else:
            times = measure(name, args.source, rounds=args.rounds, turn=args.turn)
            _show(name, times, args.turn)


def measure(
    model: str, source: Path | None = None, *, rounds: int, turn: int
) -> list[dict[str, Any]]:
    """Return the times of each rank by arm."""
    with tempfile.TemporaryDirectory() as out:
        arguments = [
            *("--rank", out, "--models", model),
            *("--rounds", str(rounds), "--turn", str(turn)),
            *(("--source", str(source.resolve())) if source else ()),
        ]
        run_ranks(RANKS, "benchmarks.training.loop_overhead", arguments)
        return [
            json.loads((Path(out) / f"rank{rank}.json").read_text(encoding="utf-8"))
            for rank in range(RANKS)
        ]


def _plain(case: dict[str, Any], rank: int, train: Callable[..., None]) -> Iterator[None]:
    """Yield steps of the usual loop, for ever."""
    import torch  # noqa: PLC0415
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: PLC0415

    dataset = TensorDataset(*case["data"])
    share = case["batch"] // RANKS
    micro = case["micro"] or share
    pieces = share // micro
    sampler: Any = DistributedSampler(dataset, num_replicas=RANKS, rank=rank)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        for number, batch in enumerate(
            DataLoader(dataset, batch_size=micro, sampler=sampler, drop_last=True)
        ):
            last = number % pieces == pieces - 1
            train(batch, torch.tensor(1 / pieces), last=last)
            if last:
                yield


def _elastic(case: dict[str, Any], loop: Any, train: Callable[..., None]) -> Iterator[None]:
    """Yield steps of the same loop with the library, for ever."""
    from torch.utils.data import TensorDataset  # noqa: PLC0415

    loader = loop.loader(TensorDataset(*case["data"]), drop_last=True)
    for _ in loop.epochs(1_000_000):
        for batch in loader:
            last = loop.last_micro_batch
            train(batch, loop.loss_weight, last=last)
            if last:
                yield


def _trainer(case: dict[str, Any]) -> Any:
    """Return a function that trains on one micro-batch, with its model and optimizer."""
    import torch  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    model = DistributedDataParallel(copy.deepcopy(case["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss_fn = torch.nn.CrossEntropyLoss()

    def train(batch: Any, weight: Any, *, last: bool) -> None:
        inputs, targets = batch
        model.require_backward_grad_sync = last
        (loss_fn(model(inputs), targets) * weight).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

    train.objects = {"model": model, "optimizer": optimizer}  # type: ignore[attr-defined]
    return train


def _sampled(case: dict[str, Any]) -> LoopCase:
    """Return the usual loop over samples in memory."""
    train = _trainer(case)
    return LoopCase(
        train.objects,
        case["batch"],
        case["micro"],
        lambda rank: _plain(case, rank, train),
        lambda loop: _elastic(case, loop, train),
    )


def _rank(out: Path, model: str, source: Path | None, *, rounds: int, turn: int) -> None:
    """Run one of the ranks; it writes its times to rankN.json."""
    from slurm_elastic.training import ElasticLoop  # noqa: PLC0415, I001 - before torch

    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    case = CASES[model](source) if model in CASES else _sampled(SAMPLES[model]())
    loop = ElasticLoop(
        out / "ckpt",
        global_batch=case.batch,
        micro_batch=case.micro,
        checkpoint_every_s=1e9,
        **case.objects,
    )
    loops = {"plain": case.plain(loop.rank), "elastic": case.elastic(loop)}
    # The run's first save would otherwise come 15 seconds after the first step.
    loop._checkpoint_manager.hurry()  # noqa: SLF001

    def take(arm: str, steps: int) -> tuple[float, float]:
        """Return (wall, CPU) seconds of so many steps."""
        torch.distributed.barrier()
        begun = time.perf_counter(), time.process_time()
        for _ in range(steps):
            next(loops[arm])
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    for arm in ARMS:
        take(arm, _WARM_UP)
    draw = random.Random(7)
    times: dict[str, Any] = {arm: {"wall_s": [], "cpu_s": []} for arm in ARMS}
    for _ in range(rounds):
        for arm in draw.sample(ARMS, k=len(ARMS)):
            wall, cpu = take(arm, turn)
            times[arm]["wall_s"].append(wall)
            times[arm]["cpu_s"].append(cpu)
    (out / f"rank{loop.rank}.json").write_text(json.dumps(times), encoding="utf-8")
    torch.distributed.barrier()
    loop.finish()


def _show(name: str, ranks: list[dict[str, Any]], turn: int) -> None:
    wall = {arm: ranks[0][arm]["wall_s"] for arm in ARMS}
    cpu = {
        arm: [sum(pair) for pair in zip(*(r[arm]["cpu_s"] for r in ranks), strict=True)]
        for arm in ARMS
    }
    steps = turn * len(wall["plain"])
    print(f"{name}: {steps} steps of each arm, plain {sum(wall['plain']) / steps * 1e3:.1f} ms")
    for label, values in (("step", wall), ("CPU", cpu)):
        one, low, high = ratio(values["elastic"], values["plain"])
        print(f"  elastic / plain  {label:<4} {one:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
