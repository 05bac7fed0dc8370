"""The script of a companion and esrun's server for it, in processes of their own."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_elastic.job.companions import companion_script, companion_server
from slurm_elastic.job.companions.companion_channel import (
    CompanionChannel,
    CompanionChannelError,
    CompanionPlace,
    prove_to_esrun,
)
from slurm_elastic.job.companions.companion_server import CompanionServer
from slurm_elastic.job.companions.companion_submission import CompanionShape, CompanionSubmission
from slurm_elastic.job.rank_socket import JOIN_VARIABLE
from slurm_elastic.job.slurm_env import STEP_VARIABLE
from tests.support.job.companion_slurm import CompanionSlurm, eventually
from tests.support.patience import PATIENCE_S

#: Tests run side by side, and a companion kills all processes with its mark.
MARK = f"test-{os.getpid()}.0.1+5001"


class News:
    """CompanionListener that keeps what it hears."""

    def __init__(self) -> None:
        self.marks: dict[int, str] = {5001: MARK}
        self.heard: list[tuple[object, ...]] = []

    def admit(self, job_id: int) -> str | None:
        return self.marks.get(job_id)

    def on_connected(self, job_id: int, place: CompanionPlace) -> None:
        self.heard.append(("connected", job_id, place))

    def on_terminated(self, job_id: int) -> None:
        self.heard.append(("terminated", job_id))

    def on_disconnected(self, job_id: int, reason: str) -> None:
        self.heard.append(("disconnected", job_id, reason))

    def of(self, kind: str) -> list[tuple[object, ...]]:
        return [entry[1:] for entry in self.heard if entry[0] == kind]


@pytest.fixture
def news() -> News:
    return News()


@pytest.fixture
def server(news: News) -> Iterator[CompanionServer]:
    server = CompanionServer(news)
    yield server
    server.close()


@pytest.fixture
def slurm(tmp_path: Path, server: CompanionServer) -> Iterator[CompanionSlurm]:
    slurm = CompanionSlurm(tmp_path)
    submission = CompanionSubmission(
        slurm.env, job_id=4711, run=0, shape=CompanionShape(1, ""), port=server.port,
        secret=server.secret,
    )  # fmt: skip
    submission.submit(1, 2, "")
    yield slurm
    slurm.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Yield a function that starts a process with a mark, which ignores SIGTERM."""
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str) -> subprocess.Popen[bytes]:
        up = tmp_path / f"up-{len(started)}"
        command = ["sh", "-c", f"trap '' TERM; touch {up}; while :; do sleep 1; done"]
        started.append(subprocess.Popen(command, env=os.environ | {STEP_VARIABLE: mark}))
        eventually(up.exists)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_companion_runs_until_it_is_told_to_end(
    slurm: CompanionSlurm,
    server: CompanionServer,
    news: News,
    rank: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    slurm.run(5001, gpus=2)
    eventually(lambda: news.of("connected"), "the connection")
    assert news.of("connected") == [(5001, CompanionPlace("localhost", 4, 2))]
    assert server.is_connected(5001)
    own, foreign = rank(MARK), rank("test-4712.0.1+5001")
    assert server.end(5001)
    assert slurm.ended(5001) == 0
    assert own.wait(PATIENCE_S) == -signal.SIGKILL
    assert foreign.poll() is None, "it belongs to another companion"
    assert server.wait_until_ended(30)
    eventually(lambda: news.of("disconnected"))
    assert not server.end(5001)


def test_a_companion_ends_with_its_base(
    slurm: CompanionSlurm,
    server: CompanionServer,
    news: News,
    rank: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    slurm.run(5001)
    eventually(lambda: news.of("connected"))
    own = rank(MARK)
    server.close()
    assert slurm.ended(5001) == 1
    assert own.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_rank_that_has_joined_may_save_when_its_base_ends(
    slurm: CompanionSlurm, server: CompanionServer, news: News, tmp_path: Path
) -> None:
    slurm.run(5001)
    eventually(lambda: news.of("connected"))
    saving, saved = tmp_path / "saving", tmp_path / "saved"
    script = f"touch {saving}; while ! [ -e {saved} ]; do sleep 0.1; done"
    variables = {STEP_VARIABLE: MARK, JOIN_VARIABLE: "5001"}
    with subprocess.Popen(["sh", "-c", script], env=os.environ | variables) as rank:
        eventually(saving.exists)
        server.close()
        eventually(lambda: news.of("disconnected"))
        saved.touch()
        assert rank.wait(PATIENCE_S) == 0
    assert slurm.ended(5001) == 1


def test_a_companion_whose_base_is_gone_ends_at_once(
    slurm: CompanionSlurm, server: CompanionServer
) -> None:
    server.close()
    slurm.run(5001)
    assert slurm.ended(5001) == 1


def test_a_companion_of_an_earlier_run_is_refused(
    slurm: CompanionSlurm, news: News, server: CompanionServer
) -> None:
    news.marks.clear()
    slurm.run(5001)
    assert slurm.ended(5001) == 1
    assert not news.heard
    assert not server.is_connected(5001)


def test_a_companion_connects_only_once(
    slurm: CompanionSlurm, news: News, server: CompanionServer
) -> None:
    slurm.run(5001)
    eventually(lambda: news.of("connected"))
    with socket.create_connection(("localhost", server.port)) as sock:
        second = CompanionChannel(sock)
        with pytest.raises(CompanionChannelError, match="closed"):
            prove_to_esrun(second, server.secret, 5001, CompanionPlace("localhost", 4, 2))
    assert server.is_connected(5001)
    assert server.end(5001)
    assert slurm.ended(5001) == 0


def test_sigterm_of_slurm_is_passed_on(
    slurm: CompanionSlurm, news: News, server: CompanionServer
) -> None:
    process = slurm.run(5001)
    eventually(lambda: news.of("connected"))
    process.send_signal(signal.SIGTERM)
    eventually(lambda: news.of("terminated") == [(5001,)], "the message")
    assert process.poll() is None, "the ranks may still leave by themselves"
    assert server.end(5001)
    assert slurm.ended(5001) == 0


def test_a_script_that_dies_is_noticed(
    slurm: CompanionSlurm, news: News, server: CompanionServer
) -> None:
    process = slurm.run(5001)
    eventually(lambda: news.of("connected"))
    process.kill()
    eventually(lambda: news.of("disconnected"))
    assert not server.is_connected(5001)


def test_an_esrun_that_is_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion_script, "SILENCE_S", 0.2)
    ours, theirs = (CompanionChannel(sock) for sock in _tcp_pair())
    wakeup, other = socket.socketpair()
    with pytest.raises(CompanionChannelError, match="silent"):
        companion_script._follow(ours, wakeup)
    for end in (ours, theirs, wakeup, other):
        end.close()


def test_a_script_that_is_silent_is_left(
    slurm: CompanionSlurm, news: News, monkeypatch: pytest.MonkeyPatch, server: CompanionServer
) -> None:
    monkeypatch.setattr(companion_server, "SILENCE_S", 0.3)
    monkeypatch.setattr(companion_server, "PING_S", 0.05)
    process = slurm.run(5001)
    eventually(lambda: news.of("connected"))
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: news.of("disconnected"))
    assert "silent" in str(news.of("disconnected")[0][1])
    process.send_signal(signal.SIGCONT)
    assert slurm.ended(5001) == 1


def test_pings_keep_a_companion(
    slurm: CompanionSlurm, news: News, monkeypatch: pytest.MonkeyPatch, server: CompanionServer
) -> None:
    monkeypatch.setattr(companion_server, "PING_S", 0.02)
    pings: list[object] = []
    send = CompanionChannel.send

    def counted(channel: CompanionChannel, **message: object) -> bool:
        pings.extend(message)
        return send(channel, **message)

    monkeypatch.setattr(CompanionChannel, "send", counted)
    slurm.run(5001)
    eventually(lambda: pings.count("ping") > 20, "pings")
    assert server.is_connected(5001)
    assert server.end(5001)
    assert slurm.ended(5001) == 0


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs
