"""The GPU kit: parts that fail or hang, and what it says on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import __main__ as kit
from tests.gpu import machine, part_runner
from tests.gpu.kit_report import FAILED, NOT_RUN, PASSED
from tests.gpu.part_program import wait_until
from tests.gpu.part_runner import KitPart, KitSetting, run_part
from tests.gpu.report_rows import read_rows
from tests.support.needs import require

NO_GPU = (
    "test-gpu: torch 2.13.0+cpu sees no GPU here; to try the kit itself on the CPU:"
    " make test-gpu ARGS='--device cpu'\n"
)
TRIAL = KitPart("trial_part", "Does as it is told", 60.0, package="tests.support")


def run_trial(folder: Path, what: str, *, timeout_s: float = 60.0, part: KitPart = TRIAL):
    setting = KitSetting("cpu", 2, folder)
    return run_part(part, setting, os.environ | {"TRIAL_PART": what}, timeout_s=timeout_s)


def test_a_part_that_ends_well_has_passed(tmp_path: Path) -> None:
    result = run_trial(tmp_path, "end")
    assert (result.state, result.reason, result.log) == (PASSED, "", ())
    assert [(row.what, row.value) for row in result.rows] == [("ranks", 2)]


def test_a_part_that_fails_keeps_its_rows_and_shows_its_last_lines(tmp_path: Path) -> None:
    result = run_trial(tmp_path, "raise")
    assert (result.state, result.reason) == (FAILED, "ended with exit code 1")
    assert len(result.rows) == 1
    assert result.log[-1] == "RuntimeError: no room"


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(part_runner, "_END_S", 0.1)
    result = run_trial(tmp_path, "hang", timeout_s=0.5)
    assert (result.state, result.reason) == (FAILED, "was ended after 0.5 s")


def test_nothing_stays_of_a_part_that_ignores_the_first_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_runner, "_END_S", 0.1)
    rows = tmp_path / "rows"
    command = [sys.executable, "-m", "tests.support.trial_part", "--rows", str(rows)]
    environment = os.environ | {"TRIAL_PART": "hang"}
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        pid = wait_until(
            lambda: [row.value for row in read_rows(rows) if row.what == "pid"],
            "child of the part",
            within_s=60.0,
        )[0]
    finally:
        part_runner.end_session(child)
    wait_until(lambda: not lives(pid), "end of the child of the part", within_s=60.0)


def lives(pid: float) -> bool:
    try:
        state = Path(f"/proc/{pid:.0f}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie until the init of this machine has seen it.
    return state.rpartition(")")[2].split()[0] != "Z"


def test_a_part_that_needs_more_gpus_is_not_run(tmp_path: Path) -> None:
    part = KitPart("trial_part", "Needs many", 60.0, 4, "tests.support")
    result = run_trial(tmp_path, "raise", part=part)
    assert (result.state, result.reason) == (NOT_RUN, "needs 4 GPUs")


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            {"torch": "2.13.0+cpu", "gpus": []},
            NO_GPU,
        ),
        (machine.NoMachineError("no torch in python3"), "test-gpu: no torch in python3\n"),
    ],
)
def test_without_a_gpu_one_line_says_so(answer, line, monkeypatch, capsys) -> None:
    def ask(_environment):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(kit, "ask", ask)
    assert kit.main([]) == 3
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--parts", "layouts,spin"], "part spin is unknown; known: layouts, own_loop"),
        (["--gpus", "3"], "--gpus: 3 is invalid: expected 1 to 2"),
        (["--timeout", "0"], "0 is invalid: expected a number above 0"),
    ],
)
def test_invalid_arguments_are_named(words, error, monkeypatch, capsys) -> None:
    monkeypatch.setattr(kit, "ask", lambda _: {"torch": "2.13.0", "gpus": [{}, {}]})
    with pytest.raises(SystemExit) as ended:
        kit.main(words)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_variables_of_a_job_and_gpus_do_not_reach_a_run_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    environment = kit._environment("cpu")
    assert not {"RANK", "SLURM_JOB_ID"} & environment.keys()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert kit._environment("cuda")["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_every_part_has_a_module_and_a_line_in_the_documentation() -> None:
    root = Path(kit.__file__).parents[2]
    modules = {path.stem for path in (root / "tests/gpu/parts").glob("*.py")} - {"__init__"}
    names = [part.name for part in kit.PARTS]
    assert sorted(names) == sorted(modules)
    page = (root / "docs/gpu.md").read_text()
    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.torch
def test_the_smallest_part_runs_on_the_cpu(tmp_path: Path, capsys) -> None:
    require("python/torch")
    assert (
        kit.main(["--device", "cpu", "--parts", "measurements", "--report", f"{tmp_path}/r"]) == 0
    )
    body = json.loads((tmp_path / "r.json").read_text())
    assert (body["device"], body["ranks"], len(body["parts"])) == ("cpu", 2, 1)
    assert body["parts"][0]["state"] == PASSED
    assert "test-gpu: 1 parts, failed: none" in capsys.readouterr().out
