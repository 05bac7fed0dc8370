"""Markers of complete checkpoints."""

from pathlib import Path

import pytest

from slurm_elastic.job.complete_marker import CompleteMarker, pattern_error


@pytest.mark.parametrize(
    ("checkpoint", "pattern", "marker"),
    [
        ("step_1/", "DONE", "step_1/DONE"),
        ("step_1/", "meta/*.ok", "step_1/meta/7.ok"),
        ("step_1/", "{}.done", "step_1.done"),
        ("step_1/", "flags/{}", "flags/step_1"),
        ("a.1.pt", "{}.done", "a.1.pt.done"),
        ("a.1.pt", "{stem}.ok", "a.1.ok"),
        ("a.1.pt", "latest", "latest"),
        ("[*].pt", "{}.done", "[*].pt.done"),
    ],
)
def test_where_a_marker_lies(tmp_path: Path, checkpoint: str, pattern: str, marker: str) -> None:
    assert pattern_error(pattern) is None
    path = tmp_path / checkpoint
    is_directory = checkpoint.endswith("/")
    if is_directory:
        path.mkdir()
    else:
        path.touch()
    (tmp_path / "other.done").touch()
    found = CompleteMarker(pattern)
    assert found.paths(str(path), is_directory=is_directory) == []
    assert found.written_ns(str(path), is_directory=is_directory) is None
    (tmp_path / marker).parent.mkdir(exist_ok=True)
    (tmp_path / marker).touch()
    assert found.paths(str(path), is_directory=is_directory) == [str(tmp_path / marker)]
    assert found.written_ns(str(path), is_directory=is_directory)
    assert found.matches(str(tmp_path / marker))
    assert not found.matches(str(path)) or pattern == "flags/{}"


@pytest.mark.parametrize(
    "pattern", ["", "/DONE", "a\0b", "*", "**", "{}", "{stem}", "{name}.ok", "a{", "}{", "{{}}"]
)
def test_invalid_patterns(pattern: str) -> None:
    error = pattern_error(pattern)
    assert error
    assert "\n" not in error
