"""Freezing in reports, as models take it: allowed prefixes of layers, and what they save.

A report counts the layers that freeze together; its profile may have more rows, since there every
entry of a model is one, while a normalisation, and what has no parameters, freezes with the layer
before it (docs/training-freezing.md). So the rows with the fewest parameters join the row before
them until there are as many as layers. A profile of fewer rows than layers is of something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slurm_elastic.controller.state.reported.layer_profiles import StoredProfile
from slurm_elastic.core.application import LayerCost, Learned, Prefixes
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.report import Report
from slurm_elastic.core.report_fields import ProfileRow


def of(
    report: Report, directive: Directive | None, profile: StoredProfile | None
) -> Prefixes | None:
    """Return the prefixes that the library certifies and the user allows; None: none are known.

    Args:
        report: the newest.
        directive: in force.
        profile: of the job's layers, if known.
    """
    if report.kind != "library" or directive is None or directive.freeze != "auto":
        return None
    if not report.certified:
        return None
    layers = report.layers or 0
    frozen = report.frozen or 0
    if max(report.certified, frozen) > layers:
        return None
    penalties: dict[int, float] = {}
    if frozen and report.penalty is not None:
        penalties[frozen] = report.penalty
    if report.certified_penalty is not None:
        penalties[report.certified] = report.certified_penalty
    return Prefixes(
        layers=layers,
        certified=report.certified,
        frozen=frozen,
        penalties=tuple(sorted(penalties.items())),
        max_penalty=directive.max_penalty,
        costs=costs(profile.rows, layers) if profile else (),
    )


def costs(rows: Sequence[ProfileRow], layers: int) -> tuple[LayerCost, ...]:
    """Return the costs of the layers that freeze; () where the profile is of another model.

    >>> rows = [("conv", 1.0, 2.0, 8.0, 90.0), ("norm", 0.5, 0.5, 8.0, 2.0), ("fc", 1, 2, 1, 40)]
    >>> [(c.forward_s, c.parameter_bytes) for c in costs(rows, 2)]
    [(1.5, 92.0), (1, 40)]
    >>> costs(rows, 4)
    ()
    """
    if not 0 < layers <= len(rows):
        return ()
    extra = sorted(range(1, len(rows)), key=lambda i: (rows[i][4], i))[: len(rows) - layers]
    joins = set(extra)
    layer_costs: list[LayerCost] = []
    for i, (_, forward, backward, _, size) in enumerate(rows):
        if i in joins:
            last = layer_costs[-1]
            layer_costs[-1] = LayerCost(
                last.forward_s + forward, last.backward_s + backward, last.parameter_bytes + size
            )
        else:
            layer_costs.append(LayerCost(forward, backward, size))
    return tuple(layer_costs) if sum(c.forward_s + c.backward_s for c in layer_costs) > 0 else ()


def thawed(report: Report, profile: StoredProfile | None) -> Report:
    """Return a report with times as without frozen layers, where the layers' costs are known.

    Goodput models are fitted to these times: frozen layers change, and are counted separately.
    """
    frozen, layers = report.frozen or 0, report.layers or 0
    if not frozen or frozen >= layers or profile is None or report.step_time_s is None:
        return report
    layer_costs = costs(profile.rows, layers)
    if not layer_costs:
        return report
    if report.micro_step_s is None:
        return dataclasses.replace(report, step_time_s=None)
    # It brings scipy, 50 MB: not every site's jobs freeze.
    from slurm_elastic.models import effective_progress  # noqa: PLC0415

    left = effective_progress.part(
        Prefixes(layers=layers, certified=frozen, max_penalty=1.0, costs=layer_costs), frozen
    )
    more = report.accumulation or 0
    micro = report.micro_step_s / left.compute
    network = max(0.0, report.step_time_s - (more + 1) * report.micro_step_s) / left.network
    return dataclasses.replace(
        report,
        step_time_s=(more + 1) * micro + network,
        micro_step_s=micro,
        exchange_s=None if report.exchange_s is None else report.exchange_s / left.network,
    )


class FreezingReports:
    """Learned data with prefixes; the same object while neither changes."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Learned, Learned]] = {}

    def put(self, key: str, learned: Learned | None, prefixes: Prefixes | None) -> Learned | None:
        """Return the learned data of a job, with the prefixes that may be frozen.

        Args:
            key: of the job.
            learned: without prefixes.
            prefixes: None: nothing may.
        """
        if learned is None or prefixes is None:
            self._kept.pop(key, None)
            return learned
        old_learned, with_prefixes = self._kept.get(key, (None, learned))
        if old_learned is not learned or with_prefixes.prefixes != prefixes:
            with_prefixes = dataclasses.replace(learned, prefixes=prefixes)
            self._kept[key] = (learned, with_prefixes)
        return with_prefixes

    def of(self, key: str) -> Learned | None:
        """Return the last data put for a job; None: no layers freeze."""
        kept = self._kept.get(key)
        return kept[1] if kept else None

    def forget(self, alive: set[str]) -> None:
        """Drop the data of jobs that are gone."""
        self._kept = {k: v for k, v in self._kept.items() if k in alive}
