"""docs/examples/train_library.py, whose rank 0 fails some steps after it has got more ranks.

Arguments: `exit` (code 9) or `crash` (signal 11), then those of train_library.py.
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

EXAMPLE = Path("/opt/src/slurm-elastic/docs/examples/train_library.py")


def fail_when_grown(how: str) -> None:
    """End the process once the training has more ranks than it began with."""
    began_with = os.environ["WORLD_SIZE"]
    while os.environ["WORLD_SIZE"] == began_with:
        time.sleep(0.05)
    time.sleep(1.0)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)  # it may be handled by another thread
    os._exit(9)


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        threading.Thread(target=fail_when_grown, args=[sys.argv[1]], daemon=True).start()
    sys.argv = [str(EXAMPLE), *sys.argv[2:]]
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
