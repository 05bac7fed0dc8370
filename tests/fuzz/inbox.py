"""The controller's socket: frames, authentication, reports, questions, commands, long polls.

Each request goes as bob through the server's `_reply` to the real request handler, job store, engine
and ledger. The answer must be JSON, with messages of one line; nothing may be written to Slurm, and
nothing stored of alice's jobs may change.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any
from unittest import mock

from slurm_elastic.cli import reason_text
from slurm_elastic.config import schema
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.server import socket_server
from slurm_elastic.controller.server.request_auth import MungeAuth, RequestAuthError
from slurm_elastic.controller.server.request_handler import RequestHandler
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.report import Report
from slurm_elastic.core.report_fields import ReportError
from slurm_elastic.policies import policy_protocol
from slurm_elastic.rpc import frames, munge_auth, protocol
from slurm_elastic.rpc.protocol import VERSION
from slurm_elastic.rpc.requests import OPERATIONS
from tests.fuzz import checked_log, inputs
from tests.fuzz.tally import Tally, drive
from tests.support.decisions import example_round

#: bob's own job, and numbers that JSON can name.
_JOBS = ("4722", "4711", "4700", "4711_3", "99999", "0", "4294967295")
_REPORT = dataclasses.asdict(
    Report(
        job_id=4722, run=0, phase="training", gpus=4, gpu_type="v100", step=7, progress=0.5,
        step_time_s=0.25, steps_measured=20, global_batch=256, micro_batch=64, accumulation=1, micro_batches=8,
        micro_step_s=0.1, grad_sqr=1.0, grad_var=2.0, initial_batch=256, max_micro_batch=128,
        application="net", checkpoint_step=5, checkpoint_age_s=3.0, checkpoint_s=1.0, startup_s=4.0,
        restore_s=1.0, resumed_from=0, proven=True, rehearsal="no-room", kept_in="/d", kept_bytes=9, needed_micro_batches=4, notice=1, layout="4x1", supported_options="stages=2,tensor,own-shard=full", layers=2, frozen=0,
        certified=1, penalty=0.0, certified_penalty=0.001, data_s=0.01, forward_s=0.1, backward_s=0.1,
        sync_s=0.02, optimizer_s=0.01, exchange="flat", exposed=0.5, exchange_s=0.02,
        peak_memory_bytes=10**9,
        weight_bytes=10**8, optimizer_bytes=2 * 10**8, gpu_bytes=10**10, out_of_memory=True,
        profile=(("conv", 0.1, 0.2, 100, 400), ("fc", 0.1, 0.2, 10, 4000)), profile_batch=64,
        in_place=True, not_in_place="", change=3, change_state="joining",
        companions=((4723, 2, "starting"), (4724, 1, "joined")), generation=2, pause_s=0.02,
        failed_start=1, failed_gpus=4, busy_cpus=2.5, read_bytes_s=1e6, exchange_bytes=10**9,
        gpu_busy=0.5, gpu_memory_busy=0.25, memory_bytes_s=2e9,
    )
) | {"change_reason": {"code": "companion-exited", "parameters": {"job": "4723", "exit_code": 1}}}  # fmt: skip
_PROFILE = json.loads(
    (Path(__file__).parents[1] / "data" / "profiles" / "alexnet.json").read_text("utf-8")
)
_REQUESTS: tuple[dict[str, Any], ...] = (
    {"op": "ping"},
    {"op": "report", "report": _REPORT},
    {"op": "report", "report": _REPORT},
    {"op": "orders", "job_id": 4722, "run": 0, "seen": 0, "wait_s": 0},
    {"op": "status", "all": True},
    {"op": "show", "jobs": ["4722"], "profile": True},
    {"op": "explain", "jobs": ["4722"]},
    {"op": "history", "jobs": ["4722"]},
    {"op": "history"},
    {"op": "plan", "program": True},
    {"op": "usage", "user": "bob", "start": 1.7e9, "end": 1.8e9},
    {"op": "topology"},
    {"op": "durations", "name": "net", "gpus": 2, "partition": "gpu", "limit_s": 3600.0},
    {"op": "limits", "user": "bob"},
    {"op": "check"},
    {"op": "hold", "jobs": ["4722"], "dry_run": False},
    {"op": "release", "jobs": ["4722"]},
    {"op": "update", "jobs": ["4722"], "elastic": "1-8,parallel=hybrid", "layout": "4x2"},
    {"op": "teach", "jobs": ["4722"], "profile": _PROFILE},
    {"op": "retire"},
    {"op": "reconfigure"},
    {"op": "copy", "since": {"transitions": 0, "jobs": 0.0}},
)


class _Here(Executor):
    """Executor that runs calls at once, in this thread."""

    def submit(self, fn: Any, /, *args: Any, **named: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **named))
        except BaseException as error:  # noqa: BLE001 - the future carries it
            future.set_exception(error)
        return future


class _NoSlurm:
    """Stand-in for scontrol that fails the test when it is used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"scontrol {name} was called")


class ControllerUnderTest:
    """A controller and its socket, with alice's and bob's jobs."""

    def __init__(self) -> None:
        log: Any = checked_log.quiet()
        settings = schema.Config()
        jobs = tuple(
            dataclasses.replace(j, submission=example_round.job(1, "", "", "1-8").submission)
            if j.job_id == 4722
            else j
            for j in example_round.JOBS
        )
        snapshot = dataclasses.replace(example_round.SNAPSHOT, jobs=jobs)
        self.controller = Controller(
            config=settings, reader=None, scontrol=_NoSlurm(), ledger=Ledger(":memory:"),  # type: ignore[arg-type]
            policy=policy_protocol.load(settings), account="selastic", log=log,
        )  # fmt: skip
        self.controller.listing.jobs = dict(snapshot.job)
        self.controller.published.view = dataclasses.replace(example_round.VIEW, snapshot=snapshot)
        self.handler = RequestHandler(
            self.controller,
            check=lambda view: {"version": "0"},
            reconfigure=lambda: "read again",
            log=log,
            sentence=reason_text.logged,
        )
        self.server = socket_server.Server(schema.ApiSettings(rate_per_user=1e9), self.handler, log)
        here: Any = _Here()
        self.server._backend_thread = self.server._auth_pool = here
        self.loop = asyncio.new_event_loop()
        self.foreign = [j for j in jobs if j.uid != example_round.BOB]

    def close(self) -> None:
        """Give everything back."""
        self.server.stop()
        self.loop.close()
        self.controller.ledger.close()

    def known(self) -> str:
        """Return all that is stored of other users' jobs, as text."""
        store = self.controller.store
        return repr(
            [
                (store.entry(j).to_body(), self.controller.engine.outbox.orders(j.job_id, 0))
                for j in self.foreign
            ]
        )

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request as bob and return the reply."""
        reader = asyncio.StreamReader(loop=self.loop)
        with mock.patch.object(socket_server, "MAX_WAIT_S", 0.0):
            return self.loop.run_until_complete(
                self.server._reply(example_round.BOB, request, reader)
            )


_place: ControllerUnderTest | None = None


def place() -> ControllerUnderTest:
    """Return the one controller of this process."""
    global _place  # noqa: PLW0603 - a fresh one for each input would take a thousand times longer
    if _place is None:
        _place = ControllerUnderTest()
    return _place


def one(rng: random.Random) -> str:
    """Try a frame, a report or a request."""
    return rng.choice((_frame, _report, _request, _request, _request))(rng)


def run(seconds: float, seed: int) -> Tally:
    """Run for some seconds; see `tally.drive`."""
    checked_log.quiet()
    tally = drive(one, seconds=seconds, seed=seed)
    if _place is not None:
        counts = len(_place.controller.store._entries), len(_place.server._waiting)
        if max(counts) > 20:
            tally.crashes.append(f"memory grows: {counts} entries and waiters")
    return tally


def _request(rng: random.Random) -> str:
    there = place()
    request: Any = {"v": VERSION, "nonce": "n", **rng.choice(_REQUESTS)}
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        request = inputs.changed(rng, request)
    if rng.random() < 0.2 and isinstance(request, dict):
        request["jobs"] = [rng.choice(_JOBS) for _ in range(rng.randrange(4))]
    body = inputs.wire(request, rng)
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return "request: no JSON object"
    before = there.known()
    reply = there.reply(content)
    sent = json.dumps(reply)
    assert len(sent) < 10**6, f"a reply of {len(sent)} characters"
    assert reply.get("code") != "internal", f"{checked_log.LOG.last} {content!r:.500}"
    texts = [reply.get("error", ""), reply.get("text", "")]
    texts += [r.get("text", "") for r in reply.get("results", ())]
    assert all(len(t) < 1500 and "\n" not in t for t in texts), texts
    assert there.known() == before, "bob changed what is known of alice's jobs"
    return f"{str(content.get('op'))[:10] if content.get('op') in [*KNOWN] else 'other'}: " + (
        str(reply["code"]) if "error" in reply else "answered"
    )


KNOWN = frozenset(OPERATIONS)


def _report(rng: random.Random) -> str:
    body: Any = dict(_REPORT)
    for _ in range(rng.choice((1, 1, 2, 4))):
        body = inputs.changed(rng, body)
    try:
        report = Report.from_wire(body)
    except ReportError as error:
        assert len(str(error)) < 1000, f"{len(str(error))} characters"
        return "report: refused"
    assert Report.from_wire(json.loads(json.dumps(report.to_wire()))) == report
    return "report: read"


def _frame(rng: random.Random) -> str:
    """Try bytes behind the length, with a munge that accepts any payload."""
    body = inputs.wire(rng.choice(_REQUESTS), rng)
    payload = munge_auth._payload("request", "n", body)
    if rng.random() < 0.5:
        payload = inputs.bytes_(rng, payload)
    if rng.random() < 0.3:
        body = inputs.bytes_(rng, body)
    frame = b"MUNGE:AwQ:\n" + body
    if rng.random() < 0.3:
        frame = inputs.bytes_(rng, frame)
    kept, munge_auth._decode = munge_auth._decode, lambda _: (example_round.BOB, 0, payload)
    bounded, munge_auth._bounded = munge_auth._bounded, lambda work: work()  # no thread an input
    try:
        MungeAuth().open(frame)
    except RequestAuthError as error:
        assert len(str(error)) < 300, f"{len(str(error))} characters"
        return "frame: refused"
    finally:
        munge_auth._decode, munge_auth._bounded = kept, bounded
    header = inputs.bytes_(rng, len(frame).to_bytes(4, "big"))
    try:
        frames.read_frame(_slices(header + frame, rng), limit=protocol.MAX_REQUEST)
    except EOFError:
        return "frame: cut"
    return "frame: read"


def _slices(data: bytes, rng: random.Random) -> Any:
    rest = bytearray(data)

    def receive(size: int) -> bytes:
        part = bytes(rest[: rng.randint(1, max(1, size))][:size])
        del rest[: len(part)]
        return part

    return receive
