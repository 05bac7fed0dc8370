"""Table of the trials of each release of Slurm."""

from tests.releases.release_table import lines
from tests.releases.release_trial import STEPS

PASSED = {
    "release": "25.11.7",
    "reader": "json",
    "steps": dict.fromkeys(STEPS, 3.4),
    "slurm_s": [2.5, 4.06, 3.0],
}
FAILED = {
    "release": "26.05.3",
    "reader": "",
    "steps": {"install": 2.0, "observe": 3.0, "check": 1.0},
    "failure": "grow: the job does not get 4 GPUs; the log ends:\nmore",
    "slurm_s": [],
}


def test_a_release_on_which_all_works() -> None:
    head, _, row = lines([PASSED])
    assert head.startswith("| Slurm | reader | install | observe |")
    assert row == f"| 25.11.7 | json | {'yes, 3 s | ' * len(STEPS)}3.0, 4.1, 3 |"


def test_a_step_that_a_release_does_not_have() -> None:
    *_, row = lines([PASSED | {"steps": PASSED["steps"] | {"topologies": None}}])
    cells = ["-" if step == "topologies" else "yes, 3 s" for step in STEPS]
    assert row == f"| 25.11.7 | json | {' | '.join(cells)} | 3.0, 4.1, 3 |"


def test_a_failure_names_the_step_and_what_was_not_tried() -> None:
    *_, row, empty, failure = lines([FAILED])
    assert row.startswith("| 26.05.3 | - | yes, 2 s | yes, 3 s | yes, 1 s | **no** | not tried |")
    assert row.endswith("| - |")
    assert empty == ""
    assert failure == "26.05.3: grow: the job does not get 4 GPUs; the log ends:"
