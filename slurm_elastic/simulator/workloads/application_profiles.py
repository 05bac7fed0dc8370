"""Profiles: measured step times and gradient statistics of applications, read from tables.

A folder per application, in the form of Sia's published traces (SOSP'23, artifact):

* `placements-TYPE.csv`: `placement` (a digit per node: GPUs used there), `local_bsz`
  (micro-batch per GPU), `step_time` (s, one optimiser step without accumulation), `sync_time`
  (s, its gradient synchronisation);
* `scalability-TYPE.csv` (optional): the same by `num_nodes`, `num_replicas`, for shapes that the
  former lacks;
* `validation-B.csv`: a row per epoch of a run at global batch B: `progress` (cumulative, in steps
  at the smallest B), `grad_sqr`, `grad_var`;
* `application.toml` (optional, our own): `calibration`, `restart_s`, `micro_batches`, `name`s of
  types under `[units]` (GPUs per replica) and `[most]` (largest micro-batch a policy may use).
  Missing values come from `CONSTANTS`.

For a pipeline (`units`) `placement` counts GPUs, `step_time` is the forward time of one stage for
one micro-batch; its all-reduce is not part of the step, as in the artifact.
"""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_elastic.core.errors import InvalidInputError

Shape = tuple[int, ...]

_VALIDATION = re.compile(r"validation-([0-9]{1,9})\.csv", re.ASCII)
_REMEDY = "measure that row again or remove it"


class ApplicationProfileError(InvalidInputError):
    """Tables are invalid; the message names file, line and remedy."""


@dataclass(frozen=True, slots=True)
class ApplicationConstants:
    """Constants of Sia's simulator for an application, which its tables do not have."""

    #: Factor of progress per second: the part of the profile's speed that the cluster reached.
    calibration: float = 1.0
    restart_s: float = 30.0
    micro_batches: int = 1
    units: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)


#: `Application` and `JobConfig` constants of the artifact, by application.
CONSTANTS: Mapping[str, ApplicationConstants] = {
    "cifar10": ApplicationConstants(calibration=1 / 1.8, restart_s=50.0),
    "imagenet": ApplicationConstants(calibration=1 / 1.2, restart_s=250.0),
    "yolov3": ApplicationConstants(calibration=1 / 1.2, restart_s=80.0),
    "bert": ApplicationConstants(calibration=1 / 1.2, restart_s=120.0),
    "deepspeech2": ApplicationConstants(calibration=1 / 1.2, restart_s=25.0, most={"rtx": 57}),
    "ncf": ApplicationConstants(calibration=1 / 1.5, restart_s=15.0),
    "gpt_pmp": ApplicationConstants(micro_batches=48, units={"rtx": 8, "dgx-ext": 2}),
}


@dataclass(frozen=True, slots=True)
class MeasuredCurve:
    """Times at one placement, ascending in the micro-batch."""

    micro_batches: tuple[int, ...]
    step_s: tuple[float, ...]
    sync_s: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class TypeTable:
    """Tables of one application on one GPU type.

    Attributes:
        curves: by placement, rotated to its smallest rotation.
        scalability: rows (nodes, replicas, micro-batch, step s, sync s) in the file's order.
        least, most: micro-batches that policies may choose from.
        unit: GPUs per replica.
        source: the placements file, for messages.
    """

    gpu_type: str
    curves: Mapping[Shape, MeasuredCurve]
    scalability: tuple[tuple[float, ...], ...]
    least: int
    most: int
    unit: int = 1
    source: str = ""


@dataclass(frozen=True, eq=False)
class ApplicationProfile:
    """Profile of one application.

    Attributes:
        batches: global batches with a validation run, ascending; the first is the initial one.
        progress, sqr, var: for each of these batches, a value per epoch.
        types: tables by GPU type.
    """

    name: str
    batches: tuple[int, ...]
    progress: tuple[tuple[float, ...], ...]
    sqr: tuple[tuple[float, ...], ...]
    var: tuple[tuple[float, ...], ...]
    types: Mapping[str, TypeTable]
    calibration: float = 1.0
    restart_s: float = 30.0
    micro_batches: int = 1

    @property
    def epochs(self) -> int:
        """Number of epochs of a job."""
        return len(self.progress[0])


Profiles = Mapping[str, ApplicationProfile]


def smallest_rotation(shape: Iterable[int]) -> Shape:
    """Return a placement without zeros, in its lexicographically smallest rotation.

    >>> smallest_rotation((4, 0, 2, 1))
    (1, 4, 2)
    """
    counts = tuple(int(g) for g in shape if g)
    return min((counts[i:] + counts[:i] for i in range(len(counts))), default=())


def applications(folder: Path) -> tuple[str, ...]:
    """Return the names of the applications in a folder of profiles, sorted.

    Raises:
        ApplicationProfileError: there is none.
    """
    try:
        names = sorted(p.name for p in folder.iterdir() if any(p.glob("placements-*.csv")))
    except OSError as error:
        raise ApplicationProfileError(
            f"{folder}: {error.strerror}; name a folder of profiles"
        ) from None
    if not names:
        raise ApplicationProfileError(
            f"{folder}: no application; it needs a folder per application with"
            " placements-TYPE.csv and validation-BATCH.csv"
        )
    return tuple(names)


def read(
    folder: Path, names: Collection[str], types: Collection[str]
) -> dict[str, ApplicationProfile]:
    """Read the applications `names` on the GPU types `types`.

    Raises:
        ApplicationProfileError: a table is missing, has a gap, or has an invalid value.
    """
    folder_names = applications(folder)
    for name in sorted(names):
        if name not in folder_names:
            raise ApplicationProfileError(
                f"{folder}: application {name[:60]} has no profile; known:"
                f" {', '.join(folder_names)}"
            )
    return {name: read_one(folder / name, types) for name in sorted(names)}


def read_one(folder: Path, types: Collection[str]) -> ApplicationProfile:
    """Read one application; see `read`. Types without a table are left out."""
    name = folder.name
    constants = _constants(folder, CONSTANTS.get(name, ApplicationConstants()))
    tables = {t: _table(folder, t, constants) for t in types if _placements(folder, t).is_file()}
    if not tables:
        profiled_types = sorted(p.stem.partition("-")[2] for p in folder.glob("placements-*.csv"))
        raise ApplicationProfileError(
            f"{folder}: no table for any of the cluster's types {', '.join(types)};"
            f" there are: {', '.join(profiled_types)}"
        )
    runs = {}
    for path in folder.glob("validation-*.csv"):
        match = _VALIDATION.fullmatch(path.name)
        if match is None or not int(match[1]):
            raise ApplicationProfileError(
                f"{path}: its name must be validation-BATCH.csv, e.g. validation-128.csv"
            )
        runs[int(match[1])] = _validation(path, name)
    if not runs:
        raise ApplicationProfileError(
            f"{folder}: no validation-BATCH.csv; at least one run is needed"
        )
    batches = tuple(sorted(runs))
    epochs = len(runs[batches[0]])
    for batch in batches:
        if len(runs[batch]) != epochs:
            raise ApplicationProfileError(
                f"{name}/validation-{batch}.csv:{len(runs[batch]) + 1}: {len(runs[batch])} epochs,"
                f" but validation-{batches[0]}.csv has {epochs}; all runs need as many"
            )
    columns = [tuple(zip(*runs[b], strict=True)) for b in batches]
    return ApplicationProfile(
        name=name,
        batches=batches,
        progress=tuple(c[0] for c in columns),
        sqr=tuple(c[1] for c in columns),
        var=tuple(c[2] for c in columns),
        types=tables,
        calibration=constants.calibration,
        restart_s=constants.restart_s,
        micro_batches=constants.micro_batches,
    )


def _placements(folder: Path, gpu_type: str) -> Path:
    return folder / f"placements-{gpu_type}.csv"


def _table(folder: Path, gpu_type: str, constants: ApplicationConstants) -> TypeTable:
    path = _placements(folder, gpu_type)
    points: dict[Shape, dict[int, tuple[float, float]]] = {}
    for location, row in _rows(path, ("placement", "local_bsz", "step_time", "sync_time")):
        text = row["placement"]
        if not (text.isascii() and text.isdigit()) or not 0 < len(text) <= 1000 or "0" in text:
            raise ApplicationProfileError(
                f"{location}: placement {text[:40]!r} is invalid: expected a digit per node,"
                " e.g. 44"
            )
        shape = smallest_rotation(int(d) for d in text)
        micro, step, sync = _times(row, location)
        if constants.micro_batches == 1 and sync >= step:
            raise ApplicationProfileError(
                f"{location}: sync_time {sync:g} s is not less than step_time {step:g} s; {_REMEDY}"
            )
        if micro in points.setdefault(shape, {}):
            raise ApplicationProfileError(
                f"{location}: duplicate placement {text[:40]} at local_bsz {micro}"
            )
        points[shape][micro] = (step, sync)
    if not points:
        raise ApplicationProfileError(f"{folder.name}/{path.name}: has no row; {_REMEDY}")
    unit = constants.units.get(gpu_type, 1)
    single = smallest_rotation((unit,))
    if unit <= 9 and single not in points:
        raise ApplicationProfileError(
            f"{folder.name}/{path.name}: no row for placement {unit}; measure one replica alone"
        )
    curves = {shape: _curve(times) for shape, times in points.items()}
    sizes = {m for curve in curves.values() for m in curve.micro_batches}
    return TypeTable(
        gpu_type=gpu_type,
        curves=curves,
        scalability=_scalability(folder / f"scalability-{gpu_type}.csv"),
        least=1 if constants.micro_batches > 1 else min(sizes),
        most=1
        if constants.micro_batches > 1
        else min(max(sizes), constants.most.get(gpu_type, 10**9)),
        unit=unit,
        source=f"{folder.name}/{path.name}",
    )


def _curve(points: Mapping[int, tuple[float, float]]) -> MeasuredCurve:
    ordered = sorted(points.items())
    return MeasuredCurve(
        tuple(m for m, _ in ordered),
        tuple(t[0] for _, t in ordered),
        tuple(t[1] for _, t in ordered),
    )


def _scalability(path: Path) -> tuple[tuple[float, ...], ...]:
    if not path.is_file():
        return ()
    measurements = []
    columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    for location, row in _rows(path, columns):
        nodes = _value(row, "num_nodes", location, least=1)
        replicas = _value(row, "num_replicas", location, least=1)
        micro, step, sync = _times(row, location)
        measurements.append((nodes, replicas, float(micro), step, sync))
    return tuple(measurements)


def _validation(path: Path, name: str) -> list[tuple[float, float, float]]:
    epochs: list[tuple[float, float, float]] = []
    for location, row in _rows(path, ("progress", "grad_sqr", "grad_var")):
        progress = _value(row, "progress", location)
        if epochs and progress < epochs[-1][0]:
            raise ApplicationProfileError(
                f"{location}: progress falls from {epochs[-1][0]:g} to {progress:g}; {_REMEDY}"
            )
        sqr, var = _value(row, "grad_sqr", location), _value(row, "grad_var", location)
        if sqr + var <= 0:
            raise ApplicationProfileError(
                f"{location}: grad_sqr and grad_var are both 0; {_REMEDY}"
            )
        epochs.append((progress, sqr, var))
    if not epochs or epochs[-1][0] <= 0:
        raise ApplicationProfileError(f"{name}/{path.name}: makes no progress; {_REMEDY}")
    return epochs


def _times(row: Mapping[str, str], location: str) -> tuple[int, float, float]:
    micro = _value(row, "local_bsz", location, least=1)
    step, sync = _value(row, "step_time", location), _value(row, "sync_time", location)
    if micro != int(micro):
        raise ApplicationProfileError(
            f"{location}: local_bsz {micro:g} is not a whole number; {_REMEDY}"
        )
    if step <= 0:
        raise ApplicationProfileError(f"{location}: step_time must be more than 0 s; {_REMEDY}")
    return int(micro), step, sync


def _value(row: Mapping[str, str], column: str, location: str, *, least: float = 0.0) -> float:
    text = row[column]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not text:
        raise ApplicationProfileError(f"{location}: {column} is empty; {_REMEDY}")
    if not least <= value < 1e30:
        raise ApplicationProfileError(f"{location}: {column} {text[:40]} is invalid; {_REMEDY}")
    return value


def _rows(path: Path, columns: tuple[str, ...]) -> Iterable[tuple[str, Mapping[str, str]]]:
    label = f"{path.parent.name}/{path.name}"
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ApplicationProfileError(f"{path}: {reason}") from None
    reader = csv.reader(lines)
    try:
        yield from _checked_rows(reader, label, columns)
    except csv.Error as error:
        raise ApplicationProfileError(f"{label}:{reader.line_num}: {error}; {_REMEDY}") from None


def _checked_rows(
    reader: Any, label: str, columns: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    header = [cell.strip() for cell in next(reader, [])]
    missing = [c for c in columns if c not in header]
    if missing:
        raise ApplicationProfileError(
            f"{label}:1: column {missing[0]} is missing; it needs {', '.join(columns)}"
        )
    for cells in reader:
        if not cells:
            continue
        location = f"{label}:{reader.line_num}"
        if len(cells) != len(header):
            raise ApplicationProfileError(
                f"{location}: {len(cells)} cells under {len(header)} columns; {_REMEDY}"
            )
        yield location, dict(zip(header, (c.strip() for c in cells), strict=True))


def _constants(folder: Path, default: ApplicationConstants) -> ApplicationConstants:
    """Return `application.toml` over the constants of this module."""
    path = folder / "application.toml"
    if not path.is_file():
        return default
    label = f"{folder.name}/{path.name}"
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ApplicationProfileError(f"{label}: {error}") from None
    known_keys = ("calibration", "restart_s", "micro_batches", "units", "most")
    for key in data:
        if key not in known_keys:
            raise ApplicationProfileError(
                f"{label}: {key} is unknown; known: {', '.join(known_keys)}"
            )

    def number(key: str, otherwise: float, least: float) -> float:
        value = data.get(key, otherwise)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value < 1e9
        ):
            raise ApplicationProfileError(f"{label}: {key} must be a number of at least {least:g}")
        return float(value)

    def counts(key: str, otherwise: Mapping[str, int]) -> Mapping[str, int]:
        table = data.get(key, otherwise)
        if not isinstance(table, Mapping) or not all(
            type(v) is int and 0 < v < 10**9 for v in table.values()
        ):
            raise ApplicationProfileError(
                f"{label}: [{key}] must hold whole numbers from 1 on, by GPU type"
            )
        return dict(table)

    return ApplicationConstants(
        calibration=number("calibration", default.calibration, 1e-6),
        restart_s=number("restart_s", default.restart_s, 0.0),
        micro_batches=int(number("micro_batches", default.micro_batches, 1)),
        units=counts("units", default.units),
        most=counts("most", default.most),
    )
