"""Jobs of slurmctld with hostile fields of their owner, from the reader to the screen.

A round is run over alice's two jobs and bob's hostile ones, in mode `act`: reader, job store, ledger,
orphan cleanup, policy, placement, engine, `scontrol` (its command line is checked instead of run),
answers, tables, JSON. With any fields of bob's jobs the round must end, their GPUs must count as
used, each word for scontrol must be valid, and no line may contain control characters.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import types
from types import SimpleNamespace
from typing import Any
from unittest import mock

from slurm_elastic.cli import reason_text, status, usage
from slurm_elastic.cli.decisions import change_history, explain, planned_changes
from slurm_elastic.cli.tables import TableLayout
from slurm_elastic.cli.topology import topology_command
from slurm_elastic.config import schema
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.view import NoAnswerError, Viewer
from slurm_elastic.controller.server.request_handler import RequestHandler
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.submission import Submission
from slurm_elastic.policies import policy_protocol
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader
from slurm_elastic.slurm.readers.pyslurm_source import PyslurmSource
from slurm_elastic.slurm.scontrol import Scontrol
from tests.fuzz import checked_log, inputs
from tests.fuzz.tally import Tally, drive

ALICE, BOB = 2001, 2002
#: What a job's owner writes, or makes Slurm write. Bytes that are no UTF-8 make pyslurm raise.
_WRITTEN = ("name", "comment", "extra", "admin_comment", "state_reason", "reservation", "account",
            "qos", "partition", "required_nodes", "excluded_nodes", "user_name")  # fmt: skip
_FIELD = re.compile(r"[A-Za-z]+=.*", re.DOTALL)
_ID = re.compile(r"jobid=[0-9]+(_[0-9]+|_\[[0-9,%-]+\])?")
_KEYS = frozenset(
    [
        "NumNodes",
        "NumTasks",
        "TresPerNode",
        "TresPerJob",
        "TresPerTask",
        "ReqNodeList",
        "ReservationName",
        "StartTime",
        "Priority",
        "CPUsPerTask",
        "MinCPUsNode",
        "TasksPerNode",
        "MinMemoryNode",
        "TimeLimit",
        "TimeMin",
        "Nice",
        "ExcNodeList",
        "Features",
        "Nodes",
        "Users",
        "Duration",
        "Flags",
        "Comment",
        "EndTime",
        "Requeue",
    ]
)


_SETTINGS = schema.Config(controller=schema.ControllerSettings(mode="act", queue="controller"))
_POLICY = policy_protocol.load(_SETTINGS)


class Raw:
    """A record of pyslurm. A field that is an exception is raised when it is read."""

    def __init__(self, layout: dict[str, Any], **fields: Any) -> None:
        self._layout = layout
        self.__dict__["_fields"] = fields

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__["_fields"][name]
        if isinstance(value, Exception):
            raise value
        return value

    def get_resource_layout_per_node(self) -> dict[str, Any]:
        return self._layout


def _raw(job_id: int, uid: int, nodes: dict[str, int], **changed: Any) -> Raw:
    gpus = sum(nodes.values()) or 1
    layout = {
        n: {"cpu_ids": "0", "memory": 100, "gres": {"gpu:a100": {"count": g, "indexes": "0"}}}
        for n, g in nodes.items()
    }
    record = Submission(Directive.parse("1-8"), {"time_limit": 60}, "", 1_764_000_000)
    fields: dict[str, Any] = {
        "id": job_id, "state": "RUNNING" if nodes else "PENDING", "array_id": None,
        "array_task_id": None, "array_tasks_waiting": None, "name": "net", "user_id": uid,
        "user_name": "alice" if uid == ALICE else "bob", "partition": "gpu", "account": "a",
        "qos": "normal", "state_reason": "" if nodes else "Resources", "priority": 100, "nice": 0,
        "submit_time": 1_764_000_000, "start_time": 1_764_000_100, "end_time": 0,
        "eligible_time": 1_764_000_000, "time_limit": 60, "requeue_count": 0, "cpus": gpus,
        "num_nodes": len(nodes) or 1,
        "requested_tres": SimpleNamespace(
            gres={"gpu": SimpleNamespace(count=gpus)}, node=SimpleNamespace(count=len(nodes) or 1)
        ),
        "gres_per_node": {}, "memory_per_node": None, "memory_per_cpu": 100, "memory_per_gpu": None,
        "required_nodes": "", "excluded_nodes": "", "constraints": [], "reservation": "", "licenses": [], "wckey": "", "resource_sharing": "",
        "dependencies": {}, "comment": "", "extra": "", "admin_comment": record.admin_comment(),
        "is_requeueable": True, "allocated_nodes": ",".join(nodes), "exit_code": 0, "exit_code_signal": 0, "is_batch_job": True, "heterogeneous_id": 0,
    }  # fmt: skip
    return Raw(layout, **(fields | changed))


def _hostile(rng: random.Random, job_id: int, nodes: dict[str, int]) -> Raw:
    """Return a job of bob with some hostile fields."""
    changed: dict[str, Any] = {}
    for name in rng.sample(_WRITTEN, rng.randint(1, 4)):
        changed[name] = (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
            if rng.random() < 0.15
            else inputs.text(rng).replace("\0", "")[:1024]
        )
    if rng.random() < 0.5:
        body = json.loads(
            '{"at":1764000000,"elastic":"1-8","shape":{"req_nodes":"g01","reservation":"mine",'
            '"time_limit":60,"min_nodes":1,"num_tasks":2,"cpus_per_task":2,"min_mem_per_node":100,'
            '"tres_per_node":"gres/gpu:2","features":"a100","nice":0,"time_min":5},"v":1}'
        )
        for _ in range(rng.randrange(4)):
            body["shape"] = inputs.changed(rng, body["shape"])
        if rng.random() < 0.5 and isinstance(body["shape"], dict):
            name = rng.choice(("req_nodes", "reservation", "tres_per_node", "features"))
            body["shape"][name] = inputs.near(rng, rng.choice(("g[01-02]", "gres/gpu:a100:2")))
        changed["admin_comment"] = json.dumps(body)
    if rng.random() < 0.2:
        changed["constraints"] = [inputs.text(rng)]
    if rng.random() < 0.2:
        changed |= {"array_id": 40, "array_task_id": rng.choice((None, 0, 7)),
                    "array_tasks_waiting": rng.choice((None, "0-9%2"))}  # fmt: skip
    if rng.random() < 0.4:
        changed["required_nodes"] = rng.choice(("g03", "g[01-02]", "g04 g03"))
    if rng.random() < 0.3:
        changed["reservation"] = rng.choice(("selastic_9", "selastic_"))
    if rng.random() < 0.2:
        changed["priority"] = 4_000_000_000
    if rng.random() < 0.5:
        changed["requeue_count"] = rng.choice((0, 1, 2))
    return _raw(job_id, BOB, nodes, **changed)


class _Slurm(types.ModuleType):
    """The parts of pyslurm that the reader uses."""

    class PyslurmError(Exception):
        pass

    class RPCError(PyslurmError):
        pass

    def __init__(self) -> None:
        super().__init__("pyslurm")
        self.tables: dict[str, Any] = {}
        conf = SimpleNamespace(
            private_data=["jobs"], kill_wait_time=30, cluster_name="c", version="24.11.5"
        )
        self.slurmctld = SimpleNamespace(Config=SimpleNamespace(load=lambda: conf))

    def slurm_init(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in ("Jobs", "Nodes", "Partitions", "Reservations"):
            return SimpleNamespace(load=lambda: self.tables[name])
        raise AttributeError(name)


def _node(name: str, used: int) -> Any:
    return SimpleNamespace(
        name=name, configured_gres={"gpu:a100": 4}, allocated_gres={}, state="MIXED", effective_cpus=8,
        total_cpus=8, real_memory=8000, allocated_cpus=used, allocated_memory=0, partitions=["gpu"],
        active_features=["a100"], available_features=["a100"],
    )  # fmt: skip


def _command(words: list[str], **_: Any) -> Any:
    """Check each word of a scontrol command instead of running it."""
    if words[0] != "scontrol":  # only read with: sacct, sacctmgr
        raise FileNotFoundError(2, "No such file or directory", words[0])
    if list(words) == ["scontrol", "show", "config"]:
        return subprocess.CompletedProcess(words, 1, b"", b"")
    if words[:-1] == ["scontrol", "-o", "show"] and words[-1] in ("partition", "topology"):
        return subprocess.CompletedProcess(words, 1, b"", b"")
    for word in words:
        os.fsencode(word)
        assert "\0" not in word, words
        assert word.isprintable(), f"scontrol gets {word!r}"
        assert not word.startswith("-"), f"an option: {words}"
    verb, *rest = words[1:]
    if verb in ("requeue", "release", "uhold"):
        assert re.fullmatch(r"[0-9]+(_[0-9]+|_\[[0-9,%-]+\])?", rest[-1]), words
    elif verb == "update" and rest[0].startswith("jobid="):
        assert _ID.fullmatch(rest[0]), words
        _fields(rest[1:])
    elif verb in ("update", "create", "delete"):
        _fields([w for w in rest if w != "reservation"])
        assert any(w.startswith("ReservationName=selastic_") for w in rest), words
    else:
        raise AssertionError(words)
    return subprocess.CompletedProcess(words, 0, b"", b"")


def _fields(words: list[str]) -> None:
    for word in words:
        assert _FIELD.fullmatch(word), words
        assert word.partition("=")[0] in _KEYS, words


def one(rng: random.Random) -> str:
    """Run one round on one cluster, and print every answer."""
    held = {401: {"g03": 2}, 402: {}, 403: {"g04": 1}}
    raws = {
        301: _raw(301, ALICE, {"g01": 2}),
        302: _raw(302, ALICE, {}),
        **{i: _hostile(rng, i, nodes) for i, nodes in held.items()},
    }
    slurm = _Slurm()
    partition = SimpleNamespace(
        name="gpu", nodes="g[01-04]", state="UP", max_time=60, max_nodes=None, qos=""
    )
    reservation = SimpleNamespace(
        name=rng.choice(("selastic_9", "mine", inputs.text(rng))), nodes="g02", start_time=0,
        end_time=9e9, users=[inputs.text(rng)], comment=inputs.text(rng),
    )  # fmt: skip
    slurm.tables = {
        "Jobs": raws,
        "Nodes": {n: _node(n, 1) for n in ("g01", "g02", "g03", "g04")},
        "Partitions": {"gpu": partition},
        "Reservations": {"r": reservation},
    }
    log: Any = checked_log.quiet()
    with mock.patch.object(subprocess, "run", _command):
        sys.modules["pyslurm"] = slurm
        reader = ClusterReader(PyslurmSource(), reservation_prefix="selastic_")
        controller = Controller(
            config=_SETTINGS, reader=reader, scontrol=Scontrol(), ledger=Ledger(":memory:"),
            policy=_POLICY, account="selastic", log=log,
        )  # fmt: skip
        try:
            controller.listing.jobs = reader.jobs()
            controller.round()
            snapshot = controller.view.snapshot
            assert {301, 302} <= snapshot.job.keys(), "alice's jobs are not seen"
            used = {n.name: n.used_gpus for n in snapshot.nodes}
            assert (used["g03"], used["g04"]) == (2, 1), f"GPUs in use: {used}"
            for _ in range(2):
                controller.engine.step(
                    controller.listing.jobs, sizes=controller._sizes, per_node=controller._per_node,
                    unusable=reader.unusable,
                )  # fmt: skip
            _shown(controller)
        finally:
            controller.engine._pool.shutdown()
            controller.ledger.close()
    return f"{len(snapshot.jobs)} jobs read, {sum(j.elastic for j in snapshot.jobs)} elastic"


def _shown(controller: Controller) -> None:
    """Print every answer, to an operator and to alice."""
    handler = RequestHandler(
        controller,
        check=lambda _: {},
        reconfigure=lambda: "",
        log=checked_log.quiet(),
        sentence=reason_text.logged,
    )
    history = handler._history({})
    segments = handler._segments({})
    for viewer in (Viewer(uid=0), Viewer(uid=ALICE, operator=False, private=True)):
        ask = {"history": history, "segments": segments}
        view = controller.view
        lines = status.lines(_answer("status", view, viewer, {"all": True}, ask), TableLayout())
        lines += planned_changes.planned(_answer("plan", view, viewer, {}, ask), all_jobs=True)
        lines += change_history.past(_answer("history", view, viewer, {}, ask), TableLayout())
        lines += usage.used(_answer("usage", view, viewer, {}, ask), TableLayout(), by_user=False)
        lines += usage.used(_answer("usage", view, viewer, {}, ask), TableLayout(), by_user=True)
        lines += topology_command.lines(
            _answer("topology", view, viewer, {}, ask), TableLayout(), all_jobs=True
        )
        for job_id in view.snapshot.job:
            try:
                one_job = {"job_ids": (job_id,)}
                lines += explain.explained(_answer("explain", view, viewer, one_job, ask))
                lines += status.details(_answer("show", view, viewer, one_job, ask))
            except NoAnswerError:
                assert viewer.private
        for line in lines:
            assert line.isprintable(), f"a line with control characters: {line!r}"


def _answer(op: str, view: Any, viewer: Viewer, args: Any, ask: Any) -> Any:
    answer = dispatch.answer(op, view, viewer, args, **ask)
    return json.loads(json.dumps(answer))


def run(seconds: float, seed: int) -> Tally:
    """Run for some seconds; see `tally.drive`."""
    return drive(one, seconds=seconds, seed=seed)
