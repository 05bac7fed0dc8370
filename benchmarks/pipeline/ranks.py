"""One rank of `python -m benchmarks.pipeline`: profile, plan, and all arms in turn.

Rank 0 prints what was found as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.pipeline import slow_network

if TYPE_CHECKING:
    from slurm_elastic.core.layers import LayerProfile
    from slurm_elastic.models.pipedream.partitioner import PipelinePartition

#: Micro-batches of a step; 2, 3, 4 and 6 divide it.
MICRO_BATCHES = 12
#: Steps' worth of samples that `pipedream` takes between two drains.
_ROW = 12
#: Numbers per sample that the first layer reads.
_FEATURES = 8
#: Of the model `linear`: its layers, their width, samples of a micro-batch.
_LINEAR_LAYERS, _WIDTH, _LINEAR_SAMPLES = 8, 1024, 32
#: PyTorch's default bucket, of a model that is not shrunk.
_DDP_BUCKET_MB = 25.0
#: Learning rate.
RATE = 0.01
#: How long a rank waits for one that is gone.
_PATIENCE_S = 300.0
#: Times each layer, and each message, is measured.
_REPEAT = 5


def main() -> None:
    """Join the network, then the process group, and run."""
    parser = rank_parser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--shrink", type=float, required=True)
    parser.add_argument("--slow", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    report(args, lambda: Bench(args).run())


def rank_parser() -> argparse.ArgumentParser:
    """Return a parser of the options of every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--bits", type=float, required=True)
    return parser


def report(args: argparse.Namespace, measure: Callable[[], dict[str, Any]]) -> None:
    """Join the network and the process group, measure, and print the figures on rank 0."""
    slow_network.plug_in(args.rank, args.bits)
    os.environ |= {
        "RANK": str(args.rank),
        "WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": slow_network.address(0),
        "MASTER_PORT": str(slow_network.PORT),
        "USE_LIBUV": "0",
    }
    # Here: ranks tell that they live before they import torch, all at the same time.
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=_PATIENCE_S))
    figures = measure()
    if args.rank == 0:
        print(json.dumps(figures), flush=True)
    torch.distributed.barrier()


class MeasuredPlan(NamedTuple):
    """Stages planned by measured layers and link.

    Attributes:
        plan: the stages.
        profile: of the layers; None on all ranks but 0.
        wire: bytes/s of a port.
        parameters: numbers of the whole model.
    """

    plan: PipelinePartition
    profile: LayerProfile | None
    wire: dict[str, float]
    parameters: int


class Bench:
    """All measurements, on this rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.ranks = args.rank, args.ranks
        self.rounds, self.steps = args.rounds, args.steps
        self.shrink, self.slow = args.shrink, args.slow
        self._model = args.model
        #: Of the parameters, and of the samples.
        self.seed = 0
        #: Of the layers of the model `linear`.
        self.width = _WIDTH
        #: Samples of one GPU's minibatch, the planner's unit; of a step.
        scale = _LINEAR_SAMPLES if args.model == "linear" else 1
        self.minibatch = MICRO_BATCHES // args.ranks * scale
        self.batch = MICRO_BATCHES * scale

    def measured_plan(self) -> MeasuredPlan:
        """Measure layers and link, and plan the stages by them."""
        import torch.distributed as dist  # noqa: PLC0415

        layers = self.layers()
        profile = measured(layers, self.minibatch) if self.rank == 0 else None
        dist.barrier()
        size = sum(p.numel() for _, layer in layers for p in layer.parameters())
        wire = bandwidth(size)
        plan = [planned(profile, self.ranks, wire["both_ways"])] if profile else [None]
        dist.broadcast_object_list(plan)
        assert plan[0] is not None
        return MeasuredPlan(plan[0], profile, wire, size)

    def run(self) -> dict[str, Any]:
        """Measure; all ranks return, rank 0's is complete."""
        import torch.distributed as dist  # noqa: PLC0415

        plan, profile, wire, size = self.measured_plan()
        arms = self.arms(plan)
        walls: dict[str, list[float]] = {name: [] for name in arms}
        losses: dict[str, list[float]] = {name: [] for name in arms}
        for name, (_, block) in arms.items():
            losses[name] += block(1)
        for turn in range(self.rounds):
            names = list(arms)
            # Each begins a round in its turn.
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                begun = time.perf_counter()
                losses[name] += arms[name][1](arms[name][0])
                dist.barrier()
                walls[name].append((time.perf_counter() - begun) / arms[name][0])
        figures: dict[str, Any] = {"step_s": walls, "wire": wire, "parameter_bytes": 4 * size}
        if profile:
            figures |= self.account(profile, plan, wire["both_ways"])
            figures["difference"] = difference(losses)
        return figures

    def layers(self) -> list[tuple[str, Any]]:
        """Return the whole model, with the same parameters each time and on each rank."""
        import torch  # noqa: PLC0415

        from benchmarks.pipeline import emulated_layers  # noqa: PLC0415
        from slurm_elastic.models.pipedream import profile_reader  # noqa: PLC0415

        torch.manual_seed(self.seed)
        if self._model == "linear":
            sizes = pairwise([_FEATURES, *[self.width] * _LINEAR_LAYERS])
            return [
                (f"linear{i}", torch.nn.Sequential(torch.nn.Linear(*size), torch.nn.Tanh()))
                for i, size in enumerate(sizes)
            ]
        if self._model == "lm":
            profile = emulated_layers.language_model()
        else:
            profile = emulated_layers.chained(profile_reader.read(Path(self._model)))
        return emulated_layers.modules(
            profile, samples=self.minibatch, shrink=self.shrink, slow=self.slow
        )

    def arms(self, plan: PipelinePartition) -> dict[str, tuple[int, Callable[[int], list[float]]]]:
        """Return the arms by name: steps in a block, and a function that takes so many."""
        replicas = [stage.replicas for stage in plan.stages]
        lengths = [len(stage.layers) for stage in plan.stages]
        whole = [len(self.layers())]
        return {
            "data parallel": (self.steps, self.synchronous([self.ranks], whole, "1f1b")),
            "data parallel, DDP": (self.steps, self.overlapped()),
            "gpipe": (self.steps, self.synchronous(replicas, lengths, "gpipe")),
            "1f1b": (self.steps, self.synchronous(replicas, lengths, "1f1b")),
            "pipedream": (_ROW, self.asynchronous(replicas, lengths)),
        }

    def synchronous(
        self, replicas: Sequence[int], lengths: Sequence[int], schedule: str, rate: float = RATE
    ) -> Callable[[int], list[float]]:
        """Return steps with our engine; with one stage data parallel, one all-reduce per step."""
        from slurm_elastic.training.pipeline import PipelineEngine, StageLayout, cut  # noqa: PLC0415

        layout, stages = StageLayout.of(*replicas), cut(self.layers(), lengths)
        count = self.ranks if len(replicas) == 1 else MICRO_BATCHES
        engine = PipelineEngine(
            {s: stages[s] for s in layout.held_by(self.rank)},
            layout,
            schedule=schedule,
            micro_batches=count,
            loss=squares,
        )
        optimizer = sgd(engine.parameters(), rate)
        data = self.data(count)

        def block(steps: int) -> list[float]:
            losses = []
            for _ in range(steps):
                losses.append(engine.step(data(), divisor=self.batch))
                optimizer.step()
            return losses

        return block

    def overlapped(self, rate: float = RATE) -> Callable[[int], list[float]]:
        """Return steps of PyTorch's own data parallelism, which overlaps the backward pass."""
        import torch  # noqa: PLC0415

        model = torch.nn.Sequential(*(layer for _, layer in self.layers()))
        ddp = torch.nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=_DDP_BUCKET_MB / self.shrink
        )
        optimizer = sgd(model.parameters(), rate)
        data = self.data(self.ranks)

        def block(steps: int) -> list[float]:
            losses = []
            for _ in range(steps):
                inputs, targets = data()[self.rank]
                loss = squares(ddp(inputs), targets) / self.minibatch
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                mean = loss.detach() / self.ranks
                torch.distributed.all_reduce(mean)
                losses.append(float(mean))
            return losses

        return block

    def asynchronous(
        self, replicas: Sequence[int], lengths: Sequence[int], rate: float = RATE
    ) -> Callable[[int], list[float]]:
        """Return PipeDream's steps: minibatches of one GPU's size, an update after each."""
        from slurm_elastic.training.pipeline import PipelineEngine, StageLayout, cut  # noqa: PLC0415

        layout, stages = StageLayout.of(*replicas), cut(self.layers(), lengths)
        engine = PipelineEngine(
            {s: stages[s] for s in layout.held_by(self.rank)},
            layout,
            schedule="pipedream",
            loss=lambda output, targets: squares(output, targets) / self.minibatch,
        )
        optimizer = sgd(engine.parameters(), rate)
        data = self.data(self.ranks)

        def block(steps: int) -> list[float]:
            return engine.run([pair for _ in range(steps) for pair in data()], optimizer.step)

        return block

    def data(self, parts: int) -> Callable[[], list[tuple[Any, Any]]]:
        """Return the next step's samples in so many parts, the same for all arms."""
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(1 + self.seed)

        def following() -> list[tuple[Any, Any]]:
            inputs = torch.randn(self.batch, _FEATURES, generator=generator)
            targets = self.targets(inputs, generator)
            return list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))

        return following

    def targets(self, inputs: Any, generator: Any) -> Any:
        """Return a number for each sample; these arms are only timed, so any will do."""
        import torch  # noqa: PLC0415

        return torch.randn(len(inputs), 1, generator=generator)

    def account(
        self, profile: LayerProfile, plan: PipelinePartition, both_ways: float
    ) -> dict[str, Any]:
        """Return the plan, and the time of a step by it."""
        from benchmarks.pipeline.schedule_replay import Times, replay  # noqa: PLC0415
        from slurm_elastic.training.pipeline import StageLayout  # noqa: PLC0415

        layout = StageLayout.of(*(stage.replicas for stage in plan.stages))
        by_name = {layer.name: layer for layer in profile.layers}
        times = Times(
            forward_s=[sum(by_name[n].forward_s for n in s.layers) for s in plan.stages],
            backward_s=[sum(by_name[n].backward_s for n in s.layers) for s in plan.stages],
            transfer_s=[2 * before.output_bytes / both_ways for before, _ in pairwise(plan.stages)],
            reduction_s=[
                4 * (s.replicas - 1) / s.replicas * s.parameter_bytes / both_ways
                for s in plan.stages
            ],
        )
        row = _ROW * self.ranks
        micro = times.part(self.ranks / MICRO_BATCHES)
        return {
            "plan": [
                {"replicas": s.replicas, "layers": len(s.layers), "compute_s": s.compute_s,
                 "parameter_bytes": s.parameter_bytes, "output_bytes": s.output_bytes}
                for s in plan.stages
            ],
            "single_s": profile.compute_s,
            "planned_s": {
                "data parallel": self.ranks * plan.data_parallel_time_s,
                **dict.fromkeys(("gpipe", "1f1b", "pipedream"), self.ranks * plan.pipeline_time_s),
            },
            "replayed_s": {
                "gpipe": replay(layout, "gpipe", MICRO_BATCHES, micro),
                "1f1b": replay(layout, "1f1b", MICRO_BATCHES, micro),
                "pipedream": replay(layout, "pipedream", row, times) / _ROW,
            },
        }  # fmt: skip


def measured(layers: Sequence[tuple[str, Any]], samples: int) -> LayerProfile:
    """Return a minibatch's profile, by the library's profiler on this rank alone."""
    import torch  # noqa: PLC0415

    from slurm_elastic.training.measure.layer_profile import LayerProfiler  # noqa: PLC0415

    model = torch.nn.Sequential(*(layer for _, layer in layers))
    profiler = LayerProfiler(layers, device=torch.device("cpu"), skipped=1, steps=_REPEAT)
    for _ in range(1 + _REPEAT):
        profiler.begin()
        squares(model(torch.randn(samples, _FEATURES)), torch.zeros(samples, 1)).backward()
        model.zero_grad()
    profiler.finish()
    assert profiler.measured is not None
    return profiler.measured.at(samples)


def bandwidth(numbers: int) -> dict[str, float]:
    """Return bytes/s of a port, sent plus received.

    That is what the planner's costs need: `4 (r - 1) / r` of the parameters is what a replica
    sends and receives in a reduction, and `2 O` an activation and its gradient.

    Returns:
        "both_ways": in an all-reduce of so many float32 on all ranks; "exchange": of two
        ranks that send each other a quarter of it.
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    ranks, rank = dist.get_world_size(), dist.get_rank()
    buffer, here, there = torch.zeros(numbers), torch.zeros(numbers // 4), torch.zeros(numbers // 4)

    def exchange() -> None:
        if rank < 2:
            # In this order: gloo's "ready to receive" would wait behind what is sent.
            works = [dist.irecv(there, 1 - rank), dist.isend(here, 1 - rank)]
            for work in works:
                work.wait()

    def seconds(what: Callable[[], object]) -> float:
        taken = []
        for _ in range(1 + _REPEAT):
            dist.barrier()
            begun = time.perf_counter()
            what()
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken[1:])

    reduced = seconds(lambda: dist.all_reduce(buffer))
    exchanged = seconds(exchange)
    return {
        "both_ways": 4 * (ranks - 1) / ranks * 4 * numbers / reduced,
        "exchange": 2 * 4 * (numbers // 4) / exchanged,
    }


def planned(profile: LayerProfile, ranks: int, both_ways: float) -> PipelinePartition:
    """Return the fastest pipeline, with activations, by the costs of the published code."""
    from slurm_elastic.models.pipedream.partitioner import Level, partition  # noqa: PLC0415

    return partition(profile, [Level(ranks, both_ways)], compression=1.0)


def difference(losses: dict[str, list[float]]) -> float:
    """Return the largest relative difference of the synchronous arms' losses from the first's."""
    first = losses["data parallel"]
    return max(
        abs(a - b) / abs(a)
        for name, row in losses.items()
        if name != "pipedream"
        for a, b in zip(first, row, strict=True)
    )


def squares(output: Any, targets: Any) -> Any:
    """Return the loss, summed over samples."""
    return (output - targets).square().mean(dim=1).sum()


def sgd(parameters: Any, rate: float) -> Any:
    """Return the optimizer of all arms."""
    import torch  # noqa: PLC0415

    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


if __name__ == "__main__":
    main()
