"""Lines that are added to slurm.conf for some tests."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.container_cluster.slurm_cluster import SlurmCluster

CONF = "/etc/slurm/slurm.conf"


@contextmanager
def added_settings(cluster: SlurmCluster, lines: str, *, shown: str) -> Iterator[None]:
    """Let slurmctld run with these lines as well until the end of the context.

    Args:
        cluster: of the test.
        lines: of slurm.conf.
        shown: regular expression of grep for the output of `scontrol show config`, which has such
            a line only with them.
    """
    config = f"scontrol show config | grep -q '{shown}'"
    wait = "scontrol reconfigure; for _ in $(seq 100); do {} && exit; sleep 0.2; done; exit 1"
    cluster.exec(f"cp {CONF} {CONF}.kept && cat >>{CONF}", stdin=lines)
    try:
        cluster.exec(wait.format(config), timeout=180)
        yield
    finally:
        cluster.exec(f"cp {CONF}.kept {CONF}; {wait.format('! ' + config)}", timeout=180)
