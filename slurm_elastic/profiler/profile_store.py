"""Directory of the measurements of a profile, so that a second call makes only missing runs.

settings.json            settings of the measurements, so that no others are mixed in
4@2-warm-3.json          {"seconds": [...], "facts": {...}}: a shape, a block, a repeat
4@2-3.log                output of the program
profile.json             the profile
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.job.profile_request import BLOCKS
from slurm_elastic.profiler.profile_file import ProfiledUse
from slurm_elastic.profiler.profiling_plan import (
    MissingTime,
    PlanError,
    ProfiledShape,
    ProfilingLaunch,
)
from slurm_elastic.profiler.run_use import UseSample, mean_use

_SETTINGS = "settings.json"
_ANSWER = ".answer-"
_RUN = re.compile(rf"([0-9@]+)-({'|'.join(BLOCKS)})-(\d+)\.json", re.ASCII)
#: A result with more is not read.
_LIMIT_BYTES = 8 << 20


class StoreError(InvalidInputError):
    """A directory that cannot be used; the message is one line with the remedy."""


class ProfileStore:
    """Measurements in a directory.

    Args:
        directory: made if it is absent; on a file system that all nodes share.
        settings: JSON values; must equal those of earlier calls.
        again: discard the measurements of earlier calls.

    Attributes:
        steps: mean seconds per step of each measurement.
        facts: values that runs have stated about the training; the latest counts.
        uses: what was used in each measurement.

    Raises:
        StoreError: the directory cannot be written, or was made with other settings.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, again: bool) -> None:
        self.directory = directory.absolute()
        self.steps: dict[MissingTime, float] = {}
        self.facts: dict[str, Any] = {}
        self.uses: dict[MissingTime, ProfiledUse] = {}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if again:
                self._clear()
            self._check_settings(json.loads(json.dumps(settings)))
            for path in sorted(self.directory.iterdir()):
                if path.name.startswith(_ANSWER):
                    path.unlink()  # of a call that was killed
                self._read(path)
        except OSError as error:
            raise StoreError(f"--dir {directory}: {error.strerror}") from error

    def log(self, launch: ProfilingLaunch) -> Path:
        """Return the path of the program's output."""
        return self.directory / f"{launch.shape}-{launch.repeat}.log"

    def answer(self, launch: ProfilingLaunch) -> Path:
        """Return a new path for the program's answer.

        It must be new, as a file system may cache for a minute that a file does not exist.
        """
        mark = os.urandom(4).hex()
        return self.directory / f"{_ANSWER}{launch.shape}-{launch.repeat}-{mark}.json"

    def keep(
        self, launch: ProfilingLaunch, answered: object, samples: Sequence[UseSample] = ()
    ) -> list[str]:
        """Store the answer of a run.

        Args:
            launch: the run.
            answered: {"blocks": [{"block", "seconds", "ended"}], "facts": {}}; invalid parts are
                ignored. A block without the time of its end was the last of the run.
            samples: what the run used.

        Returns:
            The blocks that are measured now.
        """
        body = answered if isinstance(answered, dict) else {}
        rows, facts = body.get("blocks"), body.get("facts")
        stored_blocks = []
        for row in rows if isinstance(rows, list) else ():
            block = row.get("block") if isinstance(row, dict) else None
            if block not in launch.blocks or (seconds := _seconds(row.get("seconds"))) is None:
                continue
            need = MissingTime(launch.shape, launch.repeat, block)
            path = self.directory / f"{launch.shape}-{block}-{launch.repeat}.json"
            ended = _epoch(row.get("ended")) or max((s.end for s in samples), default=0.0)
            record = {
                "seconds": seconds,
                "facts": facts if isinstance(facts, dict) else {},
                "use": asdict(mean_use(samples, ended - sum(seconds), ended)),
            }
            _write(path, record)
            self._read(path)
            stored_blocks += [block] if need in self.steps else []
        return stored_blocks

    def read_answer(self, path: Path) -> object:
        """Read and remove the program's answer; None: there is none, or it is no JSON."""
        try:
            return _read_json(path)
        finally:
            path.unlink(missing_ok=True)

    def batch(self) -> int | None:
        """Return the samples per GPU and step that runs have stated, or None."""
        value = self.facts.get("batch")
        return value if type(value) is int and value > 0 else None

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        path = self.directory / _SETTINGS
        earlier = _read_json(path) if path.exists() else None
        if earlier is None:
            if any(_RUN.fullmatch(p.name) for p in self.directory.iterdir()):
                raise StoreError(
                    f"--dir {self.directory}: settings.json is invalid: expected JSON; give"
                    " --again to measure anew"
                )
            _write(path, settings)
        elif earlier != settings:
            earlier_settings = earlier if isinstance(earlier, dict) else {}
            changed = ", ".join(k for k in settings if earlier_settings.get(k) != settings[k])
            raise StoreError(
                f"--dir {self.directory}: holds a profile with another {changed or 'setting'}; give"
                " another --dir, or --again to measure anew"
            )

    def _clear(self) -> None:
        for path in self.directory.iterdir():
            if _RUN.fullmatch(path.name) or path.name == _SETTINGS:
                path.unlink()

    def _read(self, path: Path) -> None:
        match = _RUN.fullmatch(path.name)
        body = _read_json(path) if match else None
        if match is None or not isinstance(body, dict):
            return
        seconds = _seconds(body.get("seconds"))
        try:
            need = MissingTime(ProfiledShape.parse(match[1]), int(match[3]), match[2])
        except PlanError:
            return
        if seconds:
            self.steps[need] = statistics.fmean(seconds)
            facts = body.get("facts")
            self.facts |= facts if isinstance(facts, dict) else {}
            self.uses[need] = _use(body.get("use"))


def _seconds(values: object) -> list[float] | None:
    """Return the values as times of steps, in seconds; None: they are none."""
    if not isinstance(values, list) or not values:
        return None
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not (math.isfinite(value) and 0 < value < 1e6):
            return None
    return [float(v) for v in values]


def _epoch(value: object) -> float | None:
    """Return the value as a time (epoch s); None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < 1e11 else None


def _use(value: object) -> ProfiledUse:
    """Return the use in a file; without what is not valid."""
    row: dict[str, Any] = value if isinstance(value, dict) else {}
    names = [field.name for field in fields(ProfiledUse)]
    known = {n: row[n] for n in names if type(row.get(n)) in (int, float)}
    return ProfiledUse(**{n: value for n, value in known.items() if 0 <= value < 1e15})


def _read_json(path: Path) -> object:
    try:
        with path.open("rb") as file:
            raw = file.read(_LIMIT_BYTES + 1)
        return json.loads(raw) if len(raw) <= _LIMIT_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _write(path: Path, body: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(body), encoding="utf-8")
    partial.replace(path)
