"""The socket, over TCP: with munge where the seal matters, else with plain seals."""

import encodings.idna  # noqa: F401 - of host names; another user may not read it any more
import json
import os
import socket
import struct
import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_elastic.config import schema
from slurm_elastic.controller.server import socket_server
from slurm_elastic.controller.server.request_auth import MungeAuth
from slurm_elastic.core.report import Report
from slurm_elastic.rpc import frames, munge_auth, protocol
from tests.support.controller.api_server import address, answer, ask, serving
from tests.support.controller.fake_controller import (
    ALICE,
    BOB,
    OPERATOR,
    FakeBackend,
    FakeLog,
    PlainAuth,
)
from tests.support.munge_daemon import environment, munged
from tests.support.needs import require
from tests.support.patience import PATIENCE_S

ROOT = os.getuid()


@contextmanager
def another_user(uid, request):
    """Fork, become somebody else, and send one request to the address that is told later."""
    there, back = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.setgid(uid)
        os.setuid(uid)
        try:
            where = os.read(there[0], 100).decode()
            os.write(back[1], str(frames.call(where, request, timeout_s=5)).encode())
        except BaseException as error:  # noqa: BLE001 - this process must not go on testing
            os.write(back[1], f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)

    def call(where):
        os.write(there[1], where.encode())
        return os.read(back[0], 10_000).decode()

    yield call
    os.waitpid(child, 0)
    for fd in (*there, *back):
        os.close(fd)


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def log():
    return FakeLog()


@pytest.fixture
def server(backend, log):
    with serving(backend, log, PlainAuth()) as running:
        yield running


@pytest.fixture(scope="module")
def munge_socket():
    with munged() as daemon, environment(daemon.socket):
        yield daemon.socket


def test_a_sealed_round_trip(backend, log, munge_socket):
    with serving(backend, log) as server:
        reply = frames.call(address(server), {"v": 1, "op": "ping"}, timeout_s=5)
    assert reply["uid"] == ROOT
    assert log.texts() == []


def test_a_report_gets_orders(munge_socket):
    backend = FakeBackend({4711: ROOT})
    report = Report(job_id=4711, run=2, phase="training", step=7)
    with serving(backend) as server:
        reply = frames.call(
            address(server), {"v": 1, "op": "report", "report": report.to_wire()}, timeout_s=5
        )
    assert reply["orders"]["action"] == "run"
    assert backend.reports == [(ROOT, report)]


def test_the_seal_tells_who_asks_whatever_he_says(backend, log, munge_socket):
    """Another Unix user, with his own munge credential, reports for somebody's job."""
    require("root")  # who alone can become another user
    report = {"job_id": 4711, "run": 0, "phase": "training"}
    request = {"v": 1, "op": "report", "uid": ALICE, "report": report}
    with another_user(BOB, request) as ask_as_bob, serving(backend, log) as server:
        told = ask_as_bob(address(server))
    assert "job 4711 belongs to another user" in told
    assert log.texts("warning") == [f"JobId=4711 Uid={BOB} Refused=report: not the owner"]
    assert backend.reports == []


def test_only_the_caller_can_open_the_reply(munge_socket):
    """A reply is restricted to one uid: for anybody else munge refuses it."""
    frame = MungeAuth().close({"secret": 1}, frames.Message(ROOT + 1, 0, {}, "n"))
    with pytest.raises(munge_auth.UnsealError, match="sealed for another user"):
        munge_auth.unseal(frame[4:], purpose="reply", nonce="n")


def test_a_request_is_taken_once(backend, log, munge_socket):
    frame = frames.encode(
        {"v": 1, "op": "ping"}, purpose="request", nonce="n", limit=protocol.MAX_REQUEST
    )
    with serving(backend, log) as server:
        for expected in (True, False):
            with socket.create_connection(server.address, timeout=5) as sock:
                sock.sendall(frame)
                assert bool(sock.recv(10)) is expected
    assert "replay" in log.texts("warning")[0]


def test_unsealed_and_foreign_frames_are_dropped(backend, log, munge_socket):
    reply = frames.encode({"v": 1, "op": "ping"}, purpose="reply", nonce="n", limit=65536)
    hostile = b"\0\0\0\x10MUNGE:forged:\n{}"
    strange = munge_auth.seal(b"[1]", purpose="request", nonce="n")
    with serving(backend, log) as server:
        for frame in (reply, hostile, struct.pack("!I", len(strange)) + strange, b"GET / HTTP/1.1"):
            with socket.create_connection(server.address, timeout=5) as sock:
                sock.sendall(frame)
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(10) == b""
        assert frames.call(address(server), {"v": 1, "op": "ping"}, timeout_s=5)["protocol"] == 2


def test_a_reply_beyond_mungs_limit_and_one_beyond_ours(backend, munge_socket):
    with serving(backend) as server:
        call = {"v": 1, "op": "usage", "user": f"size:{3 << 20}"}
        assert len(frames.call(address(server), call, timeout_s=10)["filling"]) == 3 << 20
        with pytest.raises(frames.RequestRejectedError, match=r"bytes, more than .* ask for less"):
            frames.call(address(server), {**call, "user": f"size:{17 << 20}"}, timeout_s=10)


def test_a_missing_munge_is_one_clear_line_and_mends_itself(backend, log, munge_socket, tmp_path):
    call = {"v": 1, "op": "ping"}
    with environment(tmp_path / "nothing"), serving(backend, log) as server:
        (line,) = log.texts("error")
        assert line.startswith("munge: socket ")
        assert line.endswith("is munged running? Requests are dropped until it answers")
        with environment(munge_socket):
            assert frames.call(address(server), call, timeout_s=5)["protocol"] == 2


# --- rights ---


def test_only_the_owner_reports_and_gets_orders(server, backend, log):
    report = {"job_id": 4711, "run": 0, "phase": "training"}
    for uid in (BOB, OPERATOR, 0):
        assert ask(server, uid, "report", report=report)["code"] == "refused"
        assert ask(server, uid, "orders", job_id=4711, run=0)["code"] == "refused"
    assert backend.reports == []
    assert f"JobId=4711 Uid={BOB} Refused=report: not the owner" in log.texts("warning")
    assert "orders" in ask(server, ALICE, "report", report=report)


def test_a_job_not_yet_known_is_told_apart_from_a_refusal(server):
    reply = ask(server, ALICE, "orders", job_id=99, run=0)
    assert reply["code"] == "unknown_job"


def test_commands_are_for_owners_and_operators(server, backend, log):
    for op in ("hold", "release", "update", "teach"):
        assert ask(server, ALICE, op, jobs=["4711"])["results"][0]["ok"]
        assert ask(server, OPERATOR, op, jobs=["4711", "4722"])["results"][1]["job_id"] == 4722
        refused = ask(server, BOB, op, jobs=["4722", "4711"])
        assert refused["error"] == f"job 4711: only its owner or an operator may {op} it"
    assert all(uid != BOB for uid, *_ in backend.asked), "all or nothing"
    assert f"JobId=4711 Uid={BOB} Refused=hold: not the owner" in log.texts("warning")


def test_retire_and_reconfigure_are_for_operators(server, backend):
    for op in ("retire", "reconfigure"):
        assert ask(server, ALICE, op)["error"].startswith(f"{op} is for operators")
        assert "error" not in ask(server, OPERATOR, op)
    assert [uid for uid, *_ in backend.asked] == [OPERATOR, OPERATOR]


def test_private_data_does_not_even_tell_that_a_job_exists(server, backend):
    backend.is_private = True
    hidden = ask(server, BOB, "explain", jobs=["4711"])
    missing = ask(server, BOB, "explain", jobs=["9999"])
    assert hidden["error"] == "job 4711: Invalid job id specified"
    assert missing["error"] == "job 9999: Invalid job id specified"
    assert ask(server, BOB, "hold", jobs=["4711"])["error"] == hidden["error"]
    assert ask(server, ALICE, "explain", jobs=["4711"])["job_ids"] == [4711]
    assert ask(server, OPERATOR, "explain", jobs=["4711"])["job_ids"] == [4711]


def test_private_data_shows_a_forgotten_job_to_its_owner(server, backend):
    backend.is_private = True
    backend.past_owners = {17: ALICE}
    assert ask(server, ALICE, "explain", jobs=["17"])["job_ids"] == [17]
    assert ask(server, BOB, "explain", jobs=["17"])["error"] == "job 17: Invalid job id specified"
    assert ask(server, ALICE, "hold", jobs=["17"])["error"] == "job 17: Invalid job id specified"


@pytest.mark.parametrize("is_private", [False, True])
def test_before_the_first_look_a_job_may_exist(server, backend, is_private):
    backend.owners, backend.has_read, backend.is_private = {}, False, is_private
    not_read = "job 4711: the controller has not read Slurm's jobs yet: try again"
    for op, words in (("update", {"elastic": "1-2"}), ("hold", {}), ("explain", {})):
        told = ask(server, ALICE, op, jobs=["4711"], **words)
        assert told == {"error": not_read, "code": "refused"}
    backend.has_read = True
    invalid = ask(server, ALICE, "hold", jobs=["4711"])
    assert invalid["error"] == "job 4711: Invalid job id specified"


def test_past_jobs_keep_their_number(server):
    assert ask(server, BOB, "history", jobs=["17"])["job_ids"] == [17]
    assert ask(server, BOB, "history", jobs=["5000"])["job_ids"] == [5001, 5002]


def test_what_a_caller_claims_about_job_ids_is_not_believed(server, backend):
    ask(server, BOB, "status", job_ids=[4711])
    assert backend.asked == [(BOB, "status", {})]


# --- hostile and unlucky callers ---


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"op": "hold", "jobs": []}, "hold: which job"),
        ({"op": "hold", "jobs": "4711"}, "field jobs must be a list"),
        ({"op": "hold", "jobs": ["4711"], "dry_run": "no"}, "dry_run must be true or false"),
        ({"op": "explain", "jobs": ["4711; rm -rf"]}, "an id is written 4711 or 4711_3"),
        ({"op": "explain", "jobs": ["1"] * 1001}, "at most 1000"),
        ({"op": "explain", "jobs": [["1"]]}, "an id is written"),
        ({"op": "explain", "jobs": ["٤٧١١"]}, "an id is written"),
        ({"op": "orders", "job_id": "4711", "run": 0}, "job_id must be a whole number"),
        ({"op": "orders", "job_id": True, "run": 0}, "job_id must be a whole number"),
        ({"op": "orders", "job_id": 4711, "run": -1}, "run must be a whole number"),
        ({"op": "orders", "job_id": [1], "run": 0}, "job_id must be a whole number"),
        ({"op": "orders", "job_id": 4711, "run": 0, "wait_s": "1"}, "wait_s must be a number"),
        ({"op": "orders", "job_id": 4711, "run": 0, "wait_s": float("nan")}, "wait_s must be"),
        ({"op": "report"}, "must be a JSON object"),
        ({"op": "report", "report": {"job_id": 4711}}, "is missing"),
        (
            {"op": "report", "report": {"job_id": 4711, "run": 0, "phase": "x"}},
            "is invalid: expected one of starting",
        ),
        ({"op": "rm"}, "op 'rm' is unknown"),
        ({"op": ["status"]}, "is unknown"),
        ({"op": None}, "op None is unknown"),
        ({"op": "x" * 9999}, "is unknown"),
    ],
)  # fmt: skip
def test_malformed_requests_get_one_line(server, request_, words):
    reply = ask(server, ALICE, **request_)
    assert reply["code"] == "malformed"
    assert words in reply["error"]
    assert len(reply["error"]) < 200
    assert "\n" not in reply["error"]


def test_another_protocol_is_told_what_to_do(server):
    for v in (0, 3, "2", None):
        assert "install the same release" in ask(server, ALICE, "status", v=v)["error"]
    refused = ask(server, ALICE, "status", v=1)  # of a client that reads sentences
    assert refused["code"] == "version"
    assert "protocol 1 is invalid: " in refused["error"]
    assert " expects 2; " in refused["error"]
    assert ask(server, ALICE, "usage", v=1)["op"] == "usage", "its form is the same"


def test_a_refusal_of_the_backend_is_an_answer_and_a_bug_is_not(server, log):
    assert ask(server, ALICE, "usage", user="refuse")["error"] == "not now: ask later"
    assert ask(server, ALICE, "usage", user="bug")["code"] == "internal"
    (line,) = log.texts("error")
    assert "ZeroDivisionError" in line
    assert ask(server, ALICE, "status")["op"] == "status"


def test_too_many_requests_are_refused_and_come_back_later(backend, log):
    with serving(backend, log, PlainAuth(), rate=2) as server:
        replies = [ask(server, ALICE, "status") for _ in range(30)]
        refused = [r for r in replies if r.get("code") == "rate"]
        assert 5 <= len(refused) <= 10
        assert "error" not in ask(server, BOB, "status"), "each user has his own allowance"
        time.sleep(1.1)
        assert "error" not in ask(server, ALICE, "status")
    assert len(log.texts("warning")) == 1, "refusals do not flood the log"


def test_a_frame_that_is_too_large_or_never_comes_is_dropped(server, monkeypatch):
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(struct.pack("!I", protocol.MAX_REQUEST + 1))
        assert sock.recv(1) == b""
    monkeypatch.setattr(socket_server, "IO_TIMEOUT_S", 0.2)
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(b"\0\0")
        begin = time.monotonic()
        assert sock.recv(1) == b""
        assert time.monotonic() - begin < 3


def test_idle_connections_from_one_address_do_not_keep_others_out(server, monkeypatch):
    monkeypatch.setattr(socket_server, "_MAX_SILENT", 8)
    monkeypatch.setattr(socket_server, "_SILENCE_S", 0.0)
    idle = [socket.create_connection(server.address) for _ in range(50)]
    try:
        _until(lambda: server._connections <= 8 and _silent(server) <= 8)
        assert ask(server, ALICE, "ping")["protocol"] == 2
    finally:
        for sock in idle:
            sock.close()


def _silent(server):
    return sum(len(s) for s in list(server._reading.values()))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(
    max_examples=150,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.sampled_from(["status", "orders", "report", "hold", "update", "explain", "usage", "retire"]),
    st.dictionaries(
        st.sampled_from(["jobs", "job_id", "run", "seen", "report", "dry_run", "elastic", "x"]),
        JSON,
        max_size=5,
    ),
)
def test_any_request_gets_an_answer(server, log, op, args):
    ask(server, BOB, op, **args)
    assert log.texts("error") == []


@settings(
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)
@given(st.binary(max_size=200))
def test_any_bytes_leave_the_server_alive(server, data):
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    assert ask(server, ALICE, "ping")["protocol"] == 2


# --- long polls ---


def test_a_poll_waits_until_the_orders_change(server, backend):
    got = []
    waiting = threading.Thread(
        target=lambda: got.append(
            ask(server, ALICE, "orders", timeout=20, job_id=4711, run=3, seen=0, wait_s=15)
        )
    )
    waiting.start()
    time.sleep(0.3)
    server.wake(4722)  # somebody else's
    server.wake(4711)  # nothing new
    time.sleep(0.3)
    assert got == []
    backend.seq = 5
    begin = time.monotonic()
    server.wake(4711)
    waiting.join(5)
    assert got[0]["orders"] == {**got[0]["orders"], "seq": 5, "reason": "of 4711.3"}
    assert time.monotonic() - begin < 1


def test_a_poll_of_someone_who_is_behind_returns_at_once(server, backend):
    backend.seq = 7
    assert ask(server, ALICE, "orders", job_id=4711, run=0, seen=6, wait_s=15)["orders"]["seq"] == 7
    assert ask(server, ALICE, "orders", job_id=4711, run=0)["orders"]["seq"] == 7


def test_a_poll_ends_when_its_time_is_out(server):
    begin = time.monotonic()
    ask(server, ALICE, "orders", job_id=4711, run=0, seen=0, wait_s=0.5)
    assert 0.4 < time.monotonic() - begin < 3


def test_a_caller_who_hangs_up_is_forgotten(server):
    body = json.dumps(
        {"uid": ALICE, "nonce": "n", "content": {
            "v": 1, "op": "orders", "job_id": 4711, "run": 0, "seen": 0, "wait_s": 30}}
    ).encode()  # fmt: skip
    with socket.create_connection(server.address) as sock:
        sock.sendall(struct.pack("!I", len(body)) + body)
        _until(lambda: 4711 in server._waiting)
    _until(lambda: 4711 not in server._waiting)


def test_stopping_ends_polls_and_frees_the_address(backend):
    with serving(backend, seals=PlainAuth()) as server:
        where = server.address
        sock = socket.create_connection(where, timeout=5)
        _until(lambda: _silent(server) == 1)
    assert sock.recv(1) == b""
    sock.close()
    again = socket_server.Server(
        schema.ApiSettings(listen=f"127.0.0.1:{where[1]}"), backend, FakeLog(), PlainAuth()
    )
    again.start()
    again.stop()


def test_an_address_that_is_taken_is_named(backend, server):
    taken = f"127.0.0.1:{server.address[1]}"
    other = socket_server.Server(schema.ApiSettings(listen=taken), backend, FakeLog(), PlainAuth())
    with pytest.raises(OSError, match=rf"\[api\] listen = '{taken}'"):
        other.start()
    other.stop()


def idle() -> bool:
    """Whether a second costs this process next to no CPU."""
    before = time.process_time()
    time.sleep(1.0)
    return time.process_time() - before < 0.1


def test_thousands_of_idle_polls_cost_nothing_and_all_are_woken(server, backend):
    count = 1500
    body = json.dumps(
        {"uid": ALICE, "nonce": "n", "content": {
            "v": 1, "op": "orders", "job_id": 4711, "run": 0, "seen": 0, "wait_s": 30}}
    ).encode()  # fmt: skip
    socks = []
    try:
        for _ in range(count):
            sock = socket.create_connection(server.address, timeout=20)
            sock.sendall(struct.pack("!I", len(body)) + body)
            socks.append(sock)
        _until(lambda: len(server._waiting.get(4711, ())) == count, seconds=60)
        _until(idle, seconds=30)
        backend.seq = 1
        server.wake(4711)
        assert all(answer(sock)["orders"]["seq"] == 1 for sock in socks)
    finally:
        for sock in socks:
            sock.close()


def test_the_backend_is_asked_on_one_thread(server, backend):
    callers = [
        threading.Thread(target=ask, args=(server, ALICE, "hold"), kwargs={"jobs": ["4711"]})
        for _ in range(20)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(backend.asked) == 20
    ask(server, ALICE, "orders", job_id=4711, run=0)
    assert len(backend.threads) == 1


def _until(condition, seconds=PATIENCE_S):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_who_stands_by_answers_pings_and_names_the_active_one(backend):
    role = [socket_server.Role("standby", "h1:7321")]
    with serving(None, seals=PlainAuth(), role=lambda: role[0]) as server:
        assert ask(server, ALICE, "ping")["active"] == "h1:7321"
        for op in ("status", "hold", "retire", "copy", "report", "orders"):
            refused = ask(server, ALICE, op, jobs=["4711"], job_id=4711, run=0)
            assert refused["code"] == "standby"
            assert "h1:7321" in refused["error"]
        role[0] = socket_server.Role("active", "h2:7321")
        assert ask(server, ALICE, "status")["code"] == "standby"  # its backend is still to come
        server.serve(backend)
        assert ask(server, ALICE, "status")["op"] == "status"
        assert ask(server, ALICE, "copy", since={})["code"] == "refused"


def test_a_long_poll_ends_when_the_controller_is_no_longer_active(backend):
    role = [socket_server.Role("active", "h1:7321")]
    answers = []
    with serving(backend, seals=PlainAuth(), role=lambda: role[0]) as server:
        poll = threading.Thread(
            target=lambda: answers.append(
                ask(server, ALICE, "orders", job_id=4711, run=0, seen=0, wait_s=30)
            )
        )
        poll.start()
        while not server._waiting:
            time.sleep(0.01)
        role[0] = socket_server.Role("standby", "h2:7321")
        while poll.is_alive():  # woken before it waited: woken again
            server.wake_all()
            poll.join(0.1)
        assert answers[0]["code"] == "standby"
