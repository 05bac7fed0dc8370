"""Messages between rank 0 and the other members."""

import json
import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_elastic.training.regroup.member_link import MemberLink
from slurm_elastic.training.regroup.member_server import MemberServer
from tests.support.patience import PATIENCE_S


class Events:
    """Everything that a server's or a link's callbacks were told, in order."""

    def __init__(self) -> None:
        self._events: queue.Queue[Any] = queue.Queue()

    def message(self, *values: Any) -> None:
        """Take a message."""
        self._events.put(values)

    def next(self) -> Any:
        """Return the next event."""
        return self._events.get(timeout=PATIENCE_S)

    @property
    def none(self) -> bool:
        """Whether there is no event that was not returned."""
        return self._events.empty()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def server(events: Events) -> MemberServer:
    return MemberServer("secret", on_message=events.message, on_loss=events.message)


@pytest.fixture
def stranger(server: MemberServer) -> Iterator[socket.socket]:
    """Yield a connection that has said nothing yet."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        yield sock


def member(server: MemberServer, name: str, received: Events) -> MemberLink:
    return MemberLink(
        ("127.0.0.1", server.port),
        token="secret",
        name=name,
        on_message=received.message,
        on_end=lambda: received.message("end"),
    )


def test_messages_reach_those_they_are_for(server: MemberServer, events: Events) -> None:
    first, second = Events(), Events()
    link = member(server, "17.1", first)
    other = member(server, "4711.0", second)
    assert {events.next()[0], events.next()[0]} == {"17.1", "4711.0"}
    link.send({"formed": 3})
    assert events.next() == ("17.1", {"formed": 3})
    server.send(["4711.0", "nobody"], {"enter": 3})
    server.send(["17.1", "4711.0"], {"alarm": 1})
    assert first.next() == ({"alarm": 1},)
    assert [second.next(), second.next()] == [({"enter": 3},), ({"alarm": 1},)]
    other.close()
    assert events.next() == ("4711.0",), "its end is a loss"
    link.close()
    assert events.next() == ("17.1",)


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\xff\n",
        b"[]\n",
        b'{"formed": 3}\n',
        b'{"hello": "17.1", "token": "wrong"}\n',
        b'{"hello": "17.1"}\n',
        b'{"hello": "", "token": "secret"}\n',
        b"x" * (1 << 21),
    ],
)
def test_a_stranger_is_disconnected(stranger: socket.socket, events: Events, line: bytes) -> None:
    try:
        stranger.sendall(line)
        assert stranger.recv(1) == b""
    except ConnectionError:
        pass
    assert events.none


def test_a_name_that_is_taken_is_refused(
    server: MemberServer, events: Events, stranger: socket.socket
) -> None:
    received = Events()
    link = member(server, "17.1", received)
    assert events.next()[0] == "17.1"
    hello = {"hello": "17.1", "token": "secret"}
    stranger.sendall(json.dumps(hello).encode() + b"\n")
    assert stranger.recv(1) == b""
    link.send({"in": 2})
    assert events.next() == ("17.1", {"in": 2}), "the first one stays"
    link.close()
    assert events.next() == ("17.1",)
