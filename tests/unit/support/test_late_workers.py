"""Workers of the cluster tests that begin when cores are free for them."""

import threading
import time

from tests.support.container_cluster import late_workers


def test_a_late_worker_waits_for_the_file(tmp_path, monkeypatch):
    there = tmp_path / "cores-are-free"
    monkeypatch.setenv(late_workers.FIRST_WORKERS, "2")
    monkeypatch.setenv(late_workers.CORES_ARE_FREE, str(there))
    assert [late_workers.is_late(f"gw{n}") for n in range(4)] == [False, False, True, True]
    late_workers.wait_if_late("gw1")
    timer = threading.Timer(0.5, there.touch)
    timer.start()
    began = time.monotonic()
    late_workers.wait_if_late("gw2")
    assert there.exists()
    assert time.monotonic() - began >= 0.5


def test_all_workers_begin_at_once_without_it(monkeypatch):
    monkeypatch.delenv(late_workers.FIRST_WORKERS, raising=False)
    assert not late_workers.is_late("gw99")
