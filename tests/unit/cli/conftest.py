"""Times are those of UTC, and the scene is the one of the controller's tests."""

import sys
import time
from pathlib import Path

import pytest

from slurm_elastic.cli import main

sys.path.insert(0, str(Path(__file__).parent.parent / "controller"))


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def run(capsys):
    """`selastic` with these words: exit code, output, errors."""

    def call(*words):
        code = main.run([str(w) for w in words])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call
