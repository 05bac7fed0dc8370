"""A backend with the jobs of two users, a log, and authentication that accepts any claimed uid."""

import json
import threading

from slurm_elastic.controller.server.request_auth import RequestAuthError
from slurm_elastic.controller.server.request_dispatcher import RequestRefusedError
from slurm_elastic.core.report import Orders
from slurm_elastic.rpc.frames import Message
from slurm_elastic.rpc.requests import OPERATIONS, Kind

ALICE, BOB, OPERATOR = 2001, 2002, 2000


class FakeBackend:
    """RequestBackend that keeps what it is asked; `user` of a question selects a failure."""

    def __init__(self, owners=None):
        self.owners = owners or {4711: ALICE, 4722: BOB}
        self.past_owners = {}
        self.is_private = False
        self.has_read = True
        self.seq = 0
        self.asked = []
        self.reports = []
        self.threads = set()

    def owner(self, job_id):
        self.threads.add(threading.current_thread().name)
        return self.owners.get(job_id)

    def past_owner(self, job_id):
        return self.past_owners.get(job_id)

    def find(self, name):
        if name == "5000":
            return (5001, 5002)
        return tuple(i for i in self.owners if str(i) == name)

    def has_read_cluster(self):
        return self.has_read

    def is_operator(self, uid):
        return uid in (0, OPERATOR)

    def private(self):
        return self.is_private

    def report(self, uid, report):
        self.reports.append((uid, report))
        return Orders(seq=self.seq)

    def orders(self, job_id, run):
        return Orders(seq=self.seq, reason=f"of {job_id}.{run}")

    def question(self, uid, op, args):
        assert OPERATIONS[op].kind is Kind.QUESTION
        self.asked.append((uid, op, args))
        word, _, size = args.get("user", "").partition(":")
        if word == "refuse":
            raise RequestRefusedError("not now: ask later")
        if word == "bug":
            raise ZeroDivisionError("a bug")
        if word == "size":
            return {"filling": "x" * int(size)}
        return {"op": op, "job_ids": args.get("job_ids")}

    def command(self, uid, op, args):
        assert OPERATIONS[op].kind is Kind.COMMAND
        self.asked.append((uid, op, args))
        return {"results": [{"job_id": i, "ok": True, "text": op} for i in args.get("job_ids", ())]}


class FakeLog:
    """EventLog that keeps its lines, each with its level."""

    def __init__(self):
        self.lines = []

    def info(self, event):
        self.lines.append(("info", event))

    def warning(self, event):
        self.lines.append(("warning", event))

    def error(self, event):
        self.lines.append(("error", event))

    def texts(self, level=None):
        return [text for kind, text in self.lines if level in (None, kind)]


class PlainAuth:
    """RequestAuth for frames of JSON {"uid": …, "nonce": …, "content": …}; any uid is accepted."""

    def problem(self):
        return ""

    def open(self, frame):
        try:
            value = json.loads(frame)
            return Message(value["uid"], 0, value["content"], value["nonce"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RequestAuthError("no seal") from None

    def close(self, reply, request):
        body = json.dumps({"uid": request.uid, "nonce": request.nonce, "content": reply}).encode()
        return len(body).to_bytes(4, "big") + body
