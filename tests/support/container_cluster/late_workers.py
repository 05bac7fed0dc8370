"""Workers of the cluster tests that begin later than the others, when cores are free for them.

`FIRST_WORKERS` in the environment is the number of workers that begin at once. The others, called
late, begin when the file that `CORES_ARE_FREE` names is there. Without these variables, which
`tests.run` sets, all workers begin at once.
"""

import os
import time
from pathlib import Path

FIRST_WORKERS = "SELASTIC_FIRST_WORKERS"
CORES_ARE_FREE = "SELASTIC_CORES_ARE_FREE"


def is_late(worker: str) -> bool:
    """Tell whether a worker, named as pytest-xdist does, is late."""
    return int(worker.removeprefix("gw")) >= int(os.environ.get(FIRST_WORKERS, "1000"))


def wait_if_late(worker: str) -> None:
    """Return when a worker may begin."""
    if is_late(worker):
        wait_for(Path(os.environ[CORES_ARE_FREE]))


def wait_for(file: Path) -> None:
    """Wait until a file is there."""
    while not file.exists():
        time.sleep(1)
