"""docs/examples/train_library.py, of which a rank fails some steps after it has got more ranks.

Arguments: how rank 0 fails, `exit` (code 9) or `crash` (signal 11), or `memory`, of which a rank of
each companion runs out; then those of train_library.py.
"""

import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

EXAMPLE = Path("/opt/src/slurm-elastic/docs/examples/train_library.py")


def has_group() -> bool:
    """Return whether this process trains with others."""
    torch = sys.modules.get("torch")
    return bool(torch and hasattr(torch, "distributed") and torch.distributed.is_initialized())


def fail_when_grown(how: str) -> None:
    """End the process once the training has more ranks than it began with."""
    began_with, joins = os.environ["WORLD_SIZE"], "SLURM_ELASTIC_JOIN" in os.environ
    while not (has_group() if joins else os.environ["WORLD_SIZE"] != began_with):
        time.sleep(0.05)
    time.sleep(1.0)
    if how == "memory":
        traceback.print_exception(MemoryError())
        sys.stderr.flush()
        os._exit(1)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)  # it may be handled by another thread
    os._exit(9)


if __name__ == "__main__":
    joins, first = "SLURM_ELASTIC_JOIN" in os.environ, os.environ["LOCAL_RANK"] == "0"
    if first and joins == (sys.argv[1] == "memory"):
        threading.Thread(target=fail_when_grown, args=[sys.argv[1]], daemon=True).start()
    sys.argv = [str(EXAMPLE), *sys.argv[2:]]
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
