"""Datasets of volumes in files, of which a rank reads its slab alone.

Planes of the neighbours are not read: each voxel of a sample is read once by a group, and the first
layer exchanges the planes that it needs, as all layers do.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from slurm_elastic.core.slab_grid import SpatialCutError, in_space


class RawVolumes:
    """Samples in files of plain numbers, channel by channel, mapped into memory.

    Args:
        paths: one file for each sample.
        targets: one for each sample: a tensor, or the path of a file of labels for each voxel.
        extents: spatial extents of all samples.
        channels: of the inputs.
        dtype: of the inputs' numbers, as numpy writes it; "<i2" are 16-bit integers.
        target_dtype: of files of labels.

    Attributes:
        read_bytes: by this process, so far.
    """

    def __init__(
        self,
        paths: Sequence[str],
        targets: Sequence[Any],
        *,
        extents: Sequence[int],
        channels: int = 1,
        dtype: str = "<f4",
        target_dtype: str = "|u1",
    ) -> None:
        if len(paths) != len(targets):
            raise ValueError(
                f"targets: {len(targets)} for {len(paths)} files is invalid: expected one for each"
            )
        self.extents, self.read_bytes = tuple(extents), 0
        self._paths, self._targets, self._channels = list(paths), list(targets), channels
        self._dtype, self._target_dtype = dtype, target_dtype

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        """Return a whole sample."""
        return self.read(index, tuple(slice(0, n) for n in self.extents))

    def read(self, index: int, slab: tuple[slice, ...]) -> Any:
        """Return a part of a sample; see the module."""
        inputs = self._part(self._paths[index], (self._channels, *self.extents), self._dtype, slab)
        target = self._targets[index]
        if isinstance(target, str):
            target = self._part(target, self.extents, self._target_dtype, slab).long()
        return inputs.float(), target

    def _part(
        self, path: str, shape: tuple[int, ...], dtype: str, slab: tuple[slice, ...]
    ) -> torch.Tensor:
        import numpy as np  # noqa: PLC0415 - not for every start

        try:
            mapped = np.memmap(path, mode="r", dtype=dtype, shape=shape)
        except (OSError, ValueError) as error:
            raise SpatialCutError(
                f"{path}: a volume of {'x'.join(map(str, shape))} numbers of type {dtype} cannot be"
                f" read ({error}); compare extents, channels and dtype with the file"
            ) from None
        part = np.array(mapped[in_space(slab)])
        self.read_bytes += part.nbytes
        return torch.from_numpy(part.astype(part.dtype.newbyteorder("="), copy=False))


class Hdf5Volumes:
    """Samples in HDF5 files, one for each, of which only a hyperslab is read; needs h5py.

    Args:
        paths: of the files.
        inputs: name of the inputs in each file: channels x spatial dimensions, or the latter alone.
        targets: name of the targets: for each voxel, or few values.

    Attributes:
        extents: of all samples, from the first file.
        read_bytes: by this process, so far.
    """

    def __init__(
        self, paths: Sequence[str], *, inputs: str = "inputs", targets: str = "targets"
    ) -> None:
        try:
            h5py: Any = importlib.import_module("h5py")
        except ImportError:
            raise SpatialCutError(
                "Hdf5Volumes: h5py is missing: expected it beside torch; install h5py, or use"
                " RawVolumes"
            ) from None
        self._open = h5py.File
        self._paths, self._inputs, self._targets = list(paths), inputs, targets
        self.read_bytes = 0
        with self._file(0) as file:
            shape = file[inputs].shape
        self._has_channels = len(shape) > 3
        self.extents = tuple(int(n) for n in shape[self._has_channels :])

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        """Return a whole sample."""
        return self.read(index, tuple(slice(0, n) for n in self.extents))

    def read(self, index: int, slab: tuple[slice, ...]) -> Any:
        """Return a part of a sample; see the module."""
        with self._file(index) as file:
            inputs, targets = file[self._inputs], file[self._targets]
            own = inputs[in_space(slab)]
            cut = tuple(targets.shape[-len(self.extents) :]) == self.extents
            labels = targets[in_space(slab)] if cut else targets[()]
        self.read_bytes += own.nbytes + labels.nbytes
        volume = torch.from_numpy(own).float()
        values = torch.as_tensor(labels)
        return (
            volume if self._has_channels else volume.unsqueeze(0),
            values if values.is_floating_point() else values.long(),
        )

    def _file(self, index: int) -> Any:
        path = self._paths[index]
        try:
            file = self._open(path, "r")
        except OSError as error:
            raise SpatialCutError(f"{path}: cannot be read ({error}); expected HDF5") from None
        for name in (self._inputs, self._targets):
            if name not in file:
                names = ", ".join(sorted(file)) or "none"
                file.close()
                raise SpatialCutError(
                    f"{path}: {name!r} is not in the file: expected one of {names}; pass inputs="
                    " and targets="
                )
        return file
