"""A running server of the controller's socket, and requests to it without munge."""

import json
import socket
import struct
from contextlib import contextmanager

from slurm_elastic.config import schema
from slurm_elastic.controller.server import socket_server
from slurm_elastic.rpc.protocol import VERSION
from tests.support.controller.fake_controller import FakeLog
from tests.support.patience import PATIENCE_S


@contextmanager
def serving(backend, log=None, seals=None, rate=1e6, role=socket_server.Role):
    server = socket_server.Server(
        schema.ApiSettings(listen="127.0.0.1:0", rate_per_user=rate),
        backend,
        log or FakeLog(),
        seals,
        role=role,
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


def ask(server, uid, op, timeout=PATIENCE_S, v=VERSION, **args):
    """Return the answer to one request without munge."""
    body = json.dumps({"uid": uid, "nonce": "n", "content": {"v": v, "op": op, **args}}).encode()
    with socket.create_connection(server.address, timeout=timeout) as sock:
        sock.sendall(struct.pack("!I", len(body)) + body)
        return answer(sock)


def answer(sock):
    data = b""
    while part := sock.recv(65536):
        data += part
    assert len(data) >= 4, "hung up without an answer"
    assert len(data) == 4 + struct.unpack("!I", data[:4])[0]
    reply = json.loads(data[4:])
    assert reply["nonce"] == "n"
    return reply["content"]


def address(server):
    return "{}:{}".format(*server.address)
