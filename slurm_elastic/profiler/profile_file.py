"""The profile file: where a training's time went on each configuration that was measured.

One JSON object per training. All times are seconds of one optimisation step of all GPUs; with each
goes its `spread`, the standard error over the repeats. A stall that was measured and is none has
0 seconds; one that could not be told is null.

    {"profile": 1, "application": "resnet", "model": "resnet50", "layers": 53,
     "gradient_bytes": 1.02e8, "samples": 50000,
     "configurations": [
       {"gpu_type": "a100", "nodes": 1, "gpus": 4, "batch": 32, "repeats": 3,
        "compute": {"seconds": 0.21, "spread": 0.001}, "interconnect": {...},
        "network": {...}, "prep": {...}, "fetch": null}]}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slurm_elastic.core.errors import InvalidInputError

#: Version of the schema, the value of `profile`.
VERSION = 1
#: Most bytes of a file, and most configurations in it.
LIMIT_BYTES = 1 << 20
LIMIT_CONFIGURATIONS = 1000
#: Longest name.
_NAME = 200


class ProfileFileError(InvalidInputError):
    """A file is no profile; the text names the place and what is wrong."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one step, and their standard error over repeats; NaN: of one repeat only."""

    seconds: float
    spread: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """One configuration's times; of stalls None where they could not be told.

    Attributes:
        gpu_type: "" if nobody has named it.
        nodes, gpus: GPUs are those of all nodes.
        batch: samples per GPU and step.
        repeats: runs of each kind.
        compute: with data that is there already, on one GPU.
        interconnect: what all GPUs of one node wait for each other.
        network: what several nodes wait more than one would.
        prep: waiting for data that is in memory to be decoded.
        fetch: what reading from cold storage adds.
    """

    gpu_type: str
    nodes: int
    gpus: int
    batch: int
    repeats: int
    compute: Timed
    interconnect: Timed | None = None
    network: Timed | None = None
    prep: Timed | None = None
    fetch: Timed | None = None

    @property
    def s(self) -> float | None:
        """Dally's s: part of the time in which the gang computes; None: stalls are not known."""
        if self.gpus == 1:
            return 1.0
        known = [t for t in (self.interconnect, self.network) if t is not None]
        if not known or (self.nodes > 1 and self.network is None):
            return None
        whole = self.compute.seconds + sum(t.seconds for t in known)
        return self.compute.seconds / whole if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """What was measured of a training.

    Attributes:
        application: name of the job that trains it, under which a controller knows it.
        model: name to compare by; "" if nobody has given one.
        layers: layers with parameters; None: not known.
        gradient_bytes: bytes that are reduced each step; None: not known.
        samples: per epoch; None: not known.
        configurations: no two of one type, shape and batch.
    """

    application: str
    model: str = ""
    layers: int | None = None
    gradient_bytes: float | None = None
    samples: int | None = None
    configurations: tuple[Configured, ...] = ()


def read(path: Path) -> StepProfile:
    """The profile in a file.

    Raises:
        ProfileError: it cannot be read, or is none.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise ProfileFileError(f"{path}: {error.strerror}") from error
    if len(raw) > LIMIT_BYTES:
        raise ProfileFileError(f"{path}: larger than {LIMIT_BYTES >> 20} MiB; it is no profile")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ProfileFileError(f"{path}: it is not JSON ({error})") from error
    try:
        return from_body(body)
    except ProfileFileError as error:
        raise ProfileFileError(f"{path}: {error}") from error


def write(path: Path, profile: StepProfile) -> None:
    """Write a profile; the file is whole or not there.

    Raises:
        ProfileError: it cannot be written.
    """
    text = json.dumps(to_body(profile), indent=1) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ProfileFileError(f"{path}: {error.strerror}") from error


def to_body(profile: StepProfile) -> dict[str, Any]:
    """What `from_body` takes."""
    return {
        "profile": VERSION,
        "application": profile.application,
        "model": profile.model,
        "layers": profile.layers,
        "gradient_bytes": profile.gradient_bytes,
        "samples": profile.samples,
        "configurations": [_plain(c) for c in profile.configurations],
    }


def from_body(body: object) -> StepProfile:
    """A checked profile of what JSON says; fields that are not known are ignored.

    Raises:
        ProfileError: it is none.
    """
    top = _mapping(body, "the file")
    if top.get("profile") != VERSION:
        raise ProfileFileError(f"profile is {top.get('profile')!r}, not {VERSION}; measure it anew")
    rows = top.get("configurations")
    if not isinstance(rows, list) or not rows or len(rows) > LIMIT_CONFIGURATIONS:
        raise ProfileFileError(f"configurations: 1 to {LIMIT_CONFIGURATIONS} are needed, in a list")
    found = tuple(_configured(row, f"configurations[{i}]") for i, row in enumerate(rows))
    keys = [(c.gpu_type, c.nodes, c.gpus, c.batch) for c in found]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ProfileFileError(f"configurations[{i}]: the same as [{keys.index(key)}]")
    return StepProfile(
        application=_text(top, "application", ""),
        model=_text(top, "model", ""),
        layers=_optional(top, "layers", _count),
        gradient_bytes=_optional(top, "gradient_bytes", _seconds),
        samples=_optional(top, "samples", _count),
        configurations=found,
    )


def _configured(body: object, place: str) -> Configured:
    row = _mapping(body, place)
    nodes, gpus = _count(row, "nodes", place), _count(row, "gpus", place)
    if gpus < nodes:
        raise ProfileFileError(f"{place}.gpus: {gpus} on {nodes} nodes cannot be")
    compute = _timed(row, "compute", place)
    if compute is None or not compute.seconds > 0:
        raise ProfileFileError(f"{place}.compute: it must take time")
    return Configured(
        gpu_type=_text(row, "gpu_type", place),
        nodes=nodes,
        gpus=gpus,
        batch=_count(row, "batch", place),
        repeats=_count(row, "repeats", place),
        compute=compute,
        interconnect=_timed(row, "interconnect", place),
        network=_timed(row, "network", place),
        prep=_timed(row, "prep", place),
        fetch=_timed(row, "fetch", place),
    )


def _timed(row: Mapping[str, Any], name: str, place: str) -> Timed | None:
    if row.get(name) is None:
        return None
    inner = _mapping(row[name], f"{place}.{name}")
    spread = inner.get("spread")
    return Timed(
        _seconds(inner, "seconds", f"{place}.{name}"),
        math.nan if spread is None else _seconds(inner, "spread", f"{place}.{name}"),
    )


def _plain(configured: Configured) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for field in fields(configured):
        value = getattr(configured, field.name)
        if isinstance(value, Timed):
            spread = None if math.isnan(value.spread) else value.spread
            value = {"seconds": value.seconds, "spread": spread}
        answer[field.name] = value
    return answer


def _mapping(body: object, place: str) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise ProfileFileError(f"{place}: an object is needed, not {_shown(body)}")
    return body


def _optional(
    row: Mapping[str, Any], name: str, read_one: Callable[[Mapping[str, Any], str, str], Any]
) -> Any:
    return None if row.get(name) is None else read_one(row, name, "")


def _text(row: Mapping[str, Any], name: str, place: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str) or len(value) > _NAME or not value.isprintable():
        raise ProfileFileError(f"{_at(place, name)}: a name is needed, not {_shown(value)}")
    return value


def _count(row: Mapping[str, Any], name: str, place: str) -> int:
    value = row.get(name)
    if type(value) is not int or not 1 <= value < 2**53:
        raise ProfileFileError(
            f"{_at(place, name)}: a count above 0 is needed, not {_shown(value)}"
        )
    return value


def _seconds(row: Mapping[str, Any], name: str, place: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ProfileFileError(
            f"{_at(place, name)}: a number that is not negative is needed, not {_shown(value)}"
        )
    return float(value)


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
