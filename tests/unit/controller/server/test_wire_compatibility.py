"""Requests as release 0.1.0 sent them, and answers as its launchers and clients read them.

`tests/data/wire-0.1.0.json` holds what esrun, selastic and a selasticd that stands by sent to a
controller of that release, and its answers. It was recorded once and is never changed: a
controller answers launchers of the release before. Clients whose answers have changed are refused.
"""

import asyncio
import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest

from slurm_elastic.config import schema
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.server import request_dispatcher, socket_server
from slurm_elastic.controller.server.request_handler import RequestHandler
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Action
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.policies import policy_protocol
from slurm_elastic.rpc import protocol
from slurm_elastic.rpc.answers import CheckAnswer
from slurm_elastic.rpc.requests import OPERATIONS, build
from tests.support.controller.job_records import SEGMENT, FakeScontrol, Log, transition
from tests.support.controller.typed_answers import mismatches
from tests.support.decisions import example_round

RECORDED = json.loads((Path(__file__).parents[3] / "data" / "wire-0.1.0.json").read_text("utf-8"))
EXCHANGES = RECORDED["exchanges"]
#: Read by programs that run on when the controller is upgraded: types must stay as well.
LAUNCHERS = {"report", "orders"}
USER, NOW = example_round.BOB, example_round.NOW
CHECK = CheckAnswer(
    version="0", mode="act", account="selastic", pyslurm="", reader="json (why)",
    slowest_save_s=2.1, slowest_job="4711", problems=["a note"],
)  # fmt: skip


class Site:
    """A controller with the jobs of the example round, and its server, without a socket."""

    def __init__(self):
        settings = schema.Config()
        elastic = example_round.job(1, "", "", "1-8").submission
        jobs = tuple(
            dataclasses.replace(j, submission=elastic) if j.job_id == 4722 else j
            for j in example_round.JOBS
        )
        snapshot = dataclasses.replace(example_round.SNAPSHOT, jobs=jobs)
        self.ledger = Ledger(":memory:")
        self.controller = Controller(
            config=settings, reader=None, scontrol=FakeScontrol(), ledger=self.ledger,
            policy=policy_protocol.load(settings), account="selastic", log=Log(),
        )  # fmt: skip
        self.controller.listing.jobs = dict(snapshot.job)
        self.controller.published.view = dataclasses.replace(example_round.VIEW, snapshot=snapshot)
        handler = RequestHandler(
            self.controller,
            check=lambda _: dict(CHECK),
            reconfigure=lambda: "read again",
            log=Log(),
        )
        self.server = socket_server.Server(schema.ApiSettings(rate_per_user=1e9), handler, Log())

    def keep_history(self):
        """One change and one allocation in the ledger."""
        changed = transition(
            {"g01": 4, "g02": 4}, {"g01": 4}, TransitionState.DONE, id=0, job_id=4711,
            key="4711@1", display_id="4711", action=Action.GROW,
            reason=Reason("fair-share", gpus=2, most=8),
            planned=Allocation.of("a100", {"g01": 8}),
            entered={"NOTIFY": NOW - 900, "REQUEUE": NOW - 895, "DONE": NOW - 890},
        )  # fmt: skip
        number = self.ledger.add_transition(4711, changed.key, changed.to_body())
        self.ledger.put_transition(number, "DONE", changed.to_body(), live=False)
        bobs = {"job_id": 4722, "user": "bob", "gpu_type": "v100", "start": NOW - 3600}
        segment = {**SEGMENT, **bobs}
        self.ledger.begin_segment(segment)
        self.ledger.end_segment(SEGMENT["key"], NOW - 60)

    def give(self, orders):
        """Let such orders be in force for bob's job."""
        outbox = self.controller.engine.outbox
        outbox.tell(4722, run=0, batch=orders.batch, frozen=orders.frozen)
        if orders.action != "run":
            outbox.ask(4722, orders, run=0)

    def reply(self, exchange):
        """The answer to a recorded request, as JSON has it."""
        uid = 0 if exchange["uid"] == "root" else USER

        async def ask():
            reader = asyncio.StreamReader()
            return await self.server._reply(uid, exchange["request"], reader)

        with mock.patch.object(socket_server, "MAX_WAIT_S", 0.0):
            return json.loads(json.dumps(asyncio.run(ask())))

    def close(self):
        self.server.stop()
        self.controller.engine.close()
        self.ledger.close()


@pytest.fixture
def site():
    site = Site()
    site.keep_history()
    yield site
    site.close()


def missing(recorded, answer, where, *, types):
    """Keys of a recorded answer that today's does not have; with `types`, other types as well."""
    if isinstance(recorded, dict) and isinstance(answer, dict):
        lost = [f"{where}.{k}" for k in recorded.keys() - answer.keys()]
        pairs = [(k, recorded[k], answer[k]) for k in recorded.keys() & answer.keys()]
        return lost + [m for k, a, b in pairs for m in missing(a, b, f"{where}.{k}", types=types)]
    if isinstance(recorded, list) and isinstance(answer, list):
        if recorded and answer:
            return missing(recorded[0], answer[0], f"{where}[0]", types=types)
        return []
    if types and recorded is not None and type(recorded) is not type(answer):
        return [f"{where}: {answer!r} in place of {recorded!r}"]
    return []


@pytest.mark.parametrize(
    "exchange", EXCHANGES, ids=[f"{i}-{e['request']['op']}" for i, e in enumerate(EXCHANGES)]
)
def test_a_recorded_request_gets_an_answer_that_its_client_can_read(site, exchange):
    op, recorded = exchange["request"]["op"], exchange["answer"]
    if op in LAUNCHERS:
        site.give(Orders.from_wire(recorded["orders"]))
    answer = site.reply(exchange)
    if OPERATIONS[op].since > RECORDED["protocol"]:
        assert op not in LAUNCHERS
        assert answer["code"] == "version"
        assert "install the same release" in answer["error"]
        answer = site.reply({**exchange, "request": {**exchange["request"], "v": protocol.VERSION}})
    assert ("error" in answer) == ("error" in recorded), answer
    keys = {"rows"} if op == "copy" else set()  # a copy is between controllers of one release
    recorded = {k: v for k, v in recorded.items() if k not in keys}
    assert missing(recorded, answer, op, types=op in LAUNCHERS) == []
    if "error" not in answer:
        assert mismatches(answer, OPERATIONS[op].answer_type(), op) == []


def test_every_recorded_operation_is_still_answered():
    assert {e["request"]["op"] for e in EXCHANGES} <= set(OPERATIONS)
    assert {e["request"]["v"] for e in EXCHANGES} == {RECORDED["protocol"]}
    assert RECORDED["protocol"] in protocol.answered()


def test_requests_of_launchers_have_the_form_of_the_release_before():
    """So that a launcher also works with a controller that is upgraded later."""
    for op in LAUNCHERS:
        assert OPERATIONS[op].since == RECORDED["protocol"]
        assert build(op)["v"] == protocol.answered()[0]


def test_the_next_protocol_answers_launchers_of_this_one_and_no_older(site, monkeypatch):
    check = protocol.check_version
    monkeypatch.setattr(
        request_dispatcher,
        "check_version",
        lambda version, *, release, since=1: check(
            version, release=release, since=since, present=protocol.VERSION + 1
        ),
    )
    report = Report(job_id=4722, run=0, phase="training").to_wire()
    for version, accepted in ((2, True), (3, True), (4, False), (1, False), (True, False)):
        request = {"v": version, "op": "report", "report": report}
        answer = site.reply({"uid": "owner", "request": request})
        assert ("orders" in answer) is accepted
        assert accepted or answer["code"] == "version"
