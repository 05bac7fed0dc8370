"""JSON of a network on volumes, for plans without its model: layers, and tensors that are kept.

    {"version": 1, "volume_layers": [{"name", "kind", "channels": [IN, OUT],
     "extents": [[...], [...]], "windows": [{"kernel", "stride", "padding", "dilation", ...}],
     "parameters", "operations"}], "kept": [{"channels", "extents"}]}

`windows` of transposed convolutions have `output_padding`, those of others `ceil_mode`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.slab_grid import SlidingWindow, TransposedWindow
from slurm_elastic.models.spatial.volume_layers import KeptVolume, VolumeLayer, VolumeNetwork

VERSION = 1
_LAYERS = "volume_layers"
_KINDS = ("convolution", "transposed", "pooling", "normalization", "elementwise", "dense")
#: Largest number in a file, far above that of any network.
_MOST = 10**18


class VolumeNetworkError(InvalidInputError):
    """A file that describes no network on volumes: file, entry and remedy."""


def network_json(network: VolumeNetwork) -> dict[str, Any]:
    """Return a network as JSON."""
    return {
        "version": VERSION,
        _LAYERS: [dataclasses.asdict(layer) for layer in network.layers],
        "kept": [dataclasses.asdict(volume) for volume in network.kept],
    }


def read_network(path: Path) -> VolumeNetwork | None:
    """Return the network in a file; None: it is not JSON with layers on volumes.

    Raises:
        VolumeNetworkError: an entry is invalid.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or _LAYERS not in content:
        return None
    reader = _Entries(str(path))
    layers = [
        reader.layer(f"{_LAYERS}[{i}]", row)
        for i, row in enumerate(reader.rows(_LAYERS, content[_LAYERS]))
    ]
    kept = [
        reader.volume(f"kept[{i}]", row)
        for i, row in enumerate(reader.rows("kept", content.get("kept")))
    ]
    if not layers[0].extents[0]:
        raise reader.error(f"{_LAYERS}[0]", "it has no extents", "list the first layer on volumes")
    return VolumeNetwork(tuple(layers), tuple(kept))


class _Entries:
    """Checked entries of a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def error(self, where: str, problem: str, remedy: str) -> VolumeNetworkError:
        return VolumeNetworkError(f"{self._path}: {where}: {problem}; {remedy}")

    def rows(self, where: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self.error(where, "no list of entries", "write it by `network_json`")
        return value

    def layer(self, where: str, row: Any) -> VolumeLayer:
        name, kind = self._of(row, "name", where), self._of(row, "kind", where)
        if kind not in _KINDS:
            expected = ", ".join(_KINDS)
            raise self.error(where, f"kind {kind!r} is invalid", f"expected one of {expected}")
        channels = self._numbers(f"{where} channels", self._of(row, "channels", where), 1)
        extents = self._of(row, "extents", where)
        if len(channels) != 2 or not isinstance(extents, list) or len(extents) != 2:
            raise self.error(where, "channels or extents", "give those of input and output")
        inputs, outputs = (self._numbers(f"{where} extents", part, 1) for part in extents)
        windows = self._of(row, "windows", where)
        if not isinstance(windows, list) or len(windows) not in (0, len(inputs)):
            raise self.error(f"{where} windows", "invalid", "one for each dimension, or []")
        return VolumeLayer(
            str(name),
            kind,
            (channels[0], channels[1]),
            (inputs, outputs),
            tuple(self._window(f"{where} windows", window) for window in windows),
            *self._numbers(where, [row.get("parameters", 0), row.get("operations", 0)], 0),
        )

    def volume(self, where: str, row: Any) -> KeptVolume:
        (channels,) = self._numbers(where, [self._of(row, "channels", where)], 1)
        extents = self._numbers(f"{where} extents", self._of(row, "extents", where), 1)
        return KeptVolume(channels, extents)

    def _window(self, where: str, row: Any) -> SlidingWindow | TransposedWindow:
        kernel, stride = self._numbers(
            where, [self._of(row, "kernel", where), self._of(row, "stride", where)], 1
        )
        padding, dilation, more = self._numbers(
            where,
            [self._of(row, "padding", where), row.get("dilation", 1), row.get("output_padding", 0)],
            0,
        )
        dilation = max(1, dilation)
        if "output_padding" in row:
            return TransposedWindow(kernel, stride, padding, dilation, more)
        return SlidingWindow(kernel, stride, padding, dilation, bool(row.get("ceil_mode", False)))

    def _of(self, row: Any, key: str, where: str) -> Any:
        if not isinstance(row, dict) or key not in row:
            raise self.error(where, f"{key} is missing", "write the file by `network_json`")
        return row[key]

    def _numbers(self, where: str, values: Any, least: int) -> tuple[int, ...]:
        if not isinstance(values, list | tuple):
            raise self.error(where, f"{values!r:.40} is invalid", "expected a list of numbers")
        for value in values:
            if type(value) is not int or not least <= value <= _MOST:
                expected = f"expected whole numbers from {least} on"
                raise self.error(where, f"{value!r:.40} is invalid", expected)
        return tuple(values)
