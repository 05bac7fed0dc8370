"""Ranks that do not meet are noticed; others are left alone."""

import socket
import threading
from pathlib import Path

from slurm_elastic.job.launchers.rendezvous_watch import RendezvousWatch, listens


def test_a_listening_port_is_seen() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert listens(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert not listens(client.getsockname()[1])
    with socket.create_server(("::", 0), family=socket.AF_INET6) as server:
        assert listens(server.getsockname()[1])


def test_where_the_kernel_tells_nothing_nothing_is_said(tmp_path: Path) -> None:
    assert listens(20000, tmp_path)


def test_ranks_that_never_meet_are_reported_once() -> None:
    missing = threading.Semaphore(0)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    RendezvousWatch(port, missing.release, meet_s=0.0, pause_s=0.01).start()
    assert missing.acquire(timeout=60)
    assert not missing.acquire(timeout=0.1)


def test_ranks_that_import_for_long_are_not_reported() -> None:
    """Nothing listens yet, and no save shows that they train."""
    missing, begun = threading.Semaphore(0), threading.Event()
    watch = RendezvousWatch(1, missing.release, has_begun=begun.is_set, meet_s=0.0, pause_s=0.01)
    watch.start()
    assert not missing.acquire(timeout=0.1)
    begun.set()
    assert missing.acquire(timeout=60)


def test_ranks_that_have_met_are_not_reported() -> None:
    reported: list[bool] = []
    with socket.create_server(("", 0)) as server:
        watch = RendezvousWatch(
            server.getsockname()[1], lambda: reported.append(True), meet_s=0.0, pause_s=0.0
        )
        watch._run()
    assert not reported


def test_a_step_that_has_ended_is_not_reported() -> None:
    reported: list[bool] = []
    watch = RendezvousWatch(1, lambda: reported.append(True), meet_s=0.0, pause_s=60.0)
    watch.end()
    watch._run()
    assert not reported
