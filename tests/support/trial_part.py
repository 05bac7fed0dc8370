"""A part of the GPU kit that does what the variable TRIAL_PART says."""

import os
import signal
import subprocess
import sys
import time

from tests.gpu.part_program import part_main


def run(setting, rows):
    rows.check("ranks", setting.ranks, ok=True, expected="any")
    what = os.environ["TRIAL_PART"]
    print(f"about to {what}")
    if what == "raise":
        raise RuntimeError("no room")
    if what == "hang":
        # SIGINT is ignored by a shell's background process; both have to be gone.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        rows.measured("pid", child.pid)
        time.sleep(600)


if __name__ == "__main__":
    part_main(run, lambda options: None)
