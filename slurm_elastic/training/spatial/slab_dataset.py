"""Samples of which each rank of a spatial group loads its slab.

A dataset that can read a part of a sample offers `extents`, the spatial extents that all samples
have, and

    def read(self, index, slab):          # slab: one slice for each spatial dimension
        return inputs[in_space(slab)], targets

Its targets are cut as the inputs if there is one for each voxel, and whole else. Of other datasets
whole samples are read and cut here: correct, but each rank reads everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.core.slab_grid import SlabGrid, SpatialCutError, in_space
from slurm_elastic.training.init_arguments import pair


def sample_extents(dataset: Any) -> tuple[int, ...]:
    """Return the spatial extents of the samples, those of the first one if need be.

    Raises:
        SpatialCutError: inputs without spatial dimensions.
    """
    if hasattr(dataset, "read") and hasattr(dataset, "extents"):
        return tuple(int(n) for n in dataset.extents)
    inputs, _ = pair(dataset[0])
    shape = tuple(getattr(inputs, "shape", ()))
    if len(shape) < 2:
        raise SpatialCutError(
            f"dataset: inputs of shape {shape} are invalid for a sample that is cut in space:"
            " expected channels x spatial dimensions"
        )
    return tuple(int(n) for n in shape[1:])


@dataclass(frozen=True)
class SlabDataset:
    """Slabs of the samples of a dataset, for one rank.

    Attributes:
        dataset: of whole samples.
        grid: place of this rank.
        extents: of all samples.
        keep: keep what was read in memory.
    """

    dataset: Any
    grid: SlabGrid
    extents: tuple[int, ...]
    keep: bool = False
    _kept: dict[int, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.grid.check(self.extents)

    @property
    def reads_slabs(self) -> bool:
        """Whether only the slab is read."""
        return hasattr(self.dataset, "read") and hasattr(self.dataset, "extents")

    def __len__(self) -> int:
        count: int = len(self.dataset)
        return count

    def __getitem__(self, index: int) -> Any:
        """Return inputs and targets of a sample, as far as this rank needs them."""
        if index in self._kept:
            return self._kept[index]
        slab = self.grid.slab(self.extents)
        if self.reads_slabs:
            sample = pair(self.dataset.read(index, slab))
        else:
            inputs, targets = pair(self.dataset[index])
            sample = self._cut(inputs, slab, index), self._cut_targets(targets, slab)
        if self.keep:
            self._kept[index] = sample
        return sample

    def _cut(self, inputs: Any, slab: tuple[slice, ...], index: int) -> Any:
        shape = tuple(getattr(inputs, "shape", ()))
        if shape[1:] != self.extents:
            raise SpatialCutError(
                f"dataset: sample {index} of {'x'.join(map(str, shape[1:]))} voxels is invalid:"
                f" expected {'x'.join(map(str, self.extents))} as of the others"
            )
        return inputs[in_space(slab)]

    def _cut_targets(self, targets: Any, slab: tuple[slice, ...]) -> Any:
        shape = tuple(getattr(targets, "shape", ()))
        return targets[in_space(slab)] if shape[-len(slab) :] == self.extents else targets
