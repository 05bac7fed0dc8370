"""Logs that the training jobs write: every sample, every loss."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from contrib.demo.demo_cluster import ROOT
from contrib.demo.scenario import Training

_CHECKER = ROOT / "docs" / "examples" / "check_run.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """Contents of one job's log.

    Attributes:
        faults: samples or steps that are missing or occur twice; for jobs with the library only.
        losses: loss by step.
        worlds: numbers of ranks by run; for jobs with the library only.
    """

    faults: tuple[str, ...] = ()
    losses: Mapping[int, float] = field(default_factory=dict)
    worlds: Mapping[int, frozenset[int]] = field(default_factory=dict)


def read(out: Path, training: Training) -> TrainingLog:
    """Read the log of a job, or of its reference."""
    checker = _checker()
    try:
        losses: dict[int, float] = checker.losses(out)
        faults: list[str] = []
        if training.library:
            faults = checker.faults(out, training.samples, training.epochs)
        return TrainingLog(
            faults=tuple(faults), losses=losses, worlds=_worlds(out) if training.library else {}
        )
    except FileNotFoundError as error:
        return TrainingLog(faults=(f"{Path(error.filename).name} was never written",))
    except (json.JSONDecodeError, KeyError) as error:
        return TrainingLog(faults=(f"a line of its log is broken: {error}",))


def _worlds(out: Path) -> dict[int, frozenset[int]]:
    worlds_by_run: dict[int, set[int]] = {}
    for line in (out / "losses.jsonl").read_text().splitlines():
        entry = json.loads(line)
        worlds_by_run.setdefault(entry["run"], set()).add(entry["world"])
    return {run: frozenset(worlds) for run, worlds in worlds_by_run.items()}


def _checker() -> ModuleType:
    """Load docs/examples/check_run.py, which is a script outside of any package."""
    spec = importlib.util.spec_from_file_location("check_run", _CHECKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
