"""The channel, against a server that behaves and several that do not."""

import json
import os
import re
import socket
import sys
import threading
import time
import tomllib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.job import supervisor
from slurm_elastic.rpc import frames, munge_auth, protocol
from tests.support.munge_daemon import MungeDaemon

Answer = Callable[[socket.socket, frames.Message], None]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """One connection is read and handed to `answer`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            frame = frames.read_frame(peer.recv, limit=protocol.MAX_REQUEST)
            answer(peer, frames.decode(frame, purpose="request"))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(10)
        listener.close()


def replying(content: dict[str, Any], **changes: Any) -> Answer:
    def answer(peer: socket.socket, message: frames.Message) -> None:
        seals = {"purpose": "reply", "nonce": message.nonce, "limit": protocol.MAX_REPLY, **changes}
        peer.sendall(frames.encode(content, **seals))

    return answer


def test_question_and_answer(munge: MungeDaemon) -> None:
    asked: list[frames.Message] = []

    def answer(peer: socket.socket, message: frames.Message) -> None:
        asked.append(message)
        replying({"orders": {"text": "x" * 2_000_000}})(peer, message)

    with serving(answer) as address:
        reply = frames.call(address, {"v": 1, "op": "orders"}, timeout_s=20)
    assert len(reply["orders"]["text"]) == 2_000_000
    assert asked[0].content == {"v": 1, "op": "orders"}
    assert (asked[0].uid, asked[0].gid) == (os.getuid(), os.getgid())


def test_a_refusal_carries_its_reason(munge: MungeDaemon) -> None:
    with (
        serving(replying({"error": "job 7 is not elastic"})) as address,
        pytest.raises(frames.RequestRejectedError, match="job 7 is not elastic"),
    ):
        frames.call(address, {}, timeout_s=5)


def test_a_python_without_toml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration = tmp_path / "elastic.toml"
    monkeypatch.setattr(frames, "CONFIGURATION", configuration)
    python = types.SimpleNamespace(version_info=(3, 10, 13), executable="/conda/bin/python")
    monkeypatch.setattr(frames, "sys", python)
    monkeypatch.setitem(sys.modules, "tomli", None)
    assert frames.controller_address() is None  # no configuration, nothing to read
    configuration.write_text('[api]\nuser = "daemon"\ncontroller = "head:99"\n')
    error = (
        f"{configuration}: not read: Python 3.10 needs the package tomli;"
        " /conda/bin/python -m pip install tomli"
    )
    with pytest.raises(frames.ConfigurationReadError, match=re.escape(error)):
        frames.controller_address()
    assert frames.trusted_uids() >= {0, os.getuid()}
    assert supervisor._controller_address() is None
    assert capsys.readouterr().err == (
        f"esrun: {error}; the job continues without its controller\n"
    )
    monkeypatch.setenv(frames.ADDRESS_VARIABLE, "other")
    assert frames.controller_address() == "other"
    monkeypatch.delenv(frames.ADDRESS_VARIABLE)
    monkeypatch.setitem(sys.modules, "tomli", tomllib)
    assert frames.controller_address() == "head:99"
    assert 1 in frames.trusted_uids()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (replying({}, purpose="request"), "is a request, not a reply"),
        (replying({}, nonce="0" * 32), "answers another request"),
        (replying({}, uid=os.getuid() + 4242), "another user"),
        (lambda peer, _: peer.sendall(b"\0\0\0\4null"), "no munge credential"),
    ],
)
def test_a_false_reply_is_not_believed(munge: MungeDaemon, answer: Answer, words: str) -> None:
    with serving(answer) as address, pytest.raises(frames.ControllerUntrustedError, match=words):
        frames.call(address, {}, timeout_s=5)


def test_json_that_is_no_object_is_not_believed(munge: MungeDaemon) -> None:
    def answer(peer: socket.socket, message: frames.Message) -> None:
        frame = munge_auth.seal(b"[1]", purpose="reply", nonce=message.nonce)
        peer.sendall(len(frame).to_bytes(4, "big") + frame)

    with (
        serving(answer) as address,
        pytest.raises(frames.ControllerUntrustedError, match="not a JSON object"),
    ):
        frames.call(address, {}, timeout_s=5)


def test_only_the_controllers_account_may_answer(
    munge: MungeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "trusted_uids", lambda: {os.getuid() + 1})
    with (
        serving(replying({})) as address,
        pytest.raises(frames.ControllerUntrustedError, match="which is not its account"),
    ):
        frames.call(address, {}, timeout_s=5)


def test_answers_of_root_the_user_and_the_configured_account_are_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configuration = tmp_path / "elastic.toml"
    monkeypatch.setattr(frames, "CONFIGURATION", configuration)
    assert frames.trusted_uids() >= {0, os.getuid()}
    configuration.write_text('[api]\nuser = "daemon"\ncontroller = "head:99"\n')
    assert 1 in frames.trusted_uids()
    assert frames.controller_address() == "head:99"
    monkeypatch.setenv(frames.ADDRESS_VARIABLE, "other")
    assert frames.controller_address() == "other"
    monkeypatch.delenv(frames.ADDRESS_VARIABLE)
    configuration.write_text("api = 3\n")
    assert frames.controller_address() is None
    configuration.write_text("not toml")
    assert frames.controller_address() is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda peer, _: None, "closed early"),
        (lambda peer, _: peer.sendall(b"\0\0"), "closed early"),
        (lambda peer, _: peer.sendall(b"\xff\xff\xff\xff"), "4294967295 bytes is announced"),
    ],
)
def test_a_broken_server_is_unreachable(munge: MungeDaemon, answer: Answer, words: str) -> None:
    with serving(answer) as address, pytest.raises(frames.ControllerUnreachableError, match=words):
        frames.call(address, {}, timeout_s=5)


def test_one_deadline_covers_a_trickle(munge: MungeDaemon) -> None:
    def answer(peer: socket.socket, _: frames.Message) -> None:
        peer.sendall(b"\0\0\0\x40")
        try:
            for _second in range(50):
                peer.sendall(b"x")
                time.sleep(0.1)
        except OSError:
            pass

    began = time.monotonic()
    with (
        serving(answer) as address,
        pytest.raises(frames.ControllerUnreachableError, match=r"time|timed out"),
    ):
        frames.call(address, {}, timeout_s=0.5)
    assert time.monotonic() - began < 4


def test_a_controller_that_is_not_there_is_named_unreachable(munge: MungeDaemon) -> None:
    with pytest.raises(frames.ControllerUnreachableError, match="Connection refused"):
        frames.call("127.0.0.1:1", {}, timeout_s=5)


def test_a_request_has_a_limit(munge: MungeDaemon) -> None:
    with pytest.raises(frames.ChannelError, match="more than 65536"):
        frames.call("127.0.0.1:1", {"text": "x" * 70_000}, timeout_s=5)


def test_without_munge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(munge_auth.SOCKET_VARIABLE, "/nowhere/socket")
    with pytest.raises(
        frames.ControllerUntrustedError, match=r"munge: .*(is munged running|is installed)"
    ):
        frames.call("127.0.0.1:1", {}, timeout_s=5)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ctl", ("ctl", 7321)),
        ("ctl:99", ("ctl", 99)),
        ("10.0.0.1:7321", ("10.0.0.1", 7321)),
        ("[fe80::1]:99", ("fe80::1", 99)),
        ("fe80::1", ("fe80::1", 7321)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert frames.parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":99", "ctl:", "ctl:0", "ctl:99999", "ctl:http"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(frames.ControllerUnreachableError, match="write HOST:PORT"):
        frames.parse_address(text)


def test_the_frame_as_documented(munge: MungeDaemon) -> None:
    frame = frames.encode({"v": 1}, purpose="request", nonce="n", limit=1000)
    size = frames.frame_size(frame[: frames.HEADER_SIZE], limit=1000)
    assert size == len(frame) - 4
    line, body = frame[4:].split(b"\n", 1)
    assert line.startswith(b"MUNGE:")
    assert json.loads(body) == {"v": 1}
    with pytest.raises(EOFError):
        frames.frame_size(frame[:3], limit=1000)


def test_of_several_the_active_one_answers_and_is_asked_first_from_then_on(
    munge: MungeDaemon,
) -> None:
    standby = replying({"error": "this controller stands by", "code": "standby"})
    with serving(standby) as one, serving(replying({"version": "1"})) as two:
        both = f"{one},{two}"
        assert frames.call(both, {"op": "ping"}, timeout_s=5) == {"version": "1"}
    with serving(replying({"version": "2"})) as two:
        frames._active[f"{one},{two}"] = two
        assert frames.call(f"{one},{two}", {"op": "ping"}, timeout_s=5) == {"version": "2"}


def test_of_several_one_that_is_dead_is_passed_over(munge: MungeDaemon) -> None:
    with serving(replying({"version": "1"})) as two:
        assert frames.call(f"127.0.0.1:1, {two}", {}, timeout_s=5) == {"version": "1"}


def test_a_refusal_of_the_active_one_is_final(munge: MungeDaemon) -> None:
    with (
        serving(replying({"error": "no", "code": "refused"})) as one,
        pytest.raises(frames.RequestRejectedError, match="no"),
    ):
        frames.call(f"{one},127.0.0.1:1", {}, timeout_s=5)


def test_when_none_is_active_each_says_why(munge: MungeDaemon) -> None:
    standby = replying(
        {"error": "this controller stands by; none is active yet", "code": "standby"}
    )
    with (
        serving(standby) as one,
        pytest.raises(
            frames.ControllerUnreachableError, match=r"stands by.*; 127.0.0.1:1: Connection refused"
        ),
    ):
        frames.call(f"{one},127.0.0.1:1", {}, timeout_s=5)
