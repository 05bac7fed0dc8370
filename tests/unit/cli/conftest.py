"""Settings of the tests of the command line: times are shown in UTC."""

import time

import pytest

from slurm_elastic.cli import main


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def run(capsys):
    """Run `selastic` with these arguments; return exit code, stdout and stderr."""

    def call(*words):
        code = main.run([str(w) for w in words])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call
