"""Trainings in spatial groups have the losses of one rank, through changes of the layout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.training.spatial.volume_files import Hdf5Volumes, RawVolumes
from tests.support.patience import PATIENCE_S
from tests.support.trainings.small_buckets import SmallBuckets
from tests.support.trainings.training_runs import (
    EPOCHS,
    MODELS,
    SAMPLES,
    STEPS,
    TrainingRuns,
    lines,
)
from tests.unit.training.parallel.test_mesh_training import same_state

#: Step after which Slurm ends it (one more is done), ranks, directive, and the layout that follows.
WALK = [
    (1, 1, "1-4,parallel=spatial", "1x1"),
    (3, 2, "2-4,parallel=spatial,unit=2", "1x1s2"),
    (7, 4, "2-4,parallel=spatial,unit=2", "2x1s2"),  # gradients are sent in buckets at last
    (9, 4, "4,parallel=spatial,unit=4", "1x1s4"),
    (11, 3, "3,parallel=spatial,unit=3", "1x1s3"),
    (13, 2, "1-4", "2x1"),
    (15, 2, "2,parallel=pipeline", "1x2"),
    (STEPS, 1, "1-4,parallel=spatial", "1x1"),
]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("cosmology", {"optimizer": "adamw", "clip_norm": 0.5, "overlap": "buckets"}),
        ("segmentation", {"optimizer": "sgd", "micro_batch": 4}),
    ],
)
def test_losses_over_a_walk_across_layouts_are_those_of_one_rank(
    tmp_path: Path, model: str, options: dict[str, object]
) -> None:
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, model=model, **options)
    walk = TrainingRuns(tmp_path / "walk")
    # The U-Net is a single layer, which cannot be divided into stages.
    legs = [leg for leg in WALK if leg[-1] != "1x2" or model == "cosmology"]
    for end, size, directive, _ in legs:
        walk.run_until(
            end, size, model=model, directive=directive, faults=[SmallBuckets()], **options
        )
    assert walk.layouts() == [layout for *_, layout in legs]
    assert ("exchange of gradients: buckets" in walk.log()) == ("overlap" in options)
    assert walk.losses() == pytest.approx(alone.losses(), abs=1e-6)
    assert walk.samples() == [Counter(range(SAMPLES))] * EPOCHS
    same_state(walk, alone)


def _files(kind: str, folder: Path) -> Any:
    """Return the samples of the model "cosmology", written to files."""
    generator = torch.Generator().manual_seed(5)  # as in each rank
    volumes, labels = MODELS["cosmology"](generator, {})[1].tensors
    if kind == "hdf5":
        h5py = pytest.importorskip("h5py", reason="h5py is not installed")
        for i, (volume, label) in enumerate(zip(volumes.numpy(), labels.numpy(), strict=True)):
            with h5py.File(folder / f"{i}.h5", "w") as file:
                file["inputs"], file["targets"] = volume, label
        return Hdf5Volumes([str(folder / f"{i}.h5") for i in range(SAMPLES)])
    for i, volume in enumerate(volumes.numpy()):
        volume.tofile(folder / f"{i}.raw")
    paths = [str(folder / f"{i}.raw") for i in range(SAMPLES)]
    return RawVolumes(paths, list(labels), extents=volumes.shape[2:], channels=2)


@pytest.mark.parametrize(("kind", "target_bytes"), [("raw", 0), ("hdf5", 8)])
def test_ranks_of_a_group_read_their_slabs_of_files_and_nothing_twice_if_they_keep_them(
    tmp_path: Path, kind: str, target_bytes: int
) -> None:
    files = _files(kind, tmp_path)
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, model="cosmology", epochs=2)  # the same samples, from memory
    for keep in (False, True):
        runs = TrainingRuns(tmp_path / f"{keep}")
        directive = "2,parallel=spatial,unit=2"
        options = {"model": "cosmology", "epochs": 2, "files": files, "keep_slabs": keep}
        runs.run(2, directive=directive, **options)
        assert runs.losses() == pytest.approx(alone.losses(), abs=1e-6)
        for rank, planes in enumerate((4, 5)):
            read = {}
            for line in lines(runs.out / f"samples-rank{rank}.jsonl"):
                read[line["epoch"]] = line["read"]
            epoch_bytes = SAMPLES * (2 * planes * 6 * 4 * 4 + target_bytes)
            assert read == {0: epoch_bytes, 1: epoch_bytes * (1 if keep else 2)}


def test_dropout_in_a_group_is_that_of_one_rank_which_cuts_nothing(tmp_path: Path) -> None:
    losses = []
    for size in (1, 2):
        runs = TrainingRuns(tmp_path / str(size))
        directive = f"{size},parallel=spatial,unit={size}"
        runs.run(size, model="cosmology", dropout=0.3, directive=directive, epochs=1)
        losses.append(runs.losses())
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize(
    ("directive", "spatial", "size", "line"),
    [
        ("2", (2, 1, 1), 2, "expected parallel=spatial,unit=2"),
        ("", (2, 1, 1), 3, "groups of 2 ranks are invalid for 3 ranks"),
        ("5,parallel=spatial,unit=5", (1, 1, 5), 5, "a volume of 9x6x4 is invalid for a cut of"),
    ],
)
def test_impossible_groups_end_in_one_line(
    tmp_path: Path, directive: str, spatial: tuple[int, ...], size: int, line: str
) -> None:
    runs = TrainingRuns(tmp_path)
    runs.start(size, model="cosmology", directive=directive, spatial=spatial)
    leader = runs.ranks[0]
    leader.join(PATIENCE_S)
    runs.kill()  # those that have not met rank 0 wait for it, until the launcher ends them
    assert leader.exitcode == 1, runs.log()
    assert line in runs.log()
