#!/usr/bin/env python3
"""Runs docs/examples/train_library.py and creates OUT/done when it has completed."""

import runpy
import sys
from pathlib import Path

real = Path("/opt/src/slurm-elastic/docs/examples/train_library.py")
sys.path.insert(0, str(real.parent))
runpy.run_path(str(real), run_name="__main__")
Path(sys.argv[sys.argv.index("--out") + 1], "done").write_text("done\n")
