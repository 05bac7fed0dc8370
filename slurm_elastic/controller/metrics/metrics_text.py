"""The metrics of a controller as text, in OpenMetrics or Prometheus' own format.

The figures come from the view of the last round: nothing here reads slurmctld or waits for a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from slurm_elastic import __version__
from slurm_elastic.config.schema import Config
from slurm_elastic.controller.metrics import metric_definitions as metrics
from slurm_elastic.controller.metrics.cluster_figures import Figures, figures
from slurm_elastic.controller.queries.view import View

_PREFIX = "selastic_"


class MetricsSource(NamedTuple):
    """What metrics are made of.

    Attributes:
        view: of the controller; None: it does not act.
        config: the site's.
        reader: how slurmctld is read; "": not connected.
    """

    view: View | None
    config: Config
    reader: str = ""


class ControllerCollector(Collector):
    """Collector of prometheus_client for one selasticd.

    Args:
        source: returns the present data; called in the thread of the scrape.
    """

    def __init__(self, source: Callable[[], MetricsSource]) -> None:
        self._source = source

    def collect(self) -> Iterator[GaugeMetricFamily | InfoMetricFamily]:
        """Yield all metrics; those of the cluster only where the controller acts."""
        view, config, reader = self._source()
        info = {"version": __version__, "reader": reader}
        yield InfoMetricFamily(_PREFIX + "build", "Release, and how slurmctld is read.", value=info)
        yield _family(metrics.ACTIVE, {(): float(view is not None)})
        if view is not None and view.snapshot.time:
            for definition, values in figures(view, config, time.time()):
                yield _family(definition, values)


def _family(definition: metrics.MetricDefinition, values: Figures) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        _PREFIX + definition.name, definition.meaning, labels=definition.labels
    )
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
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
