"""The profile file: times of a training's steps on each measured configuration.

One JSON object per training. All times are seconds of one optimisation step of all GPUs, with
`spread`, the standard error over the repeats. A stall that was measured as none has 0 seconds; an
unknown one is null.

    {"profile": 1, "application": "resnet", "model": "resnet50", "layers": 53,
     "gradient_bytes": 1.02e8, "samples": 50000,
     "configurations": [
       {"gpu_type": "a100", "nodes": 1, "gpus": 4, "batch": 32, "repeats": 3,
        "compute": {"seconds": 0.21, "spread": 0.001}, "interconnect": {...},
        "network": {...}, "prep": {...}, "fetch": null,
        "use": {"busy_cpus": 2.5, "read_bytes_s": null, ...}}]}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
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
    """An invalid profile file; the message names the place and the value."""


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """Seconds of one step, and their standard error over repeats; NaN: of one repeat only."""

    seconds: float
    spread: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledUse:
    """Resources of a node that a training uses for each of its GPUs there; None: not measured.

    Attributes:
        busy_cpus: CPUs that its ranks keep busy.
        read_bytes_s: bytes a second from storage, where the data are read cold.
        memory_bytes_s: bytes a second between memory and the last cache.
        gpu_busy: part of the time in which the GPU computes.
        gpu_memory_busy: part of the time in which its memory is read or written.
    """

    busy_cpus: float | None = None
    read_bytes_s: float | None = None
    memory_bytes_s: float | None = None
    gpu_busy: float | None = None
    gpu_memory_busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledConfiguration:
    """Times of one configuration; None for unknown stalls.

    Attributes:
        gpu_type: "": unknown.
        nodes, gpus: GPUs are those of all nodes.
        batch: samples per GPU and step.
        repeats: runs of each kind.
        compute: on one GPU, with data that needs no loading.
        interconnect: waiting of the GPUs of one node for each other.
        network: further waiting of several nodes for each other.
        prep: waiting for data in memory to be decoded.
        fetch: further waiting for cold storage.
        use: resources used meanwhile on the first node.
    """

    gpu_type: str
    nodes: int
    gpus: int
    batch: int
    repeats: int
    compute: MeasuredTime
    interconnect: MeasuredTime | None = None
    network: MeasuredTime | None = None
    prep: MeasuredTime | None = None
    fetch: MeasuredTime | None = None
    use: ProfiledUse = ProfiledUse()

    @property
    def s(self) -> float | None:
        """Dally's s: fraction of the time in which the gang computes; None: stalls are unknown."""
        if self.gpus == 1:
            return 1.0
        stalls = [t for t in (self.interconnect, self.network) if t is not None]
        if not stalls or (self.nodes > 1 and self.network is None):
            return None
        step_s = self.compute.seconds + sum(t.seconds for t in stalls)
        return self.compute.seconds / step_s if step_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Measurements of a training.

    Attributes:
        application: the controller's name of it.
        model: name to compare by; "": unknown.
        layers: layers with parameters; None: unknown.
        gradient_bytes: bytes that are reduced each step; None: unknown.
        samples: per epoch; None: unknown.
        configurations: no two of one type, shape and batch.
    """

    application: str
    model: str = ""
    layers: int | None = None
    gradient_bytes: float | None = None
    samples: int | None = None
    configurations: tuple[ProfiledConfiguration, ...] = ()


def read(path: Path) -> StepProfile:
    """Read a profile from a file.

    Raises:
        ProfileFileError: it cannot be read, or is invalid.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise ProfileFileError(f"{path}: {error.strerror}") from error
    if len(raw) > LIMIT_BYTES:
        raise ProfileFileError(
            f"{path}: more than {LIMIT_BYTES >> 20} MiB is invalid: expected a file of `selastic"
            " profile`"
        )
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ProfileFileError(
            f"{path}: not JSON ({error}): expected a file of `selastic profile`"
        ) from error
    try:
        return from_body(body)
    except ProfileFileError as error:
        raise ProfileFileError(f"{path}: {error}") from error


def write(path: Path, profile: StepProfile) -> None:
    """Write a profile to a file, which is complete or absent at any time.

    Raises:
        ProfileFileError: it cannot be written.
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
    """Return a profile as JSON values, which `from_body` reads."""
    return {
        "profile": VERSION,
        "application": profile.application,
        "model": profile.model,
        "layers": profile.layers,
        "gradient_bytes": profile.gradient_bytes,
        "samples": profile.samples,
        "configurations": [_to_body(c) for c in profile.configurations],
    }


def from_body(body: object) -> StepProfile:
    """Return the profile of JSON values, checked; unknown fields are ignored.

    Raises:
        ProfileFileError: a value is invalid.
    """
    top = _mapping(body, "the file")
    if top.get("profile") != VERSION:
        raise ProfileFileError(
            f"profile: {top.get('profile')!r} is invalid: expected {VERSION}; measure it anew with"
            " this version"
        )
    rows = top.get("configurations")
    if not isinstance(rows, list) or not rows or len(rows) > LIMIT_CONFIGURATIONS:
        raise ProfileFileError(
            f"configurations: {_short(rows)} is invalid: expected a list of 1 to"
            f" {LIMIT_CONFIGURATIONS}"
        )
    configurations = tuple(_configured(row, f"configurations[{i}]") for i, row in enumerate(rows))
    keys = [(c.gpu_type, c.nodes, c.gpus, c.batch) for c in configurations]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise ProfileFileError(
                f"configurations[{i}]: type, shape and batch of [{keys.index(key)}] is invalid:"
                " expected each once"
            )
    return StepProfile(
        application=_text(top, "application", ""),
        model=_text(top, "model", ""),
        layers=_optional(top, "layers", _count),
        gradient_bytes=_optional(top, "gradient_bytes", _amount),
        samples=_optional(top, "samples", _count),
        configurations=configurations,
    )


def _configured(body: object, place: str) -> ProfiledConfiguration:
    row = _mapping(body, place)
    nodes, gpus = _count(row, "nodes", place), _count(row, "gpus", place)
    if gpus < nodes:
        raise ProfileFileError(
            f"{place}.gpus: {gpus} is invalid: expected at least one on each of {nodes} nodes"
        )
    compute = _timed(row, "compute", place)
    if compute is None or not compute.seconds > 0:
        raise ProfileFileError(
            f"{place}.compute: {_short(row.get('compute'))} is invalid: expected seconds above 0"
        )
    return ProfiledConfiguration(
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
        use=_used(row, place),
    )


def _timed(row: Mapping[str, Any], name: str, place: str) -> MeasuredTime | None:
    if row.get(name) is None:
        return None
    inner = _mapping(row[name], f"{place}.{name}")
    spread = inner.get("spread")
    return MeasuredTime(
        _amount(inner, "seconds", f"{place}.{name}"),
        math.nan if spread is None else _amount(inner, "spread", f"{place}.{name}"),
    )


def _used(row: Mapping[str, Any], place: str) -> ProfiledUse:
    if row.get("use") is None:  # of an older release
        return ProfiledUse()
    inner = _mapping(row["use"], f"{place}.use")
    known = [field.name for field in fields(ProfiledUse) if inner.get(field.name) is not None]
    return ProfiledUse(**{name: _amount(inner, name, f"{place}.use") for name in known})


def _to_body(configured: ProfiledConfiguration) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for field in fields(configured):
        value = getattr(configured, field.name)
        if isinstance(value, MeasuredTime):
            spread = None if math.isnan(value.spread) else value.spread
            value = {"seconds": value.seconds, "spread": spread}
        elif isinstance(value, ProfiledUse):
            value = asdict(value)
        answer[field.name] = value
    return answer


def _mapping(body: object, place: str) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise ProfileFileError(f"{place}: {_short(body)} is invalid: expected an object")
    return body


def _optional(
    row: Mapping[str, Any], name: str, read_one: Callable[[Mapping[str, Any], str, str], Any]
) -> Any:
    return None if row.get(name) is None else read_one(row, name, "")


def _text(row: Mapping[str, Any], name: str, place: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str) or len(value) > _NAME or not value.isprintable():
        raise ProfileFileError(
            f"{_path(place, name)}: {_short(value)} is invalid: expected a name of at most {_NAME}"
            " printable characters"
        )
    return value


def _count(row: Mapping[str, Any], name: str, place: str) -> int:
    value = row.get(name)
    if type(value) is not int or not 1 <= value < 2**53:
        raise ProfileFileError(
            f"{_path(place, name)}: {_short(value)} is invalid: expected a whole number above 0"
        )
    return value


def _amount(row: Mapping[str, Any], name: str, place: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ProfileFileError(
            f"{_path(place, name)}: {_short(value)} is invalid: expected a number of at least 0"
        )
    return float(value)


def _path(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
