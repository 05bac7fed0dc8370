"""Each rank of a group reads its slab of a sample, and nothing twice if it keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurm_elastic.core.slab_grid import SlabGrid, SpatialCutError
from slurm_elastic.training.spatial.slab_dataset import SlabDataset, sample_extents
from slurm_elastic.training.spatial.volume_files import Hdf5Volumes, RawVolumes

EXTENTS = (5, 4, 3)
SAMPLES = 3


def volumes() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return inputs and a class for each voxel."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(SAMPLES, 2, *EXTENTS)).astype("<f4")
    return inputs, (inputs[:, 0] > 0).astype("|u1")


def raw(folder: Path) -> RawVolumes:
    inputs, labels = volumes()
    for i in range(SAMPLES):
        inputs[i].tofile(folder / f"{i}.raw")
        labels[i].tofile(folder / f"{i}.labels")
    return RawVolumes(
        [str(folder / f"{i}.raw") for i in range(SAMPLES)],
        [str(folder / f"{i}.labels") for i in range(SAMPLES)],
        extents=EXTENTS,
        channels=2,
    )


def hdf5(folder: Path) -> Hdf5Volumes:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    inputs, labels = volumes()
    for i in range(SAMPLES):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file["inputs"], file["targets"] = inputs[i], labels[i]
    return Hdf5Volumes([str(folder / f"{i}.h5") for i in range(SAMPLES)])


@pytest.mark.parametrize("kind", [raw, hdf5])
def test_ranks_read_their_slabs_and_together_each_voxel_once(tmp_path: Path, kind: Any) -> None:
    inputs, labels = volumes()
    read_bytes = 0
    whole = torch.zeros(2, *EXTENTS)
    for rank in range(4):
        files = kind(tmp_path)
        grid = SlabGrid((2, 1, 2), rank)
        dataset = SlabDataset(files, grid, sample_extents(files), keep=True)
        for _ in range(2):  # the second epoch reads nothing
            for index in range(SAMPLES):
                own, targets = dataset[index]
                slab = grid.slab(EXTENTS)
                assert torch.equal(own, torch.from_numpy(inputs[index][(..., *slab)]))
                assert torch.equal(targets, torch.from_numpy(labels[index][slab]).long())
        whole[(..., *slab)] += 1
        read_bytes += files.read_bytes
    assert read_bytes == inputs.nbytes + labels.nbytes
    assert bool((whole == 1).all())


def test_whole_samples_are_cut_and_targets_of_a_sample_stay_whole() -> None:
    inputs, _ = volumes()
    samples = [(torch.from_numpy(inputs[i]), torch.tensor([1.0, 2.0])) for i in range(SAMPLES)]
    dataset = SlabDataset(samples, SlabGrid((2, 1, 1), 1), sample_extents(samples))
    own, targets = dataset[1]
    assert torch.equal(own, samples[1][0][:, 2:])
    assert targets.tolist() == [1.0, 2.0]


def test_faulty_files_are_named(tmp_path: Path) -> None:
    files = raw(tmp_path)
    (tmp_path / "1.raw").write_bytes(b"short")
    with pytest.raises(SpatialCutError, match=r"1\.raw: a volume of 2x5x4x3 numbers .*cannot be"):
        files[1]
    unequal = [(torch.zeros(1, *EXTENTS), 0), (torch.zeros(1, 5, 5, 5), 0)]
    dataset = SlabDataset(unequal, SlabGrid((2, 1, 1)), sample_extents(unequal))
    with pytest.raises(SpatialCutError, match="sample 1 of 5x5x5 voxels"):
        dataset[1]
    hdf5(tmp_path)
    with pytest.raises(SpatialCutError, match=r"'mass' is not in the file: .* inputs, targets"):
        Hdf5Volumes([str(tmp_path / "0.h5")], inputs="mass")
