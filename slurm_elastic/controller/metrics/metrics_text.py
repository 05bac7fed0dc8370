"""The metrics of a controller as text, in OpenMetrics or Prometheus' own format.

The figures come from the view of the last round: nothing here reads slurmctld or waits for a round.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from slurm_elastic import __version__
from slurm_elastic.controller.metrics import metric_definitions as metrics
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.metrics.cluster_figures import Figures, figures
from slurm_elastic.controller.metrics.metric_definitions import PREFIX, MetricDefinition
from slurm_elastic.controller.metrics.metrics_source import MetricsSource


class ControllerCollector(Collector):
    """Collector of prometheus_client for one selasticd.

    Args:
        source: returns the present data; called in the thread of the scrape.
    """

    def __init__(self, source: Callable[[], MetricsSource]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; those of the cluster only where the controller acts."""
        source = self._source()
        info = {"version": __version__, "reader": source.reader}
        yield InfoMetricFamily(PREFIX + "build", "Release, and how slurmctld is read.", value=info)
        yield _gauge(metrics.ACTIVE, {(): float(source.view is not None)})
        yield _gauge(metrics.LEADER_LEASE, {(): source.lease_s})
        yield _gauge(metrics.LEADER_GENERATION, {(): source.generation})
        yield _gauge(metrics.LEDGER_SIZE, {(): source.ledger_bytes})
        for definition in metrics.COUNTED:
            if definition.kind == "counter":
                yield _counter(definition, source.counts)
            else:
                yield _histogram(definition, source.counts)
        if source.view is not None and source.view.snapshot.time:
            for definition, values in figures(source.view, source.config, time.time()):
                yield _gauge(definition, values)


def _gauge(definition: MetricDefinition, values: Figures) -> Metric:
    family = GaugeMetricFamily(definition.full_name, definition.meaning, labels=definition.labels)
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    return family


def _counter(definition: MetricDefinition, counts: ActivityCounts) -> Metric:
    family = CounterMetricFamily(definition.full_name, definition.meaning, labels=definition.labels)
    for labels, value in sorted(counts.values(definition).items()):
        family.add_metric(labels, value)
    return family


def _histogram(definition: MetricDefinition, counts: ActivityCounts) -> Metric:
    family = HistogramMetricFamily(
        definition.full_name, definition.meaning, labels=definition.labels
    )
    bounds = [*(str(float(bound)) for bound in definition.buckets), "+Inf"]
    for labels, histogram in sorted(counts.histograms(definition).items()):
        cumulated = itertools.accumulate(histogram.counts)
        family.add_metric(labels, list(zip(bounds, cumulated, strict=True)), histogram.sum)
    return family


class MetricsText:
    """Answers to scrapes.

    Args:
        source: see `ControllerCollector`.
    """

    def __init__(self, source: Callable[[], MetricsSource]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(ControllerCollector(source))

    def render(self, accept: str) -> tuple[str, bytes]:
        """Return content type and text in the format that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)
