"""job_submit.lua in a plain Lua interpreter with a fake Slurm: random jobs."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from slurm_elastic.core.submission import parse_admin_comment
from tests.fuzz.grammar import ROOT
from tests.fuzz.tally import MOST_CRASHES, Tally

BATCH = 5000
DRIVER = Path(__file__).with_name("fuzz_job_submit.lua")
SLURM_CONF = """\
NodeName=g[01-02] Gres=gpu:a100:4
NodeName=g03 Gres=gpu:v100:8(S:0-1),nic:1
"""


def run(seconds: float, seed: int, *, batch: int = BATCH) -> Tally:
    """Try jobs for so long, each submitted once and modified once."""
    tally = Tally()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        for module in (ROOT / "plugins" / "lua").glob("*.lua"):
            shutil.copy(module, directory)
        Path(directory, "slurm.conf").write_text(SLURM_CONF)
        while not tally.inputs or (time.monotonic() < end and len(tally.crashes) < MOST_CRASHES):
            command = ["lua5.1", str(DRIVER), directory, str(seed), str(batch)]
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode:
                tally.crashes.append(done.stderr.decode("utf-8", "backslashreplace")[:2000])
            for line in done.stdout.split():
                # Whatever it records, the controller reads.
                assert parse_admin_comment(bytes.fromhex(line.decode()).decode("ascii")), line
                tally.notes["records read back"] += 1
            tally.inputs += batch
            seed += 1_000_000
    return tally
