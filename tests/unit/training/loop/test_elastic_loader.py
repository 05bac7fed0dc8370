"""Loaders that a script has made, and options."""

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from slurm_elastic.training.dealt_split import DealtSplit
from slurm_elastic.training.loop.elastic_loader import ElasticLoader, LoaderError, settings_of
from slurm_elastic.training.sampler import Cursor, MicroBatchSlice

DATA = list(range(10))


class Stream(IterableDataset):  # type: ignore[misc]
    def __init__(self) -> None:
        self.skipped = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def skip(self, count: int) -> Any:
        self.skipped = count
        return iter(range(count, 10))

    def __iter__(self) -> Any:
        return iter(range(10))


class Steps:
    """Loop that notes its steps."""

    resizes = 0

    def __init__(self, cursor: Cursor) -> None:
        self.cursor, self.counts, self.done = cursor, [], []

    def enter_epoch(self) -> Cursor:
        return self.cursor

    def enter_micro_batch(
        self, piece: MicroBatchSlice, count: int, *, last: bool, after: Cursor | None = None
    ) -> None:
        self.counts.append(count)

    def complete(self, after: Cursor) -> None:
        self.cursor = after
        self.done.append(after)


def loader(dataset: Any, steps: Steps, **options: Any) -> ElasticLoader:
    given = {"shuffle": False, "drop_last": False, "global_batch": 4, "seed": 0, "options": {}}
    split = DealtSplit(rank=0, world_size=1, micro=2)
    return ElasticLoader(dataset, owner=steps, split=split, **(given | options))


def batches(read: ElasticLoader) -> list[list[int]]:
    return [[int(i) for i in batch] for batch in read]


@pytest.mark.parametrize("dataset", [DATA, Stream()])
def test_an_epoch_continues_at_the_cursor_and_the_next_one_begins(dataset: Any) -> None:
    steps = Steps(Cursor(step=5, epoch=1, consumed=4))
    read = loader(dataset, steps)
    assert batches(read) == [[4, 5], [6, 7], [8, 9]]
    assert steps.done == [Cursor(6, 1, 8), Cursor(7, 2, 0)]
    assert steps.counts == [4, 4, 2]
    assert batches(read)[0] == [0, 1]
    if isinstance(dataset, Stream):
        assert (dataset.skipped, dataset.epochs) == (4, [1, 2])


def test_too_few_samples_for_a_whole_batch_end_the_epoch() -> None:
    steps = Steps(Cursor(step=5, epoch=1, consumed=7))
    assert batches(loader(DATA, steps, drop_last=True)) == []
    assert steps.done == [Cursor(5, 2, 0)]
    assert len(loader(DATA, steps, drop_last=True)) == 4
    assert len(loader(DATA, steps)) == 5


def test_a_stream_that_is_shorter_than_before_is_an_error() -> None:
    with pytest.raises(LoaderError, match="ends before sample 11 of epoch 0"):
        batches(loader(Stream(), Steps(Cursor(step=3, epoch=0, consumed=10))))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shuffle": True, "drop_last": True}, {"shuffle": True, "drop_last": True}),
        ({}, {"shuffle": False, "drop_last": False}),
        ({"sampler": DistributedSampler(DATA, 2, 0)}, {"shuffle": True, "drop_last": False}),
        ({"sampler": DistributedSampler(DATA, 2, 0, shuffle=False)}, {"shuffle": False}),
        ({"num_workers": 1, "prefetch_factor": 4}, {"num_workers": 1, "prefetch_factor": 4}),
    ],
)
def test_a_loader_of_the_script_gives_its_dataset_and_options(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    dataset, taken = settings_of(DataLoader(DATA, batch_size=5, collate_fn=list, **options))
    assert dataset is DATA
    assert taken["collate_fn"] is list
    assert expected.items() <= taken.items()


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * 10, 10)},
        {"sampler": RandomSampler(DATA, replacement=True)},
        {"batch_size": None},
    ],
)
def test_samples_that_the_script_chooses_itself_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LoaderError, match="give the dataset itself"):
        settings_of(DataLoader(DATA, **options))
    own = BatchSampler(RandomSampler(DATA), 2, drop_last=True)
    assert settings_of(DataLoader(DATA, batch_sampler=own))[1]["shuffle"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_gives_its_dataset() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    stream = Stream()
    read = torchdata.StatefulDataLoader(stream, batch_size=4, num_workers=0)
    assert isinstance(read, torch.utils.data.DataLoader)
    assert settings_of(read)[0] is stream
