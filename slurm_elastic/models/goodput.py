"""Goodput of one job in any configuration: throughput times statistical efficiency.

Sia (SOSP'23, sections 3.1 and 3.2), after Pollux. In each configuration the best
batch is taken, and the best way to split it, as far as the job's class lets it be
chosen. Unit: samples at the initial batch per second; 0 means it cannot run so.

A `GoodputModel` is immutable and made from `Learned` alone: equal knowledge gives
the same object, and all that does not depend on the gradient noise (the fits, and
the throughput of every candidate) is shared from round to round.

>>> from slurm_elastic.core.application import *
>>> job = Application(name="net", initial_batch=8, max_batch=64, batch=8,
...                   types=(TypeProfile("t4", least=1, most=16, single=40.0),
...                          TypeProfile("a100", least=1, most=16, single=80.0)))
>>> seen = Observation("t4", nodes=1, gpus=1, micro_batch=8, step_s=0.2, micro_step_s=0.2)
>>> model = GoodputModel.of(Learned(job, (seen,), Noise(sqr=1.0, var=100.0)))
>>> model.goodputs("t4", nodes=1, gpus=[1, 2]).round(1).tolist()
[51.8, 103.6]
>>> model.goodputs("a100", nodes=1, gpus=[1, 2]).round(1).tolist()
[103.6, 207.2]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_elastic.core.application import JobClass, Learned, Noise
from slurm_elastic.core.execution.plan_gains import PlanGains
from slurm_elastic.models import efficiency, goodput_tables
from slurm_elastic.models.batch_candidates import ConfigurationSet
from slurm_elastic.models.goodput_tables import WHOLE, GoodputBasis, GoodputTable, RemainingWork
from slurm_elastic.models.throughput import ThroughputParameters

__all__ = ["ConfigurationSet", "Floats", "GoodputModel", "goodput_matrix"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class GoodputModel:
    """Predictions for one job; immutable, the same object for equal knowledge. Made by `of`.

    Attributes:
        noise: gradient statistics that it was made from.
        compat: whether it follows the artifact where that deviates from the paper.
        observed_types: types with own observations, in the application's order.
    """

    __slots__ = ("_basis", "_fixed", "_gains", "_sqr", "_var", "compat", "noise", "observed_types")

    def __init__(
        self, basis: GoodputBasis, noise: Noise | None, gains: PlanGains | None = None
    ) -> None:
        self.noise = noise
        self.compat = basis.compat
        self.observed_types: tuple[str, ...] = tuple(basis.observations)
        self._basis = basis
        self._gains = gains
        self._sqr, self._var = efficiency.weights(noise)
        adaptive = basis.application.job_class is JobClass.ADAPTIVE
        # Without statistics no batch can be preferred: the user's is kept.
        self._fixed = not adaptive or noise is None

    @classmethod
    def of(
        cls, learned: Learned, *, per_node: Mapping[str, int] | None = None, compat: bool = False
    ) -> GoodputModel:
        """Return the model for these measurements and application.

        Args:
            learned: observations on types that the application does not name are left out.
            per_node: GPUs per node of each type, to borrow another type's curve with; where
                it is missing, the fullest node asked about or observed counts.
            compat: as the published artifact where it deviates from its paper.

        Raises:
            ValueError: a value that cannot be (NaN, not positive, ...); names the field.
        """
        of = goodput_tables.basis(
            learned.application,
            learned.observations,
            per_node=tuple(sorted(per_node.items())) if per_node else (),
            compat=compat,
            residuals=learned.residuals and not compat,
        )
        return _model(of, learned.noise, learned.plan_gains)

    def known(self, gpu_type: str) -> bool:
        """Return whether the job was observed on this type; else its predictions are borrowed."""
        return gpu_type in self._basis.observations

    def parameters(self, gpu_type: str) -> ThroughputParameters | None:
        """Return the fitted throughput model of a type; None: the job was not observed there."""
        return self._basis.fit(gpu_type) if self.known(gpu_type) else None

    def goodputs(self, gpu_type: str, nodes: ArrayLike, gpus: ArrayLike) -> Floats:
        """Return the goodput of configurations on one type.

        Args:
            gpu_type: the type.
            nodes: of each configuration, >= 1.
            gpus: of each configuration over all its nodes; broadcasts with nodes.

        Returns:
            Goodput of each, finite; 0 where the job cannot run so.
        """
        shape, configurations = _configurations(gpu_type, nodes, gpus)
        return self.goodputs_of(configurations).reshape(shape)

    def row(self, types: Sequence[str], nodes: Sequence[int], gpus: Sequence[int]) -> Floats:
        """Return the goodput of configurations of mixed types, all three of equal length."""
        return self.goodputs_of(ConfigurationSet(tuple(types), tuple(nodes), tuple(gpus)))

    def goodputs_of(self, configurations: ConfigurationSet, part: RemainingWork = WHOLE) -> Floats:
        """Return the goodput of each configuration; cached by the object `configurations`.

        Args:
            configurations: of any types.
            part: what frozen layers leave of a step.
        """
        return np.asarray(self._values(self._table(configurations, part=part)).max(axis=1))

    def best(
        self,
        gpu_type: str,
        nodes: ArrayLike,
        gpus: ArrayLike,
        *,
        max_batch: int | None = None,
        most: int | None = None,
    ) -> tuple[Floats, Ints, Ints]:
        """Return goodput and the split of the batch that gives it, for configurations on one type.

        Args:
            gpu_type: the type.
            nodes: as for `goodputs`.
            gpus: as for `goodputs`.
            max_batch: largest global batch instead of the application's; for an elastic batch.
            most: largest micro-batch in this placement instead of the type's.

        Returns:
            (goodput, micro-batch, accumulated micro-steps); where the goodput is 0 the split
            means nothing. On a type without observations the split is the best one by the
            curve that it borrows; if nothing was observed, the smallest batch from B0 up.
        """
        shape, configurations = _configurations(gpu_type, nodes, gpus)
        table = self._table(configurations, max_batch=max_batch, most=most)
        values = self._values(table)
        at = np.arange(len(configurations)), values.argmax(axis=1)
        goodput = values[at]
        if not self.known(gpu_type) and self.observed_types:
            table = self._table(configurations, max_batch=max_batch, most=most, own_limits=True)
            at = np.arange(len(configurations)), self._values(table).argmax(axis=1)
        return (
            goodput.reshape(shape),
            table.micro_batch[at].reshape(shape),
            table.accumulation[at].reshape(shape),
        )

    def _values(self, table: GoodputTable) -> Floats:
        return np.asarray(table.weight / (self._var + self._sqr * table.scale))

    def _table(
        self,
        configurations: ConfigurationSet,
        *,
        max_batch: int | None = None,
        most: int | None = None,
        own_limits: bool = False,
        part: RemainingWork = WHOLE,
    ) -> GoodputTable:
        return goodput_tables.table(
            self._basis,
            configurations,
            fixed=self._fixed,
            own_limits=own_limits,
            max_batch=max_batch,
            most=most,
            part=part,
            gains=self._gains,
        )


def goodput_matrix(models: Sequence[GoodputModel], configurations: ConfigurationSet) -> Floats:
    """Return the goodput of each job in each configuration; equal models are evaluated once.

    Args:
        models: of the jobs; repeated where jobs are alike.
        configurations: the cluster's.

    Returns:
        Shape (jobs, configurations); 0 where a job cannot run so.
    """
    rows: dict[int, int] = {}
    different: list[GoodputModel] = []
    index = np.empty(len(models), dtype=np.int64)
    for i, model in enumerate(models):
        row = rows.setdefault(id(model), len(different))
        if row == len(different):
            different.append(model)
        index[i] = row
    out = np.empty((len(different), len(configurations)))
    for row, model in enumerate(different):
        out[row] = model.goodputs_of(configurations)
    return out[index]


@lru_cache(maxsize=8192)
def _model(of: GoodputBasis, noise: Noise | None, gains: PlanGains | None) -> GoodputModel:
    return GoodputModel(of, noise, gains)


@lru_cache(maxsize=4096)
def _configuration(gpu_type: str, nodes: int, gpus: int) -> ConfigurationSet:
    return ConfigurationSet((gpu_type,), (nodes,), (gpus,))


def _configurations(
    gpu_type: str, nodes: ArrayLike | int, gpus: ArrayLike | int
) -> tuple[tuple[int, ...], ConfigurationSet]:
    if isinstance(nodes, int) and isinstance(gpus, int):
        return (), _configuration(gpu_type, nodes, gpus)
    n, g = np.broadcast_arrays(nodes, gpus)
    names = (gpu_type,) * n.size
    return n.shape, ConfigurationSet(names, tuple(n.ravel().tolist()), tuple(g.ravel().tolist()))
