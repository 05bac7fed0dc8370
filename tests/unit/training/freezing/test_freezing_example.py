"""The example with freezing."""

import json
import os
from pathlib import Path

from tests.support.trainings.forked_scripts import run_forked

SCRIPT = Path(__file__).resolve().parents[4] / "docs" / "examples" / "train_cnn.py"


def run(out: Path, directive: str, *options: str) -> tuple[list[dict], str]:
    """Return the lines of epochs.jsonl, and stderr."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    small = ("--samples", "64", "--epochs", "10", "--global-batch", "16")
    environment |= {"OMP_NUM_THREADS": "1", "SLURM_ELASTIC": directive}
    done = run_forked(SCRIPT, "--out", str(out), *small, *options, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(text) for text in (out / "epochs.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(10))
    return lines, done.stderr


def test_the_example_trains_with_another_criterion(tmp_path: Path) -> None:
    options = ("--freeze", "auto", "--criterion", "gradient-norm")
    lines, _ = run(tmp_path, "1,freeze=auto,max-penalty=100%", *options)
    assert all(0 <= line["frozen"] <= 4 for line in lines)


def test_a_directive_without_freeze_disables_freezing(tmp_path: Path) -> None:
    lines, stderr = run(tmp_path, "1", "--freeze", "auto", "--max-penalty", "100")
    assert {line["frozen"] for line in lines} == {0}
    assert "slurm-elastic: no freezing: --elastic=1 does not say freeze=auto\n" in stderr
