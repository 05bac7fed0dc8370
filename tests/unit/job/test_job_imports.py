"""Imports of esrun: few before the ranks run, and the standard library only."""

import subprocess
import sys

import pytest


def modules(name: str) -> set[str]:
    process = subprocess.run(
        [sys.executable, "-I", "-c", f"import {name}, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(process.stdout.split())


@pytest.mark.parametrize("name", ["job.esrun", "job.launchers.adaptation"])
def test_few_modules_are_imported_before_srun_starts(name: str) -> None:
    slow = {"argparse", "subprocess", "socket", "threading", "dataclasses", "json", "re", "typing"}
    slow |= {"ctypes", "tomllib", "pathlib", "asyncio", "logging", "shlex", "signal", "shutil"}
    before = modules("sys")
    assert not (modules(f"slurm_elastic.{name}") - before) & slow


@pytest.mark.parametrize(
    "name", ["job.supervisor", "job.rank_socket", "rpc.frames", "job.single_machine"]
)
def test_nothing_but_the_standard_library(name: str) -> None:
    before = modules("sys")
    tops = {module.partition(".")[0] for module in modules(f"slurm_elastic.{name}") - before}
    assert tops <= sys.stdlib_module_names | {"slurm_elastic"}
    assert "asyncio" not in tops
