"""Ranks as threads that write one checkpoint, each with some layers of one network."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointDirectory
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager, agree, same
from slurm_elastic.training.checkpoint.training_state import TrainingState
from slurm_elastic.training.sampler import Cursor
from tests.support.patience import PATIENCE_S

NAMES = ("embed", "first", "norm", "second", "head")


class MessageStore:
    """Messages between ranks, in place of torch's store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def publish(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, timeout_s)
            return self.values.get(key)


class FakeRankGroup:
    """`RankGroup` of ranks that are threads."""

    def __init__(self, rank: int, size: int, store: MessageStore) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.publish, self.wait_for = store.publish, store.wait_for

    def open_channel(self) -> MessageStore:
        return self._store


def layers() -> list[tuple[str, torch.nn.Module]]:
    torch.manual_seed(0)
    return [
        ("embed", torch.nn.Embedding(7, 4)),
        ("first", torch.nn.Linear(4, 4)),
        ("norm", torch.nn.BatchNorm1d(4)),
        ("second", torch.nn.Linear(4, 4)),
        ("head", torch.nn.Linear(4, 7, bias=False)),
    ]


def tied(held: Sequence[tuple[str, torch.nn.Module]]) -> Sequence[tuple[str, torch.nn.Module]]:
    """Give the head the embedding's weight, where both are held."""
    named = dict(held)
    if "embed" in named and "head" in named:
        named["head"].weight = named["embed"].weight
    return held


ALIASES = {"head.weight": "embed.weight"}


def state(
    held: Sequence[str] = NAMES, *, part: int = 0, tie: bool = False, **options: Any
) -> TrainingState:
    """Return a new state of these layers, with two parameter groups, which may be empty."""
    held_layers = [(name, layer) for name, layer in layers() if name in held]
    if tie:
        held_layers = list(tied(held_layers))
    model = torch.nn.Sequential(OrderedDict(held_layers))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    if held == NAMES:
        options.setdefault("full_shapes", None)
    else:
        options["full_shapes"] = {
            k: tuple(v.shape)
            for k, v in torch.nn.Sequential(OrderedDict(layers())).state_dict().items()
        }
    return TrainingState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
        part=part,
        aliases=ALIASES if tie else {},
        **options,
    )


def step(trained: TrainingState, seed: int) -> None:
    """Do an optimisation step with gradients that depend on names only, not on the layout."""
    for name, parameter in trained.model.named_parameters():
        known = trained.aliases.get(name, name)
        generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, known)))
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    trained.optimizer.step()
    trained.scheduler.step()


class CheckpointRanks:
    """Checkpoint managers of several ranks, in one directory."""

    def __init__(
        self,
        root: Path,
        states: Sequence[TrainingState],
        *,
        writers: Sequence[int] | None = None,
        patience_s: float = PATIENCE_S,
        **options: Any,
    ) -> None:
        self.root = root
        self.log_lines: list[str] = []
        self.store = MessageStore()
        self.states = list(states)
        count = len(self.states)
        self.managers = [
            CheckpointManager(
                CheckpointDirectory(root, keep=2, log=self.log_lines.append),
                held,
                FakeRankGroup(rank, count, self.store),  # type: ignore[arg-type]
                every_s=100.0,
                identity={"samples": 40},
                log=self.log_lines.append,
                writers=range(count) if writers is None else writers,
                patience_s=patience_s,
                **options,
            )
            for rank, held in enumerate(self.states)
        ]

    def save(self, number: int, **options: Any) -> list[bool]:
        return run_concurrently(
            [lambda k=k: k.save(Cursor(number, 0, number), **options) for k in self.managers]
        )

    def restore(self) -> list[Cursor | None]:
        return run_concurrently([lambda k=k: restore_newest(k) for k in self.managers])

    def step(self, seed: int) -> None:
        for held in self.states:
            step(held, seed)


def restore_newest(manager: CheckpointManager) -> Cursor | None:
    """Restore the newest checkpoint."""
    newest = agree(manager._checkpoints, manager._rank_group)
    return newest and manager.restore(newest)


def run_concurrently(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all functions, each in its thread; return the results, or raise the first error."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]
    assert len(results) == len(calls), "a rank hangs"
    return [results[i] for i in range(len(calls))]


def differences(live: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are not equal, bit for bit."""
    return sorted(
        name
        for name in live.keys() | read.keys()
        if name not in live or name not in read or not same(live[name], read[name])
    )
