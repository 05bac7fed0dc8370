"""One user floods the real server; another's report and his polls are as if nobody did."""

import asyncio
import json
import socket
import struct
import threading
import time
from contextlib import asynccontextmanager

import pytest

from slurm_elastic.controller.server import socket_server
from slurm_elastic.controller.server.fair_queue import FairQueue, QueueFullError
from slurm_elastic.rpc.protocol import VERSION
from tests.support.controller.api_server import ask, serving
from tests.support.controller.fake_controller import ALICE, BOB, FakeBackend, FakeLog, PlainAuth
from tests.support.patience import PATIENCE_S

REPORT = {"job_id": 4711, "run": 0, "phase": "training"}


class SlowBackend(FakeBackend):
    """Questions take a while."""

    def question(self, uid, op, args):
        time.sleep(0.02)
        return super().question(uid, op, args)


class SlowAuth(PlainAuth):
    """So does munge."""

    def open(self, frame):
        time.sleep(0.01)
        return super().open(frame)


class PacedBackend(FakeBackend):
    """Each question waits until the callers have had a turn, however slow the machine is."""

    def __init__(self):
        super().__init__()
        self.turn = threading.Event()
        self.is_paced = True

    def question(self, uid, op, args):
        if self.is_paced:
            assert self.turn.wait(PATIENCE_S)
            self.turn.clear()
        return super().question(uid, op, args)


async def request(server, uid, op, **args):
    """Return the content of the answer to one request."""
    body = json.dumps(
        {"uid": uid, "nonce": "n", "content": {"v": VERSION, "op": op, **args}}
    ).encode()
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(struct.pack("!I", len(body)) + body)
    reply = await reader.read()
    writer.close()
    await writer.wait_closed()
    return json.loads(reply[4:])["content"]


@asynccontextmanager
async def flood(server, backend, op, count=200):
    """Keep bob's connections busy, each with the next request as soon as one is answered."""
    sent, is_over = 0, False

    async def ask_again_and_again():
        nonlocal sent
        while not is_over:
            sent += 1
            await request(server, BOB, op)

    async def give_turns():
        while not is_over:
            backend.turn.set()
            await asyncio.sleep(0.02)

    callers = [asyncio.create_task(ask_again_and_again()) for _ in range(count)]
    callers.append(asyncio.create_task(give_turns()))
    while sent < count:
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        is_over = True
        backend.is_paced = False
        backend.turn.set()
        await asyncio.gather(*callers)


@pytest.mark.parametrize("rate", [1e6, 5.0])
@pytest.mark.parametrize("op", ["status", "nonsense"])
def test_a_flood_leaves_anothers_report_unaffected(rate, op):
    """bob has 200 requests open; alice's report waits for one of them at most."""
    backend, log = PacedBackend(), FakeLog()

    async def act(server):
        async with flood(server, backend, op):
            # Else bob's requests are refused, and none stands in front of the backend.
            waits = op == "status" and rate > 1e3
            while waits and server._backend_queue.waiting(BOB) < 100:
                await asyncio.sleep(0.01)
            before = len(backend.asked)
            for _ in range(3):
                answer = await request(server, ALICE, "report", report=REPORT)
                assert answer["orders"]["action"] == "run"
            assert len(backend.reports) == 3
            # Had she stood behind bob's, all of them had come first.
            assert not waits or len(backend.asked) - before < 30

    with serving(backend, log, PlainAuth(), rate=rate) as server:
        asyncio.run(act(server))
    assert len(log.texts("warning")) < 10, "refusals do not flood the log"


def test_who_has_many_requests_open_is_told_so(monkeypatch):
    monkeypatch.setattr(socket_server, "_MAX_OPEN", 3)
    backend, replies = SlowBackend(), []
    with serving(backend, FakeLog(), PlainAuth()) as server:
        callers = [
            threading.Thread(target=lambda: replies.append(ask(server, BOB, "status")))
            for _ in range(30)
        ]
        for caller in callers:
            caller.start()
        assert "error" not in ask(server, ALICE, "status")
        for caller in callers:
            caller.join()
        refused = [r for r in replies if r.get("code") == "rate"]
        assert 0 < len(refused) < 30
        assert "too many requests open at once" in refused[0]["error"]
        assert "error" not in ask(server, BOB, "status"), "afterwards he is heard again"
        assert not server._open


def test_who_polls_too_often_at_once_is_told_so(monkeypatch):
    monkeypatch.setattr(socket_server, "_MAX_POLLS", 2)
    poll = {"job_id": 4722, "run": 0, "seen": 0}
    backend = FakeBackend()
    with serving(backend, FakeLog(), PlainAuth()) as server:
        waiting = [
            threading.Thread(target=lambda: ask(server, BOB, "orders", **poll, wait_s=30))
            for _ in range(2)
        ]
        for caller in waiting:
            caller.start()
        while server._polls[BOB] < 2:
            time.sleep(0.01)
        assert ask(server, BOB, "orders", **poll)["code"] == "rate"
        assert "orders" in ask(server, ALICE, "orders", job_id=4711, run=0, seen=-1)
        backend.seq = 1
        server.wake(4722)
        for caller in waiting:
            caller.join()


def test_frames_that_wait_for_munge_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(socket_server, "_MAX_BYTES", 2000)
    body = json.dumps({"uid": BOB, "nonce": "n", "content": {"v": 1, "op": "x" * 900}}).encode()
    with serving(FakeBackend(), FakeLog(), SlowAuth()) as server:
        socks = [socket.create_connection(server.address, timeout=PATIENCE_S) for _ in range(40)]
        for sock in socks:
            sock.sendall(struct.pack("!I", len(body)) + body)
        answers = [sock.recv(1) for sock in socks]
        assert b"" in answers
        for sock in socks:
            sock.close()
        assert ask(server, ALICE, "ping")["protocol"] == 2
        assert not server._bytes


def test_strangers_that_munge_does_not_know_cost_their_own_address_only():
    """Lines before munge are by address: here the other address is ::1's, of the same host."""
    order = []

    async def act():
        turns = FairQueue(1, most=1000)

        async def one(who):
            async with turns.turn(who):
                order.append(who)
                await asyncio.sleep(0)

        flood = [asyncio.create_task(one("10.0.0.1")) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.gather(*flood, *(one("10.0.0.2") for _ in range(3)))

    asyncio.run(act())
    assert [i for i, who in enumerate(order) if who == "10.0.0.2"][-1] < 10


def test_turns_are_given_on_when_somebody_leaves():
    async def act():
        turns = FairQueue(1, most=2)
        async with turns.turn("a"):
            first, second = (asyncio.create_task(enter(turns, "b")) for _ in range(2))
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await enter(turns, "b")
            first.cancel()
            await asyncio.sleep(0)
            assert turns.waiting("b") == 1
        second.cancel()  # its turn has come, and it is gone
        await asyncio.gather(first, second, return_exceptions=True)
        await asyncio.wait_for(enter(turns, "c"), 5)
        assert turns.waiting("b") == turns.waiting("c") == 0

    async def enter(turns, who):
        async with turns.turn(who):
            pass

    asyncio.run(act())
