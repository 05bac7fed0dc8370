"""Scaling curves given by the user, for jobs without measurements.

Accounting has the time of a job on its GPUs, not its time on other numbers of GPUs. A curve gives
that: its speed on one GPU is 1. Our definition; the formula of `amdahl` is Amdahl's (1967).

>>> curve("amdahl:0.95").speed(8), curve("none").speed(8), curve("linear").speed(8)
(5.925925925925926, 1.0, 8.0)
>>> curve("1=1;2=1.9;4=3.5").speed(3)
2.7
"""

from __future__ import annotations

import csv
import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from slurm_elastic.core.errors import InvalidInputError

_FORMS = "linear, amdahl:0.95 (the parallel part), none (cannot be resized) or 1=1;2=1.9;4=3.5"


class ScalingError(InvalidInputError):
    """A curve is invalid; the message names it (file and line) and what is expected."""

    def __init__(self, text: str) -> None:
        # It quotes a file, whose lines may have any length.
        super().__init__(text if len(text) <= 500 else f"{text[:500]}...")


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Speed of a job on several GPUs, relative to one.

    Attributes:
        name: text of the curve.
        parallel: Amdahl's parallel part, 0-1; 1 is linear.
        points: (GPUs, speed) in place of that, ascending from (1, 1.0); linear between them,
            constant beyond the last.
        elastic: False: it runs in its requested size only.
    """

    name: str
    parallel: float = 1.0
    points: tuple[tuple[int, float], ...] = ()
    elastic: bool = True

    def speed(self, gpus: float) -> float:
        """Return the speed relative to one GPU; 1 for a job that is not elastic."""
        if not self.elastic:
            return 1.0
        if not self.points:
            return 1.0 / (1.0 - self.parallel + self.parallel / gpus)
        for (low, slow), (high, fast) in pairwise(self.points):
            if gpus <= high:
                return slow + (fast - slow) * (gpus - low) / (high - low)
        return self.points[-1][1]


def curve(text: str) -> ScalingCurve:
    """Read a curve; see the examples above.

    Raises:
        ScalingError: the text has none of the forms, or is impossible.
    """
    name = text.strip()
    kind, _, argument = name.partition(":")
    if name == "linear":
        return ScalingCurve(name)
    if name == "none":
        return ScalingCurve(name, elastic=False)
    if kind == "amdahl":
        part = _number(argument)
        if part is None or not 0 <= part <= 1:
            raise ScalingError(f'"{name}": the parallel part must be from 0 to 1: amdahl:0.95')
        return ScalingCurve(name, parallel=part)
    if "=" in name:
        return ScalingCurve(name, points=_points(name))
    raise ScalingError(f'"{name}" is invalid: expected a scaling curve: {_FORMS}')


@dataclass(frozen=True, slots=True)
class CurveRules:
    """Curve of each job: that of the first pattern that matches the job's name."""

    rules: tuple[tuple[str, ScalingCurve], ...]

    def of(self, job_name: str) -> ScalingCurve:
        """Return the curve of a job.

        Raises:
            ScalingError: no pattern matches.
        """
        for pattern, scaling in self.rules:
            if fnmatch.fnmatchcase(job_name, pattern):
                return scaling
        raise ScalingError(
            f'no scaling curve for job "{job_name}"; end the file with a line "*,amdahl:0.9"'
        )


def rules(text: str) -> CurveRules:
    """Return one curve for all jobs, or the rules of a file.

    A file is CSV with the columns `match` (shell pattern of the job's name) and `scaling`.

    Raises:
        ScalingError: neither a curve nor a readable file.
    """
    path = Path(text)
    if not path.is_file():
        try:
            return CurveRules((("*", curve(text)),))
        except ScalingError as error:
            if "/" in text or path.suffix:
                raise ScalingError(
                    f"{text}: no such file, and no curve: expected {_FORMS}"
                ) from None
            raise error from None
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ScalingError(f"{text}: {reason}") from None
    return CurveRules(_rows(path.name, lines))


def _rows(name: str, lines: Sequence[str]) -> tuple[tuple[str, ScalingCurve], ...]:
    reader = csv.reader(lines)
    try:
        return _rules_of(name, reader)
    except csv.Error as error:
        raise ScalingError(f"{name}:{reader.line_num}: {error}") from None


def _rules_of(name: str, reader: Any) -> tuple[tuple[str, ScalingCurve], ...]:
    header = [cell.strip() for cell in next(reader, [])]
    if header != ["match", "scaling"]:
        raise ScalingError(f"{name}:1: the first line must be: match,scaling")
    rules_read = []
    for row in reader:
        if not any(cell.strip() for cell in row) or row[0].lstrip().startswith("#"):
            continue
        location = f"{name}:{reader.line_num}"
        if len(row) != 2 or not row[0].strip():
            raise ScalingError(f"{location}: write PATTERN,CURVE, e.g. gpt*,amdahl:0.99")
        try:
            rules_read.append((row[0].strip(), curve(row[1])))
        except ScalingError as error:
            raise ScalingError(f"{location}: {error}") from None
    if not rules_read:
        raise ScalingError(f"{name}: has no rule; write e.g. *,amdahl:0.9")
    return tuple(rules_read)


def _points(name: str) -> tuple[tuple[int, float], ...]:
    points = []
    for part in name.split(";"):
        gpus, _, speed = part.partition("=")
        value = _number(speed)
        if not gpus.strip().isdecimal() or value is None or value <= 0:
            raise ScalingError(f'"{name}": "{part.strip()}" must be GPUS=SPEED, e.g. 4=3.5')
        points.append((int(gpus), value))
    if points[0] != (1, 1.0) or any(a[0] >= b[0] for a, b in pairwise(points)):
        raise ScalingError(f'"{name}": must begin with 1=1 and count GPUs upwards')
    for count, factor in points:
        if factor > 2 * count:
            raise ScalingError(f'"{name}": {count} GPUs cannot be {factor:g} times as fast as one')
    return tuple(points)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
