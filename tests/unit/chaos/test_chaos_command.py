"""`make chaos` leaves no cluster behind, however it ends."""

import os
import signal
import sys
import time
from typing import Any

import pytest

from tests.chaos import __main__ as command


def run(monkeypatch: pytest.MonkeyPatch, campaign: Any, *words: str) -> tuple[int, list[str]]:
    """Exit code, and verbs that the cluster was given."""
    verbs: list[str] = []

    def cluster(_: str, verb: str, *__: str) -> int:
        verbs.append(verb)
        return 0

    monkeypatch.setattr(command, "_cluster", cluster)
    monkeypatch.setattr(command, "_campaign", campaign)
    monkeypatch.setattr(sys, "argv", ["chaos", "--minutes", "0.5", *words])
    before = signal.getsignal(signal.SIGTERM)
    try:
        return command.main(), verbs
    finally:
        signal.signal(signal.SIGTERM, before)


def killed(*_: Any) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
    return 0


def interrupted(*_: Any) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("campaign", "code"), [(lambda *_: 1, 1), (interrupted, 130), (killed, 130)]
)
def test_the_cluster_is_removed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, campaign: Any, code: int
) -> None:
    assert run(monkeypatch, campaign) == (code, ["up", "down"])


def test_it_may_stay_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, lambda *_: 0, "--keep") == (0, ["up"])
