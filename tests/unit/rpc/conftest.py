"""A munged of the tests' own, where munge is installed."""

from collections.abc import Iterator

import pytest

from slurm_elastic.rpc import munge_auth
from tests.support.munge_daemon import MungeDaemon, munged


@pytest.fixture(scope="session")
def munge_daemon() -> Iterator[MungeDaemon]:
    with munged() as daemon:
        yield daemon


@pytest.fixture
def munge(munge_daemon: MungeDaemon, monkeypatch: pytest.MonkeyPatch) -> MungeDaemon:
    """The daemon whose socket `munge_auth` uses in this test."""
    monkeypatch.setenv(munge_auth.SOCKET_VARIABLE, str(munge_daemon.socket))
    return munge_daemon
