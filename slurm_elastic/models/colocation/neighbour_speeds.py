"""Speeds of neighbours on each node type, learned while jobs share: model and evidence together.

What was measured of a pair of applications counts for that pair: n measurements have the weight
n / (n + 1), so that two outweigh the model. All measurements of a node type train its model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_elastic.models.colocation.slowdown_model import (
    FEW,
    UNKNOWN_ERROR,
    AloneLoad,
    SharedRun,
    SlowdownModel,
)

#: Latest measurements of a pair that are kept.
_OF_PAIR = 20
#: Applications in the runs of a model that predicts for others.
_APPLICATIONS = 4
#: A model is fitted anew when so many times as many runs are known.
_RENEW = 1.2

#: An application and the GPUs of the node that it holds, of a job and of another one.
Pair = tuple[str, int, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourSpeed:
    """Predicted speed of a job beside another one.

    Attributes:
        speed: relative to its speed alone.
        error: how much too high that may be, with 90 % certainty.
        measured: measurements of this pair of applications.
        modelled: whether a model predicts this pair.
        resource: one of `slowdown_model.RESOURCES`, for which they contend by the model; "": none.
    """

    speed: float
    error: float
    measured: int
    modelled: bool = True
    resource: str = ""

    @property
    def surely(self) -> float:
        """Speed that is reached with 90 % certainty."""
        return self.speed - self.error


@dataclass
class _OfType:
    runs: deque[SharedRun]
    learnable: int = 0
    varied: bool = False
    pairs: dict[Pair, deque[float]] = field(default_factory=dict)
    model: SlowdownModel = field(default_factory=SlowdownModel.prior)


class NeighbourSpeeds:
    """Predictions for each node type.

    Args:
        boosted: trees where scikit-learn is installed and there are enough runs.
        neutral: predict no slowdown, in place of the published one, before there are enough runs of
            different applications.
        keep: latest measurements of a node type that are kept.
    """

    def __init__(self, *, boosted: bool = True, neutral: bool = False, keep: int = 5_000) -> None:
        self._boosted, self._neutral, self._keep = boosted, neutral, keep
        self._of_types: dict[str, _OfType] = {}

    def add(self, node_type: str, runs: Sequence[SharedRun]) -> None:
        """Learn from measured runs."""
        known = self._of_types.setdefault(node_type, self._new())
        for run in runs:
            known.runs.append(run)
            known.learnable += _learnable(run)
            speeds = known.pairs.setdefault(_pair(run.job, run.other), deque(maxlen=_OF_PAIR))
            speeds.append(run.speed)
        if known.learnable and known.learnable >= _RENEW * max(1, known.model.runs):
            learned = [run for run in known.runs if _learnable(run)]
            known.learnable = len(learned)
            known.varied = len(learned) >= FEW and _applications(learned) >= _APPLICATIONS
            known.model = SlowdownModel.fit(learned, boosted=self._boosted)

    def _new(self) -> _OfType:
        return _OfType(deque(maxlen=self._keep))

    def runs(self, node_type: str) -> tuple[SharedRun, ...]:
        """Return the measured runs of a node type, oldest first."""
        known = self._of_types.get(node_type)
        return tuple(known.runs) if known else ()

    @property
    def node_types(self) -> tuple[str, ...]:
        """Node types with measured runs."""
        return tuple(sorted(self._of_types))

    def measured(self, node_type: str, job: AloneLoad, other: AloneLoad) -> tuple[float, ...]:
        """Return the latest measured speeds of a job beside another one."""
        known = self._of_types.get(node_type)
        return tuple(known.pairs.get(_pair(job, other), ())) if known else ()

    def of(
        self, node_type: str, job: AloneLoad, other: AloneLoad, *, published: bool = False
    ) -> NeighbourSpeed:
        """Return the predicted speed of a job beside another one; see `of_all`."""
        return self.of_all(node_type, [(job, other)], published=published)[0]

    def of_all(
        self,
        node_type: str,
        pairs: Sequence[tuple[AloneLoad, AloneLoad]],
        *,
        published: bool = False,
    ) -> list[NeighbourSpeed]:
        """Return the predicted speed of the first job of each pair.

        Args:
            node_type: of the node.
            pairs: loads of two jobs.
            published: predict the published slowdown, also if this is `neutral`.
        """
        known = self._of_types.get(node_type) or self._new()
        predicted = known.model.speeds(pairs).tolist()
        enough = published or not self._neutral or known.varied
        combined = [
            _combined(
                speed if enough and job.known and other.known else None,
                known.model.error,
                known.pairs,
                _pair(job, other),
            )
            for speed, (job, other) in zip(predicted, pairs, strict=True)
        ]
        return [
            replace(speed, resource=known.model.contended(job, other)) if speed.modelled else speed
            for speed, (job, other) in zip(combined, pairs, strict=True)
        ]


def _pair(job: AloneLoad, other: AloneLoad) -> Pair:
    return job.application, job.gpus, other.application, other.gpus


def _applications(runs: Sequence[SharedRun]) -> int:
    return len({run.job.application for run in runs} | {run.other.application for run in runs})


def _learnable(run: SharedRun) -> bool:
    return run.job.known and run.other.known


def _combined(
    speed: float | None, error: float, pairs: Mapping[Pair, Sequence[float]], pair: Pair
) -> NeighbourSpeed:
    """Return the prediction for a pair; `speed` None: no model predicts it."""
    measured = pairs.get(pair, ())
    count, modelled = len(measured), speed is not None
    if speed is None:
        speed, error = 1.0, UNKNOWN_ERROR
    if not count:
        return NeighbourSpeed(speed=speed, error=error, measured=0, modelled=modelled)
    weight = count / (count + 1)
    mean = sum(measured) / count
    return NeighbourSpeed(
        speed=weight * mean + (1 - weight) * speed,
        error=error * (1 - weight) ** 0.5,
        measured=count,
        modelled=modelled,
    )
