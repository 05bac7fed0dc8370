"""Ranks that train equal models with the flat exchange, in buckets and with sliced state."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slurm_elastic.training.exchange.exchange_schedule import SLICED
from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer
from slurm_elastic.training.exchange.sliced_exchange import SlicedExchange, owners_of
from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.gradient_noise import GradientNoise
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.measure.step_times import StepTimer
from slurm_elastic.training.parallel.data_parallel import DataParallel
from slurm_elastic.training.parallel.sliced_parallel import SlicedParallel
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.subgroup import Subgroup
from slurm_elastic.training.sampler import BatchSplit, Cursor, Sampler
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.step_requests import StepRequests
from tests.support.trainings.small_buckets import SmallBuckets
from tests.support.trainings.training_runs import OPTIMIZERS

WIDTH, LABELS = 6, 4
#: Of a case; the third step has no sample for one of the ranks.
STEPS = 4
#: Of the comparison of the noise: the first two are not measured, and eight are reported.
NOISE_STEPS = 11
CLIP_NORM = 0.05


class Case(NamedTuple):
    """One training that is compared with that of the flat exchange.

    Attributes:
        optimizer: one of `OPTIMIZERS`.
        passes: micro-batches of each rank in a step.
        clipped: the norm of the gradient is limited, in effect in all steps.
        prefix: the script has set `requires_grad=False` for the first layer.
    """

    optimizer: str
    passes: int
    clipped: bool
    prefix: bool


def cases(size: int) -> list[Case]:
    """Return all combinations for two ranks; for more, limit the norm or freeze, not both."""
    kinds = itertools.product(("plain-sgd", "sgd", "adamw"), (1, 3), (False, True), (False, True))
    return [case for case in itertools.starmap(Case, kinds) if size == 2 or case[2] != case[3]]


class MixedNet(nn.Module):
    """Layers that are tied, of another type, unused, or used for some samples only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.never = nn.Linear(3, 3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.front = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.front.weight
        self.wide = nn.Linear(WIDTH, LABELS).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        if float(x[0, 0]) > 0.3:
            hidden = hidden + self.sometimes(x)
        hidden = self.tied(self.middle(self.front(hidden).tanh()).tanh()).tanh()
        return self.wide(hidden.double()).float()


def ordinary_net() -> nn.Module:
    """Return layers of about the same size, as most models have."""
    torch.manual_seed(2)
    layers = [nn.Linear(WIDTH, 16), *(nn.Linear(16, 16) for _ in range(24)), nn.Linear(16, LABELS)]
    return nn.Sequential(*layers)


class TransferRecord(StepProfiler):
    """Record of the transfers of a sliced exchange, in the order of a step.

    Attributes:
        sent_early: buckets of gradients that left during the backward pass, by step.
        awaited: weights that arrived after the first layer had computed, by forward pass.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sent_early: list[int] = []
        self.awaited: list[int] = []
        self._sent = self._waits = 0
        guard = options["rank_group"].guard
        start, wait = type(guard).start, type(guard).wait

        def counted_start(begin: Any, tensor: torch.Tensor, operation: str) -> Any:
            self._sent += operation == "adding up gradients"
            return start(guard, begin, tensor, operation)

        def counted_wait(started: Any, **given: Any) -> None:
            self._waits += started.operation == "receiving weights"
            wait(guard, started, **given)

        guard.start, guard.wait = counted_start, counted_wait

    def watch(self, model: nn.Module, first: nn.Module) -> None:
        """Count from the end of the first layer's forward pass to the end of the model's."""

        def begin(*_: Any) -> None:
            self._waits = 0

        first.register_forward_hook(begin)
        model.register_forward_hook(lambda *_: self.awaited.append(self._waits))

    def begin(self) -> None:
        self._sent = 0
        super().begin()

    def reducing(self) -> tuple[torch.Tensor, float]:
        self.sent_early.append(self._sent)
        return super().reducing()


class Training:
    """A model, its optimizer, and the strategy by which ranks train it.

    Args:
        world: all ranks.
        model: of this training alone.
        optimizer: one of `OPTIMIZERS`.
        overlap: one of `exchange_schedule.OVERLAPS`.
        micro: most samples of a micro-batch.
    """

    def __init__(
        self, world: RankGroup, model: nn.Module, optimizer: str, *, overlap: str, micro: int | None
    ) -> None:
        self.model, self.overlap = model, overlap
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[optimizer](trained)
        self.noise, self.timer = GradientNoise(initial_batch=8), StepTimer()
        kind = TransferRecord if overlap == SLICED else StepProfiler
        self.profiler = kind(
            timer=self.timer, noise=self.noise, parameters=trained, rank_group=world
        )
        options: dict[str, Any] = {
            "micro_batch": micro,
            "rank_group": world,
            "signals": Signals(),
            "step_profiler": self.profiler,
        }
        loss = nn.CrossEntropyLoss()
        self.strategy: Any
        if overlap == SLICED:
            self.strategy = SlicedParallel(model, self.optimizer, loss, **options)
        else:
            self.strategy = DataParallel(model, loss, overlap=overlap, **options)
        self.strategy.join(fresh=True)
        self.losses: list[float] = []
        self.schedules: set[str] = set()

    def step(self, batch: Batch, clip_norm: float | None = None) -> list[torch.Tensor | None]:
        """Train one step; return the gradients before they are clipped."""
        loss, _ = self.strategy.step(batch, StepRequests(), lambda: None)
        self.losses.append(loss)
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        if clip_norm is not None:
            self.strategy.clip(clip_norm)
        self.profiler.optimizing()
        self.optimizer.step()
        self.profiler.end()
        self.timer.end()
        self.schedules.add(self.timer.exchange)
        return gradients

    @property
    def state_bytes(self) -> int:
        """Size of the optimizer's state, but for its counts of steps."""
        values = [v for state in self.optimizer.state.values() for v in state.values()]
        return sum(v.numel() * v.element_size() for v in values if torch.is_tensor(v) and v.dim())


def batches(size: int, split: BatchSplit, count: int, *, rest: int = 0) -> Iterator[Batch]:
    """Yield this rank's part of steps; every third has `rest` samples, if any."""
    batch = 6 * size - 1
    samples = 2 * batch + rest
    generator = torch.Generator().manual_seed(8)
    points = torch.randn(samples, WIDTH, generator=generator)
    # Mostly one class, so that the gradient is larger than its noise. No gradient is so near zero
    # that AdamW, which divides by its size, makes a large difference of another order of addition.
    labels = torch.randint(LABELS, (samples,), generator=generator)
    labels[torch.rand(samples, generator=generator) < 0.7] = 0
    sampler = Sampler(samples=samples, global_batch=batch, epochs=count, seed=3)
    for share in itertools.islice(sampler.shares(Cursor(), split), count):
        parts = [(points[indices], labels[indices]) for indices in share.samples]
        yield Batch(
            step=share.after.step,
            epoch=share.before.epoch,
            indices=share.indices,
            last_of_epoch=False,
            parts=parts,
            share=share,
        )


def compared(world: RankGroup, case: Case) -> dict[str, Any]:
    """Train with the flat exchange and with sliced state; return the differences and more."""
    model = MixedNet()
    model.first.requires_grad_(not case.prefix)
    micro = None if case.passes == 1 else 2
    sliced = Training(world, copy.deepcopy(model), case.optimizer, overlap=SLICED, micro=micro)
    flat = Training(world, model, case.optimizer, overlap="none", micro=micro)
    sliced.profiler.watch(sliced.model, sliced.model.first)
    clip_norm = CLIP_NORM if case.clipped else None
    differences, clipped = [0.0], []
    owner_of = owners_of(model, world.size)
    for batch in batches(world.size, flat.strategy.split, STEPS, rest=world.size - 1):
        assert len(batch.parts) in (0, 1, case.passes)
        expected = flat.step(batch, clip_norm)
        gradients = sliced.step(batch, clip_norm)
        clipped.append(_norm(expected) > CLIP_NORM)
        for gradient, whole, owner in zip(gradients, expected, owner_of, strict=True):
            assert (gradient is None) == (whole is None or owner != world.rank)
            if gradient is not None:
                differences.append(_difference(gradient, whole))
    sliced.strategy.close()
    pairs = zip(sliced.model.named_parameters(), model.parameters(), strict=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    return {
        "gradients": max(differences),
        "weights": {name: _difference(p, other) for (name, p), other in pairs},
        "losses": [sliced.losses, flat.losses],
        "clipped": clipped,
        "sent_early": sliced.profiler.sent_early,
        "awaited": sliced.profiler.awaited,
        "extra_bytes": sliced.strategy.reduced_bytes
        - sum(p.numel() * p.element_size() for p in trained),
        "unused": {n for n, p in model.named_parameters() if p.requires_grad and p.grad is None},
    }


def _norm(gradients: list[torch.Tensor | None]) -> float:
    return float(sum(float(g.square().sum()) for g in gradients if g is not None) ** 0.5)


def _difference(tensor: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest value."""
    scale = float(expected.detach().abs().max()) or 1.0
    return float((tensor - expected).detach().abs().max()) / scale


def noise_fields(world: RankGroup) -> dict[str, Any]:
    """Return by schedule the reported noise of trainings of one seed, and the schedules used."""
    outcome: dict[str, Any] = {}
    for overlap in ("none", "buckets", SLICED):
        training = Training(world, MixedNet(), "adamw", overlap=overlap, micro=2)
        for batch in batches(world.size, training.strategy.split, NOISE_STEPS):
            training.step(batch, CLIP_NORM)
        training.strategy.close()
        outcome[overlap] = training.noise.fields(), sorted(training.schedules)
    return outcome


def state_bytes(world: RankGroup) -> tuple[int, int]:
    """Return the bytes of AdamW's state on this rank, and without slices."""
    trainings = [
        Training(world, ordinary_net(), "adamw", overlap=overlap, micro=None)
        for overlap in (SLICED, "none")
    ]
    for training in trainings:
        for batch in batches(world.size, training.strategy.split, 1):
            training.step(batch)
        training.strategy.close()
    own, whole = (training.state_bytes for training in trainings)
    return own, whole


def exchange_recomputed(world: RankGroup) -> None:
    """Exchange gradients that two recomputed segments complete, one after the other."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    reference = copy.deepcopy(model)
    # Each parameter leaves as soon as it is complete.
    exchange = SlicedExchange(model, Subgroup(world, range(world.size), None), bucket_bytes=1)
    flat = Reducer(reference.parameters(), world)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(2):
        samples = torch.randn(5, 6, generator=generator)
        exchange.clear()
        flat.clear()
        exchange.begin_last_pass()
        for net in (model, reference):
            hidden = samples.clone().requires_grad_()
            for _ in range(2):
                hidden = checkpoint(net, hidden, use_reentrant=True).tanh()
            hidden.square().sum().backward()
        control = torch.full((CONTROL,), float(world.rank))
        assert exchange.reduce(control, 5 * world.size) == flat.reduce(control, 5 * world.size)
        for one, other, owner in zip(
            model.parameters(), reference.parameters(), owners_of(model, world.size), strict=True
        ):
            assert (one.grad is not None) == (owner == world.rank)
            assert one.grad is None or torch.equal(one.grad, other.grad)
    exchange.close()


def compare_schedules(rank: int, size: int, out: Path) -> None:
    """Compare the schedules in all cases; leave the outcome in a file of this rank."""
    SmallBuckets().prepare(rank)
    world = RankGroup()
    world.connect()
    world.join()
    outcome: dict[str, Any] = {"cases": [compared(world, case) for case in cases(size)]}
    outcome["noise"] = noise_fields(world)
    outcome["state"] = state_bytes(world)
    if size == 2:
        exchange_recomputed(world)
    torch.save(outcome, out / f"{rank}.pt")
    world.leave()
