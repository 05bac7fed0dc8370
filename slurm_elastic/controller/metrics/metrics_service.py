"""`/metrics` of one selasticd, if it is configured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from slurm_elastic.controller.listening_thread import EventLog
from slurm_elastic.controller.metrics.metrics_server import MetricsServer
from slurm_elastic.controller.metrics.metrics_source import MetricsSource
from slurm_elastic.core.errors import SlurmElasticError


class MetricsError(SlurmElasticError):
    """Error: metrics cannot be served; the message names the key and the remedy."""


@contextlib.contextmanager
def serving(listen: str, source: Callable[[], MetricsSource], log: EventLog) -> Iterator[None]:
    """Serve `/metrics` for the time of the context.

    Args:
        listen: `HOST:PORT`; "": nothing is served.
        source: returns the present data; called at each scrape.
        log: receives errors.

    Raises:
        MetricsError, OSError: they cannot be served.
    """
    if not listen:
        yield
        return
    try:
        from slurm_elastic.controller.metrics import metrics_text  # noqa: PLC0415 - optional
    except ImportError as error:
        raise MetricsError(
            f"[metrics] listen = {listen!r}: {error}; install the extra "
            "slurm-elastic[controller], or leave the key empty"
        ) from None
    server = MetricsServer(listen, metrics_text.MetricsText(source).render, log)
    server.start()
    try:
        yield
    finally:
        server.stop()
