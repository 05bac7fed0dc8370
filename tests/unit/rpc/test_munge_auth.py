"""Seals against a real munged."""

import os
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from slurm_elastic.rpc import munge_auth
from tests.support.munge_daemon import MungeDaemon


@pytest.fixture(params=["library", "commands"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "commands":
        monkeypatch.setattr(munge_auth, "_library", lambda: None)
    return str(request.param)


def make(body: bytes = b"{}", **changes: object) -> bytes:
    return munge_auth.seal(body, **{"purpose": "request", "nonce": "n1", **changes})  # type: ignore[arg-type]


def test_a_message_comes_back_with_its_author(munge: MungeDaemon, way: str) -> None:
    body = bytes(range(256)) * 5000
    opened = munge_auth.unseal(make(body), purpose="request")
    assert opened == (os.getuid(), os.getgid(), body, "n1")


def test_a_message_is_opened_once(munge: MungeDaemon, way: str) -> None:
    frame = make()
    munge_auth.unseal(frame, purpose="request")
    with pytest.raises(munge_auth.UnsealError, match="a replay"):
        munge_auth.unseal(frame, purpose="request")


def changed_body(frame: bytes) -> bytes:
    return frame[:-1] + b"]"


def changed_credential(frame: bytes) -> bytes:
    return frame[:20] + (b"A" if frame[20:21] != b"A" else b"B") + frame[21:]


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (changed_body, "changed on its way"),
        (changed_credential, "munge: "),
        (lambda frame: b"", "no munge credential"),
        (lambda frame: b"{}\n{}", "no munge credential"),
        (lambda frame: b"MUNGE:" + b"A" * 10000 + b":\n{}", "no munge credential"),
        (lambda frame: b"MUNGE:AwQDAAB:\n{}", "munge: "),
    ],
)
def test_forgeries_are_refused(
    munge: MungeDaemon, way: str, tamper: Callable[[bytes], bytes], words: str
) -> None:
    with pytest.raises(munge_auth.UnsealError, match=words):
        munge_auth.unseal(tamper(make()), purpose="request")


def test_a_request_is_no_reply_and_a_reply_answers_one_request(munge: MungeDaemon) -> None:
    with pytest.raises(munge_auth.UnsealError, match="is a request, not a reply"):
        munge_auth.unseal(make(), purpose="reply", nonce="n1")
    with pytest.raises(munge_auth.UnsealError, match="another request"):
        munge_auth.unseal(make(purpose="reply"), purpose="reply", nonce="n2")
    assert munge_auth.unseal(make(purpose="reply"), purpose="reply", nonce="n1").body == b"{}"


def test_a_credential_of_another_program_is_refused(munge: MungeDaemon) -> None:
    credential = munge_auth._encode(b"something else", None)
    with pytest.raises(munge_auth.UnsealError, match="another program"):
        munge_auth.unseal(credential + b"\n{}", purpose="request")
    credential = munge_auth._encode("slurm-elastic-1 request ü 0".encode(), None)
    with pytest.raises(munge_auth.UnsealError, match="another program"):
        munge_auth.unseal(credential + b"\n{}", purpose="request")


def test_a_message_for_another_user_stays_closed(munge: MungeDaemon, way: str) -> None:
    assert munge_auth.unseal(make(uid=os.getuid()), purpose="request").body == b"{}"
    with pytest.raises(munge_auth.UnsealError, match="another user"):
        munge_auth.unseal(make(uid=os.getuid() + 4242), purpose="request")


def test_no_munged_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv(munge_auth.SOCKET_VARIABLE, "/nowhere/socket")
    with pytest.raises(munge_auth.MungeError) as caught:
        make()
    words = "munge: socket /nowhere/socket does not answer: is munged running?"
    if shutil.which("munge") is None:
        words = "munge: neither libmunge.so.2 nor the command munge is installed"
    assert str(caught.value) == words


def test_no_munge_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(munge_auth, "_library", lambda: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        munge_auth.MungeError, match=r"neither libmunge\.so\.2 nor the command munge"
    ):
        make()


def test_a_stopped_munged_holds_nobody_up(
    munge: MungeDaemon, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(munge_auth, "TIMEOUT_S", 0.3)
    os.kill(munge.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(munge_auth.MungeError, match="does not answer"):
            make()
        assert time.monotonic() - began < 5, "libmunge alone waits for ten seconds"
    finally:
        os.kill(munge.pid, signal.SIGCONT)
