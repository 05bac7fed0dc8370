"""Settings of the tests of the command line: times are shown in UTC."""

import re
import time

import pytest

from slurm_elastic.cli import main

_PROGRESS = re.compile(r"selastic: \d+ of \d+ jobs simulated\n")


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def run(capsys):
    """Run `selastic` with these arguments; return exit code, stdout and stderr.

    Of stderr without the lines of progress, which a slow machine prints.
    """

    def call(*words):
        code = main.run([str(w) for w in words])
        out = capsys.readouterr()
        return code, out.out, _PROGRESS.sub("", out.err)

    return call
