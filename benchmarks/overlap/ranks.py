"""One rank of `benchmarks.overlap`: its arms, equality of gradients, products, a training."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.overlap.exposed_share import CPU

LAYERS, WIDTH = 48, 256
GRADIENT_BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)
#: Layers that FSDP2 gathers at once: 1 MiB.
GATHERED = 4
BUCKETS = ("buckets-256KiB", "buckets-1MiB", "buckets-4MiB")
DDP = ("ddp-25MB", "ddp-1MB")
#: Of equal buckets. Pairs are compared in more rounds than all arms.
PAIR = ("buckets-1MiB", "ddp-1MB")
#: Arms with an update: the whole optimizer state on each rank, parts of it, parts of all.
WHOLE, WHOLE_BY_DDP = "adamw-buckets-1MiB", "adamw-ddp-1MB"
SLICED, SHARDED = "adamw-sliced", "adamw-fsdp2"
UPDATING = (WHOLE, WHOLE_BY_DDP, SLICED, SHARDED)
UPDATING_PAIR = (SLICED, WHOLE)
#: By which their samples are fewer: an update is a considerable part of such steps only.
FEWER = 4
#: By which the rounds of a pair are more: its arms differ by less than two rounds of one.
_MORE = 4
#: Learning rate of AdamW: values stay about as they are, so steps take as long at the end.
_RATE = 1e-6
#: Passes without an exchange, and an exchange without passes.
APART = ("alone", "exchange")
ARMS = (*APART, "flat", *BUCKETS, *DDP)
UPDATING_ARMS = (*APART, *UPDATING)
#: Of the perceptron whose products are cut into chunks.
INNER, HIDDEN, TOKENS = 1024, 3072, 2048
CHUNKS = ("chunks-1", "chunks-2", "chunks-4", "chunks-8")
PRODUCT_ARMS = (*APART, *CHUNKS)
#: Bytes that a rank sums in a step of the perceptron: outputs, and gradients of the inputs.
PRODUCT_BYTES = 2 * 4 * TOKENS * INNER
#: Turns of each arm before the first that counts.
_WARM_UP = 1
#: By which a turn of the arms with an update is longer: the weights of its last step do not arrive
#: under a forward pass, as in a training only those of the last step of all.
_LONGER = 4


def main() -> None:
    """Run one part; the result goes to a file of this rank."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap.ranks")
    parser.add_argument("--part", choices=tuple(PARTS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("rounds", "turn", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    PARTS[args.part](args)


def _model() -> Any:
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        # By default values fade from layer to layer, and updates of gradients that are divided by
        # more samples are slow, as their squares are subnormal.
        torch.nn.init.kaiming_normal_(layers[-2].weight)
    return torch.nn.Sequential(*layers)


def _world() -> Any:
    import torch  # noqa: PLC0415

    from slurm_elastic.training.ranks.process_group import RankGroup  # noqa: PLC0415

    torch.set_num_threads(1)
    world = RankGroup()
    world.connect()
    world.join()
    return world


def _write(args: argparse.Namespace, rank: int, result: dict[str, Any]) -> None:
    (args.out / f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def _arms(
    args: argparse.Namespace, arms: Sequence[str] = ARMS, *, fewer: int = 1, more: int = 1
) -> None:
    """Measure arms of the layers, as one rank.

    Args:
        args: options of the command line.
        arms: their names.
        fewer: by which the samples are divided.
        more: by which the rounds are multiplied.
    """
    import torch  # noqa: PLC0415

    world = _world()
    inputs = torch.randn(args.batch // fewer, WIDTH)
    steps = {arm: _step(arm, world, inputs) for arm in arms}

    def after(arm: str) -> None:
        if arm == SLICED:
            steps[arm].exchange.receive_weights()  # type: ignore[attr-defined]

    times = _in_turns(args, steps, after, more=more)
    state = {arm: _state_bytes(steps[arm]) for arm in arms if arm in UPDATING}
    _write(args, world.rank, {"times": times, "state": state})
    world.leave()


def _in_turns(
    args: argparse.Namespace,
    steps: dict[str, Callable[[], None]],
    after: Callable[[str], None] = lambda _: None,
    *,
    more: int = 1,
) -> dict[str, list[float]]:
    """Return the seconds of a step of each arm in each round, the order turned around.

    One value more is the CPU time of the machine in an exchange alone, a mean over all rounds.
    """
    import torch  # noqa: PLC0415

    times: dict[str, list[float]] = {arm: [] for arm in steps}
    exchange_s = busy_s = 0.0
    signal = torch.zeros(1)
    for turn in range(_WARM_UP + more * args.rounds):
        for arm in steps if turn % 2 else reversed(steps):
            torch.distributed.all_reduce(signal)
            busy_before = _busy_s() if arm == "exchange" else 0.0
            begun = time.perf_counter()
            count = args.turn * (_LONGER if arm in UPDATING else 1)
            for _ in range(count):
                steps[arm]()
            after(arm)
            if turn >= _WARM_UP:
                seconds = time.perf_counter() - begun
                times[arm].append(seconds / count)
                if arm == "exchange":
                    exchange_s, busy_s = exchange_s + seconds, busy_s + _busy_s() - busy_before
    if exchange_s:
        times[CPU] = [statistics.median(times["exchange"]) * busy_s / exchange_s]
    return times


def _busy_s() -> float:
    """Return the CPU seconds of this machine, those of the kernel among them."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split()[1:8]
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(int, fields)
    ticks = user + nice + system + interrupts + soft_interrupts
    return ticks / os.sysconf("SC_CLK_TCK")


def _products(args: argparse.Namespace, arms: Sequence[str] = PRODUCT_ARMS) -> None:
    """Measure arms of a perceptron whose layers the ranks share, as one rank."""
    import torch  # noqa: PLC0415

    from slurm_elastic.training.ranks.subgroup import subgroup  # noqa: PLC0415
    from slurm_elastic.training.tensor.chunked_products import Chunking  # noqa: PLC0415
    from slurm_elastic.training.tensor.divided_layers import DividedLayers  # noqa: PLC0415
    from slurm_elastic.training.tensor.layer_styles import layer_styles  # noqa: PLC0415

    world = _world()
    torch.manual_seed(0)
    inputs = torch.randn(TOKENS, INNER, requires_grad=True)
    group = subgroup(world, [range(world.size)])

    def perceptron() -> Any:
        first, second = torch.nn.Linear(INNER, HIDDEN), torch.nn.Linear(HIDDEN, INNER)
        return torch.nn.Sequential(first, torch.nn.GELU(), second)

    def own_part() -> Any:  # the same products as a rank's, of layers that nobody shares
        size = HIDDEN // world.size
        first, second = torch.nn.Linear(INNER, size), torch.nn.Linear(size, INNER)
        return torch.nn.Sequential(first, torch.nn.GELU(), second)

    def step(arm: str) -> Callable[[], None]:
        if arm == "exchange":
            sums = [torch.zeros(TOKENS, INNER) for _ in range(2)]
            return lambda: group.add_up(sums, "measuring")
        model = own_part() if arm == "alone" else perceptron()
        if arm != "alone":
            chunking = Chunking(int(arm.removeprefix("chunks-")))
            styles = layer_styles(model, world.size)
            DividedLayers(model, styles, group, name=arm, chunking=chunking)

        def passes() -> None:
            inputs.grad = None
            model.zero_grad(set_to_none=True)
            model(inputs).square().mean().backward()

        return passes

    times = _in_turns(args, {arm: step(arm) for arm in arms})
    _write(args, world.rank, {"times": times})
    world.leave()


def _step(arm: str, world: Any, inputs: Any) -> Callable[[], None]:
    """Return a function that takes one step of an arm."""
    if arm == SHARDED:
        return _sharded_step(inputs)
    if arm == WHOLE_BY_DDP:
        return _plain_step(_in_ddp(_model(), arm), inputs)
    if arm in UPDATING:
        return _updating_step(arm, world, inputs)
    import torch  # noqa: PLC0415

    from slurm_elastic.training.exchange.exchange_schedule import SCHEDULES  # noqa: PLC0415
    from slurm_elastic.training.exchange.gradient_buckets import GradientBuckets  # noqa: PLC0415
    from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer  # noqa: PLC0415

    model: Any = _model()
    if arm in DDP:
        model = _in_ddp(model, arm)
    parameters, control = list(model.parameters()), torch.zeros(CONTROL)
    reducer: Any = None
    if arm in BUCKETS:
        size = next(s.bucket_bytes for s in SCHEDULES if s.name == arm)
        reducer = GradientBuckets(list(reversed(parameters)), world, bucket_bytes=size)
    elif arm in ("flat", "exchange"):
        reducer = Reducer(parameters, world)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        if arm != "exchange":
            loss = model(inputs).square().sum()
            if arm in BUCKETS:
                reducer.begin_last_pass()
            loss.backward()
        if reducer is not None:
            reducer.reduce(control, 2 * len(inputs))

    return step


def _in_ddp(model: Any, arm: str) -> Any:
    """Return a model in DistributedDataParallel, with the buckets of an arm."""
    import torch  # noqa: PLC0415

    size = 25 if arm.endswith("25MB") else 1
    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=size)


def _plain_step(model: Any, inputs: Any) -> Callable[[], None]:
    """Return a function that takes one step, with AdamW, of a model that exchanges gradients."""
    import torch  # noqa: PLC0415

    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


def _updating_step(arm: str, world: Any, inputs: Any) -> Callable[[], None]:
    """Return a function that takes one step of an arm with an optimizer."""
    import torch  # noqa: PLC0415

    from slurm_elastic.training.exchange.gradient_buckets import GradientBuckets  # noqa: PLC0415
    from slurm_elastic.training.exchange.gradient_reducer import CONTROL  # noqa: PLC0415
    from slurm_elastic.training.exchange.sliced_exchange import (  # noqa: PLC0415
        SlicedExchange,
        keep_owned,
    )
    from slurm_elastic.training.ranks.subgroup import Subgroup  # noqa: PLC0415

    model = _model()
    parameters, control = list(model.parameters()), torch.zeros(CONTROL)
    exchange: Any
    optimizer = torch.optim.AdamW(parameters, lr=_RATE)
    if arm == SLICED:
        replicas = Subgroup(world, range(world.size), None)
        keep_owned(optimizer, model, rank=replicas.rank, ranks=replicas.size)
        exchange = SlicedExchange(model, replicas)
    else:
        exchange = GradientBuckets(list(reversed(parameters)), world, bucket_bytes=1 << 20)

    def step() -> None:
        exchange.clear()
        loss = model(inputs).square().sum()
        exchange.begin_last_pass()
        loss.backward()
        exchange.reduce(control, 2 * len(inputs))
        optimizer.step()
        if arm == SLICED:
            exchange.send_weights()

    step.optimizer, step.exchange = optimizer, exchange  # type: ignore[attr-defined]
    return step


def _sharded_step(inputs: Any) -> Callable[[], None]:
    """Return a function that takes one step of PyTorch's FSDP2, some layers gathered at once."""
    import torch  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    layers = list(_model())
    size = 2 * GATHERED
    blocks = [torch.nn.Sequential(*layers[i : i + size]) for i in range(0, len(layers), size)]
    model = torch.nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return _plain_step(model, inputs)


def _state_bytes(step: Any) -> int:
    """Return the size of an arm's optimizer state on this rank."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    values = [value for state in step.optimizer.state.values() for value in state.values()]
    own = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return sum(value.numel() * value.element_size() for value in own)


def _differences(args: argparse.Namespace) -> None:
    """Compare gradients of buckets with those of the flat exchange, as one rank."""
    import torch  # noqa: PLC0415

    from slurm_elastic.training.exchange.gradient_buckets import GradientBuckets  # noqa: PLC0415
    from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer  # noqa: PLC0415

    world = _world()
    flat_model, model = _model(), _model()
    flat = Reducer(flat_model.parameters(), world)
    buckets = GradientBuckets(list(reversed(list(model.parameters()))), world, bucket_bytes=1 << 20)
    differences = []
    for step in range(3):
        inputs = torch.randn(
            8, WIDTH, generator=torch.Generator().manual_seed(9 * step + world.rank)
        )
        flat.clear()
        buckets.clear()
        flat_model(inputs).square().sum().backward()
        buckets.begin_last_pass()
        model(inputs).square().sum().backward()
        for reducer in (flat, buckets):
            reducer.reduce(torch.zeros(CONTROL), 8 * world.size)
        for one, other in zip(flat_model.parameters(), model.parameters(), strict=True):
            largest = float((one.grad - other.grad).abs().max())
            differences.append(largest / float(one.grad.abs().max()))
    _write(args, world.rank, {"differences": differences})
    world.leave()


def _training(args: argparse.Namespace) -> None:
    """Train by `init`, as one rank, and write what it logs about its choice."""
    from slurm_elastic.training import init  # noqa: PLC0415, I001 - before torch
    import torch  # noqa: PLC0415

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    log = args.out / f"log{rank}"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    points = torch.randn(2 * args.batch * 10, WIDTH)
    model = _model()
    job = init(
        model,
        torch.nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=1e-3),
        torch.utils.data.TensorDataset(points, points),
        global_batch=2 * args.batch,
        epochs=-(-args.steps // 10),
        checkpoint_dir=args.out / "ckpt",
        overlap="auto",
    )
    for batch in job:
        job.step(batch)
    job.finish()
    lines = log.read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines if "exchange of gradients" in line]
    _write(args, rank, {"chosen": chosen})


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "arms": _arms,
    "arms-apart": partial(_arms, arms=APART),
    "pair": partial(_arms, arms=PAIR, more=_MORE),
    "updates": partial(_arms, arms=UPDATING_ARMS, fewer=FEWER),
    "updates-pair": partial(_arms, arms=UPDATING_PAIR, fewer=FEWER, more=_MORE),
    "updates-apart": partial(_arms, arms=APART, fewer=FEWER),
    "differences": _differences,
    "products": _products,
    "products-apart": partial(_products, arms=APART),
    "training": _training,
}


if __name__ == "__main__":
    main()
