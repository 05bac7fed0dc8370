"""Connection between rank 0 and esrun, both ends."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job import rank_socket, rank_socket_server
from slurm_elastic.job.rank_socket import SOCKET_VARIABLE, RankSocket
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState
from tests.support.patience import PATIENCE_S


class Esrun:
    """A report state behind a socket, as in esrun."""

    def __init__(self) -> None:
        self.path = f"@slurm-elastic-test-{os.urandom(6).hex()}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(rank_socket.socket_address(self.path))
        self.listener.listen()
        self.state = ReportState(Report(job_id=7, run=0, phase="starting"))
        self.joined = 0
        self.group: list[dict[str, object]] = []
        self.server = RankSocketServer(
            self.state, self.listener, on_report=self._join, on_group=self.group.append
        )
        self.server.start()

    def _join(self, _fields: object) -> None:
        self.joined += 1


@pytest.fixture
def esrun(monkeypatch: pytest.MonkeyPatch) -> Esrun:
    server = Esrun()
    monkeypatch.setenv(SOCKET_VARIABLE, server.path)
    return server


@pytest.fixture
def link(esrun: Esrun) -> Iterator[RankSocket]:
    link = RankSocket.connect()
    assert link is not None
    yield link
    link.close()


def eventually(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_first_orders_are_those_of_the_controller(esrun: Esrun) -> None:
    esrun.state.expect_controller()
    link = RankSocket.connect()
    assert link is not None
    assert link.first(0.05) == Orders(), "it waits no longer than that"
    assert link.controlled
    ordered = Orders(seq=4, layout="2x2", batch=64)
    threading.Timer(0.1, esrun.state.receive, [ordered], {"authoritative": False}).start()
    assert link.first(30) == ordered
    assert link.first(30) == ordered
    link.close()


@pytest.mark.parametrize("controller", ["none", "unreachable", "heard"])
def test_nothing_to_wait_for(esrun: Esrun, controller: str) -> None:
    orders = Orders(seq=2, frozen=3) if controller == "heard" else Orders()
    if controller == "unreachable":
        esrun.state.expect_controller()
        threading.Timer(0.1, esrun.state.give_up_controller).start()
    elif controller == "heard":
        esrun.state.receive(orders, authoritative=True)
    link = RankSocket.connect()
    assert link is not None
    assert link.first(3600) == orders
    assert link.controlled is (controller == "heard")
    link.close()


def test_first_orders_of_an_esrun_that_is_old_or_dies() -> None:
    link, esrun = pair()
    esrun.sendall(b'{"orders": {"seq": 2, "layout": "1x2", "mood": "fine"}, "weather": 1}\n')
    assert link.first(3600) == Orders(seq=2, layout="1x2")
    assert link.controlled
    link.close()
    esrun.close()
    link, esrun = pair()
    esrun.close()
    assert link.first(3600) == Orders()
    assert RankSocket.offline().first(3600) == Orders()


@pytest.mark.parametrize("companions", [{"4711": 2}, {}, None])
def test_desired_companions_are_read_however_late_they_come(companions: object) -> None:
    link, esrun = pair()
    message = {"orders": {"seq": 2}} | ({} if companions is None else {"companions": companions})
    line = json.dumps(message).encode() + b"\n"
    assert link.read_companions(0.01) is None
    threading.Timer(0.1, esrun.sendall, [line]).start()
    assert link.read_companions(3600) == companions
    assert link.read_companions(3600) == companions
    link.close()
    esrun.close()


def test_there_are_no_companions_without_esrun() -> None:
    link, esrun = pair()
    esrun.close()
    assert link.read_companions(3600) is None
    assert RankSocket.offline().read_companions(3600) is None


def test_a_large_profile_arrives(esrun: Esrun, link: RankSocket) -> None:
    rows = [[f"block{i}", 0.1234567890123, 0.1234567890123, 1e6, 1e6] for i in range(600)]
    link.send({"profile": rows, "step": 3})
    eventually(lambda: (link.orders(), esrun.state.report().step == 3)[1])
    assert len(esrun.state.report().profile) == 600
    assert esrun.state.report().profile[0][1] == 0.123457


def test_reports_arrive(esrun: Esrun, link: RankSocket) -> None:
    link.send({"phase": "training", "step": 3})
    link.send({"step": 4})
    eventually(lambda: esrun.state.report().step == 4)
    assert esrun.state.report().phase == "training"
    assert esrun.joined


def test_orders_arrive_and_can_be_waited_for(esrun: Esrun, link: RankSocket) -> None:
    assert link.wait(0.05) == Orders()
    esrun.state.receive(Orders(seq=1, action="notice", notice=3, deadline_s=30), authoritative=True)
    orders = link.wait(PATIENCE_S)
    assert (orders.action, orders.notice) == ("notice", 3)
    assert orders.deadline_s is not None
    assert 20 < orders.deadline_s <= 30
    esrun.state.receive(Orders(seq=2), authoritative=True)
    eventually(lambda: link.orders().action == "run")
    assert link.orders().deadline_s is None


def test_who_joins_late_is_told_the_last_orders(esrun: Esrun) -> None:
    esrun.state.receive(Orders(seq=1, action="rehearse"), authoritative=True)
    link = RankSocket.connect()
    assert link is not None
    assert link.wait(PATIENCE_S).action == "rehearse"
    link.close()


def test_without_an_esrun_there_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    assert RankSocket.connect() is None
    assert RankSocket.connect("/nowhere") is None
    assert RankSocket.connect("@slurm-elastic-nowhere") is None


def test_an_esrun_out_of_reach_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container with a network of its own: the job would silently not be resized."""
    monkeypatch.setenv(SOCKET_VARIABLE, "@slurm-elastic-nowhere")
    assert RankSocket.connect() is None
    assert capsys.readouterr().err == (
        "slurm-elastic: esrun is not reached: Connection refused; the job is not resized; a"
        " container needs the host's network and the user's own uid\n"
    )
    assert RankSocket.connect("/nowhere") is None
    assert capsys.readouterr().err == ""


def test_another_user_is_nobody(
    esrun: Esrun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_socket, "peer_uid", lambda _: os.getuid() + 1)
    assert RankSocket.connect() is None
    assert "esrun is not reached: it runs as another user; " in capsys.readouterr().err


def test_esrun_hangs_up_on_another_user(esrun: Esrun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_socket_server, "peer_uid", lambda _: os.getuid() + 1)
    link = RankSocket.connect()
    assert link is not None
    link.wait(PATIENCE_S)
    assert not link.connected
    assert not esrun.joined


def test_offline_swallows_everything() -> None:
    link = RankSocket.offline()
    link.send({"step": 1})
    assert link.orders() == Orders()
    assert link.wait(30) == Orders(), "and waits for nobody"
    assert not link.connected


def pair() -> tuple[RankSocket, socket.socket]:
    ours, theirs = socket.socketpair()
    return RankSocket(ours), theirs


def test_an_esrun_that_dies_leaves_its_last_orders() -> None:
    link, esrun = pair()
    esrun.sendall(json.dumps({"orders": {"seq": 3, "action": "notice"}}).encode() + b"\n")
    esrun.close()
    assert link.orders().action == "notice"
    link.send({"step": 1})
    assert link.wait(30).action == "notice"
    assert not link.connected


def test_a_stopped_esrun_costs_no_time_and_gets_the_newest_values() -> None:
    link, esrun = pair()
    for step in range(20_000):
        link.send({"step": step, "text": "x" * 50})
    link.send({"phase": "saved"})
    received = b""
    esrun.settimeout(1)
    while b"saved" not in received:
        link.orders()
        received += esrun.recv(1 << 20)
    fields: dict[str, object] = {}
    for line in received.splitlines():
        fields |= json.loads(line)["report"]
    assert (fields["step"], fields["phase"]) == (19_999, "saved")
    link.close()
    esrun.close()


def test_what_is_not_understood_is_passed_over() -> None:
    link, esrun = pair()
    for line in (b"nonsense", b"[]", b'{"orders": {"action": "dance"}}', b'{"orders": {"seq": 2}}'):
        esrun.sendall(line + b"\n")
    assert link.orders() == Orders(seq=2)
    link.close()
    esrun.close()


#: Reports of the library of 0.1.0, and orders of esrun of 0.1.0.
LIBRARY_0_1 = {
    "phase": "saved", "kind": "library", "step": 12, "progress": 0.5, "step_time_s": 0.25,
    "steps_measured": 20, "global_batch": 256, "micro_batch": 32, "accumulation": 1,
    "micro_step_s": 0.1, "grad_sqr": 1.5, "grad_var": 3.5, "initial_batch": 256,
    "max_micro_batch": 64, "application": "gpt", "checkpoint_step": 12, "checkpoint_age_s": 1.5,
    "checkpoint_s": 0.5, "startup_s": 4.5, "restore_s": 0.5, "resumed_from": 6, "proven": True,
    "notice": 17, "layout": "2x2", "layers": 4, "frozen": 1, "certified": 2, "penalty": 0.25,
    "certified_penalty": 0.5, "data_s": 0.5, "forward_s": 0.5, "backward_s": 0.5, "sync_s": 0.5,
    "optimizer_s": 0.5, "peak_memory_bytes": 1000000, "profile_batch": 8,
    "profile": [["a", 0.5, 1.5, 100.0, 200.0]],
}  # fmt: skip
ESRUN_0_1 = {
    "seq": 3, "action": "notice", "notice": 17, "deadline_s": 120.0, "report_every_s": 5.0,
    "reason": "gives-gpus", "layout": "2x2", "batch": 512, "frozen": 1, "directive": "2-8",
}  # fmt: skip


def test_a_library_of_the_release_before_is_understood(
    esrun: Esrun, link: RankSocket, capsys: pytest.CaptureFixture[str]
) -> None:
    link.send(LIBRARY_0_1)
    eventually(lambda: esrun.joined)
    eventually(lambda: esrun.state.report().phase == "saved")
    report = esrun.state.report().to_wire()
    for name, value in LIBRARY_0_1.items():
        if name == "profile":
            assert [list(row) for row in report[name]] == value
        elif name == "checkpoint_age_s":
            assert report[name] >= 1.5
        else:
            assert report[name] == value, name
    assert capsys.readouterr().err == ""


def test_an_esrun_of_the_release_before_is_understood() -> None:
    link, esrun = pair()
    line = json.dumps({"orders": ESRUN_0_1, "controller": "heard"}).encode()
    esrun.sendall(line + b"\n")
    orders = link.first(3600)
    assert {name: getattr(orders, name) for name in ESRUN_0_1} == ESRUN_0_1
    link.close()
    esrun.close()


def test_a_newer_library_reports_what_it_can(
    esrun: Esrun, link: RankSocket, capsys: pytest.CaptureFixture[str]
) -> None:
    """A field of a later release is passed over, a later value of a field is named once."""
    link.send({"mood": "fine", "weather": {"wind": 3}, "phase": "training", "step": 4})
    link.send({"phase": "dreaming", "step": 5})
    link.send({"phase": "dreaming", "step": 6})
    eventually(lambda: esrun.state.report().step == 6)
    assert esrun.state.report().phase == "training"
    assert capsys.readouterr().err.count("'dreaming'") == 1


def test_a_forked_child_is_silent() -> None:
    link, esrun = pair()
    child = os.fork()
    if child == 0:
        link.send({"step": 1})
        esrun.close()
        os._exit(0 if not link.connected and link.wait(30) == Orders() else 1)
    assert os.waitpid(child, 0)[1] == 0
    esrun.setblocking(False)
    with pytest.raises(BlockingIOError):
        esrun.recv(10)
    link.close()
    esrun.close()


def test_a_tensor_of_one_element_can_be_reported() -> None:
    class Tensor:
        def __float__(self) -> float:
            return 2.5

    link, esrun = pair()
    link.send({"step_time_s": Tensor()})
    assert json.loads(esrun.recv(1000)) == {"report": {"step_time_s": 2.5}}
    link.close()
    esrun.close()


def test_looking_at_the_orders_is_cheap() -> None:
    link, esrun = pair()
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            link.orders()
        best = min(best, (time.perf_counter() - began) / 100)
    assert best < 50e-6
    link.close()
    esrun.close()


def test_companions_reach_rank_0_and_its_answers_esrun(esrun: Esrun, link: RankSocket) -> None:
    assert not link.wait(0.05).batch
    assert not link.companions
    esrun.server.set_companions({"4711": 2})
    eventually(lambda: link.orders() and link.companions)
    assert dict(link.companions or {}) == {"4711": 2}
    esrun.state.receive(Orders(seq=2, batch=64), authoritative=True)
    eventually(lambda: link.orders().batch == 64)
    esrun.server.set_companions({})
    eventually(lambda: link.orders() and not link.companions)
    link.send_group({"can": True, "port": 41234})
    link.send({"phase": "training", "step": 3})
    link.send_group({"generation": 1, "companions": {"4711": 2}, "step": 3})
    eventually(lambda: len(esrun.group) == 2 and esrun.state.report().step == 3)
    assert esrun.group[0] == {"can": True, "port": 41234}
    assert esrun.group[1]["companions"] == {"4711": 2}


@pytest.mark.parametrize("stated", [[], "4711", {"a": 1, "-1": 2, "7": 0, "8": True, "9": "2"}])
def test_hostile_companions_are_ignored(stated: object) -> None:
    ours, esrun_side = socket.socketpair()
    link = RankSocket(ours)
    message = {"orders": Orders(batch=8).to_wire(), "companions": stated}
    esrun_side.sendall(json.dumps(message).encode() + b"\n")
    assert link.orders().batch == 8
    assert not link.companions
    link.close()
    esrun_side.close()
