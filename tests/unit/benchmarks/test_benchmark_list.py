"""The list of benchmarks."""

from benchmarks import ROOT
from benchmarks.__main__ import commands


def test_each_command_is_listed_with_its_description():
    listed = commands()
    assert listed["benchmarks.sia_tables"] == "Reproduction of Sia's published results"
    assert {"benchmarks.overlap", "benchmarks.policies.icefrog"} <= set(listed)
    assert "benchmarks.overlap.ranks" not in listed, "a part of benchmarks.overlap"
    assert all(listed.values())


def test_a_folder_with_a_command_of_its_name_is_listed():
    folders = {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert {f"benchmarks.{name}" for name in folders} <= set(commands())
