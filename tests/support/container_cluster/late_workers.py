"""Workers of the cluster tests that begin once cores are free: `tests.run` names the moment.

`WORKERS` in the environment is the number of workers that begin at once, `FILE` a file that exists
as soon as the others may start their clusters, too. Without them all workers begin at once.
"""

import os
import time
from pathlib import Path

WORKERS = "SELASTIC_FIRST_WORKERS"
FILE = "SELASTIC_MORE_WORKERS_WITH"


def is_late(worker: str) -> bool:
    """Tell whether a worker, with pytest-xdist's name, begins once cores are free."""
    return int(worker.removeprefix("gw")) >= int(os.environ.get(WORKERS, "1000"))


def wait_for_cores(worker: str) -> None:
    """Wait, in a late worker, until it may begin."""
    while is_late(worker) and not Path(os.environ[FILE]).exists():
        time.sleep(1)
