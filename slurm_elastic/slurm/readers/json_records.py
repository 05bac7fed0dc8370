r"""Records from the JSON of Slurm's commands, with the attributes that pyslurm's records have.

Numbers may be `{"set": …, "infinite": …, "number": …}`. A string that is not UTF-8 reads as empty.

>>> job = JobJson(b'{"job_id":7,"job_state":["RUNNING","COMPLETING"],"name":"a\xff"}')
>>> job.id, job.state, job.name
(7, 'COMPLETING', '')
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import msgspec

from slurm_elastic.slurm.readers.pyslurm_records import PARTS_OF_GPUS

#: Stands for bytes that are not UTF-8; a string with it reads as empty.
_INVALID = "\ufdd0"
#: Flags of a job's state that are shown instead of it, in Slurm's order.
_FLAGS = (
    *("COMPLETING", "STAGE_OUT", "CONFIGURING", "EXPEDITING", "RESIZING", "REQUEUED"),
    *("REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD"),
    "SIGNALING",
)
_BESIDE_STATE = frozenset((*_FLAGS, "LAUNCH_FAILED", "UPDATE_DB", "RECONFIG_FAIL", "POWER_UP_NODE"))
#: Numbers from here on are Slurm's marks for no value.
_NO_VALUE = 2**60
_GRES = re.compile(
    r"(?:gres[/:])?(?P<name>[^:=,()]+)(?::(?P<type>[^:=,()]*[^:=,()0-9][^:=,()]*))?"
    r"(?:[:=](?P<count>[0-9]+))?(?:\((?P<detail>[^)]*)\))?(?:,|$)"
)
_LAST_NUMBER = re.compile(r"[:=]([0-9]+)$")


def _replace_invalid(error: UnicodeError) -> tuple[str, int]:
    return _INVALID, getattr(error, "end", 0)


codecs.register_error("slurm-elastic-invalid", _replace_invalid)


class _Job(msgspec.Struct):
    job_id: int
    account: Any = None
    admin_comment: Any = None
    array_job_id: Any = None
    array_task_id: Any = None
    array_task_string: Any = None
    batch_flag: Any = None
    comment: Any = None
    cpus: Any = None
    dependency: Any = None
    eligible_time: Any = None
    end_time: Any = None
    excluded_nodes: Any = None
    exit_code: Any = None
    extra: Any = None
    features: Any = None
    gres_detail: Any = None
    het_job_id: Any = None
    job_resources: Any = None
    job_state: Any = None
    licenses: Any = None
    memory_per_cpu: Any = None
    memory_per_node: Any = None
    memory_per_tres: Any = None
    name: Any = None
    nice: Any = None
    node_count: Any = None
    nodes: Any = None
    partition: Any = None
    priority: Any = None
    qos: Any = None
    required_nodes: Any = None
    requeue: Any = None
    restart_cnt: Any = None
    resv_name: Any = None
    shared: Any = None
    start_time: Any = None
    state_description: Any = None
    state_reason: Any = None
    submit_time: Any = None
    time_limit: Any = None
    tres_per_node: Any = None
    tres_req_str: Any = None
    user_id: Any = None
    user_name: Any = None
    wckey: Any = None


_decode_job = msgspec.json.Decoder(_Job).decode


class JobJson:
    """One job of `squeue --json`.

    Args:
        content: its JSON.

    Raises:
        ValueError: it is not the JSON of a job.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._job = _tolerant(_decode_job, content)
        self.id = self._job.job_id

    def __getattr__(self, name: str) -> Any:
        """Return a field that is the same text in pyslurm."""
        if name in _TEXTS:
            return text_of(getattr(self._job, _TEXTS[name]))
        if name in _NUMBERS:
            return number_of(getattr(self._job, _NUMBERS[name]))
        raise AttributeError(name)

    @cached_property
    def state(self) -> str:
        """State as Slurm shows it: a flag before the state that it qualifies."""
        words = _words(self._job.job_state)
        return next(
            (f for f in _FLAGS if f in words),
            next((w for w in words if w not in _BESIDE_STATE), "?"),
        )

    @property
    def state_reason(self) -> str:
        """Reason for which the job waits."""
        return text_of(self._job.state_description) or text_of(self._job.state_reason)

    @property
    def requeue_count(self) -> int:
        """Restarts."""
        return number_of(self._job.restart_cnt) or 0

    @property
    def priority(self) -> int:
        """Priority; 0 while held."""
        return number_of(self._job.priority) or 0

    @property
    def array_id(self) -> int | None:
        """Id of the array; None for a job that is not in one."""
        return number_of(self._job.array_job_id) or None

    @property
    def array_tasks_waiting(self) -> str | None:
        """Numbers of the tasks that have no record of their own yet."""
        return text_of(self._job.array_task_string).rpartition("%")[0] or (
            text_of(self._job.array_task_string) or None
        )

    @property
    def heterogeneous_id(self) -> int:
        """Id of the heterogeneous job; 0 for none."""
        return number_of(self._job.het_job_id) or 0

    @property
    def is_batch_job(self) -> bool:
        """Whether it has a batch script."""
        return bool(self._job.batch_flag)

    @property
    def is_requeueable(self) -> bool:
        """Whether it may be requeued."""
        return bool(self._job.requeue)

    @property
    def constraints(self) -> list[str]:
        """Required features."""
        return [f for f in text_of(self._job.features).split(",") if f]

    @property
    def resource_sharing(self) -> str:
        """`NO` for a job that shares its nodes with no other (--exclusive)."""
        return "NO" if "none" in _words(self._job.shared) else ""

    @property
    def exit_code(self) -> int:
        """Exit code of the last attempt."""
        return number_of(_field(self._job.exit_code, "return_code")) or 0

    @property
    def exit_code_signal(self) -> int:
        """Signal that ended the last attempt; 0 for none."""
        signal = _field(self._job.exit_code, "signal")
        return number_of(_field(signal, "id") or _field(signal, "signal_id")) or 0

    @property
    def memory_per_gpu(self) -> int | None:
        """MB for each GPU; None if memory is requested otherwise."""
        if self.memory_per_node or self.memory_per_cpu:
            return None
        match = _LAST_NUMBER.search(text_of(self._job.memory_per_tres))
        return int(match[1]) if match else None

    @property
    def gres_per_node(self) -> dict[str, int]:
        """Requested generic resources of each node: `{"gpu:a100": 2}`."""
        return {k: v["count"] for k, v in gres_of(text_of(self._job.tres_per_node)).items()}

    @property
    def requested_tres(self) -> Any:
        """Requested resources; None for none."""
        counts = tres_of(text_of(self._job.tres_req_str))
        if not counts:
            return None
        gres = {
            k.removeprefix("gres/"): SimpleNamespace(count=int(v))
            for k, v in counts.items()
            if k.startswith("gres/")
        }
        return SimpleNamespace(gres=gres, node=SimpleNamespace(count=int(counts.get("node", 0))))

    def get_resource_layout_per_node(self) -> dict[str, dict[str, Any]]:
        """Return GPUs and memory that the job holds on each node."""
        resources = self._job.job_resources
        rows = _field(_field(resources, "nodes"), "allocation")  # from 24.05 on
        if rows is None:
            rows = _field(resources, "allocated_nodes")
        details = _words(self._job.gres_detail)
        layout: dict[str, dict[str, Any]] = {}
        for place, row in enumerate(rows or ()):
            memory = _field(_field(row, "memory"), "allocated")
            layout[text_of(_field(row, "name") or _field(row, "nodename"))] = {
                "gres": gres_of(details[place]) if place < len(details) else {},
                "memory": number_of(_field(row, "memory_allocated") if memory is None else memory),
            }
        return layout

    def mark(self, now: float) -> tuple[Any, ...]:
        """Return a mark of this record; whether the begin time has passed is part of it."""
        return (self.id, self.content, (self.eligible_time or 0) > now)


#: Attributes of `JobJson` that are texts, with the field of the JSON.
_TEXTS = {
    **{n: n for n in ("account", "admin_comment", "comment", "extra", "name", "partition", "qos")},
    **{n: n for n in ("excluded_nodes", "licenses", "required_nodes", "user_name")},
    "allocated_nodes": "nodes",
    "dependencies": "dependency",
    "reservation": "resv_name",
    "wckey": "wckey",
}
#: Attributes of `JobJson` that are numbers, None if unset or unlimited, likewise.
_NUMBERS = {
    **{n: n for n in ("cpus", "eligible_time", "end_time", "memory_per_cpu", "memory_per_node")},
    **{n: n for n in ("array_task_id", "nice", "start_time", "submit_time", "time_limit")},
    "num_nodes": "node_count",
    "user_id": "user_id",
}


def node_of(raw: Mapping[str, Any]) -> Any:
    """Return the record of a node of `scontrol show nodes --json`."""
    used = {k: v for k, v in tres_of(text_of(raw.get("tres_used"))).items() if v.isdecimal()}
    return SimpleNamespace(
        name=text_of(raw.get("name")),
        state="+".join(_words(raw.get("state"))) or "UNKNOWN",
        configured_gres={k: v["count"] for k, v in gres_of(text_of(raw.get("gres"))).items()},
        allocated_gres={
            k.removeprefix("gres/"): int(v) for k, v in used.items() if k.startswith("gres/")
        },
        shared_gpus=shared_gpus(text_of(raw.get("gres_used"))),
        shards_of_gpus=shards_of_gpus(text_of(raw.get("gres_used"))),
        effective_cpus=number_of(raw.get("effective_cpus")),
        total_cpus=number_of(raw.get("cpus")),
        real_memory=number_of(raw.get("real_memory")),
        memory_reserved_for_system=number_of(raw.get("specialized_memory")),
        allocated_cpus=number_of(raw.get("alloc_cpus")),
        allocated_memory=number_of(raw.get("alloc_memory")),
        partitions=_words(raw.get("partitions")),
        owner=text_of(raw.get("owner")),
        active_features=_words(raw.get("active_features")),
        available_features=_words(raw.get("features")),
    )


def reservations_of(output: bytes) -> Iterator[Any]:
    """Yield the records of `scontrol --oneliner show reservation`, with times in epoch s.

    Read from the text form: no release has the comment in its JSON. Only operators write these
    fields. A line that cannot be read is left out.
    """
    for line in output.decode(errors="slurm-elastic-invalid").splitlines():
        known, _, comment = line.partition(" Comment=")
        pairs = dict(word.partition("=")[::2] for word in known.split())
        name, start, end = (pairs.get(k, "") for k in ("ReservationName", "StartTime", "EndTime"))
        if not name or not start.isdecimal() or not end.isdecimal():
            continue
        yield SimpleNamespace(
            name=text_of(name),
            nodes=_unless_null(pairs.get("Nodes", "")),
            start_time=int(start),
            end_time=int(end),
            users=[u for u in _unless_null(pairs.get("Users", "")).split(",") if u],
            comment=text_of(comment.strip()),
        )


def document(content: bytes) -> dict[str, Any]:
    """Return the JSON of a command.

    Raises:
        ValueError: it is not a JSON object.
    """
    return _tolerant(msgspec.json.Decoder(dict[str, Any]).decode, content)  # type: ignore[no-any-return]


def gres_of(text: str) -> dict[str, dict[str, Any]]:
    """Return count and indexes of each generic resource of Slurm's notation.

    Of parts of GPUs, `parts` has (index, parts held, parts of the GPU) for each GPU.

    >>> gres_of("gpu:a100:2(IDX:0,3),gres/gpu:v100:1")
    {'gpu:a100': {'count': 2, 'indexes': '0,3'}, 'gpu:v100': {'count': 1, 'indexes': ''}}
    >>> gres_of("shard:2(0/4,2/4)")
    {'shard': {'count': 2, 'indexes': '', 'parts': [(1, 2, 4)]}}
    """
    resources: dict[str, dict[str, Any]] = {}
    for match in _GRES.finditer("" if text == "(null)" else text):
        name = f"{match['name']}:{match['type']}" if match["type"] else match["name"]
        kind, _, detail = (match["detail"] or "").partition(":")
        count = int(match["count"] or 1)
        if name in resources:
            count += resources[name]["count"]
        resources[name] = {"count": count, "indexes": detail if kind == "IDX" else ""}
        if match["name"] in PARTS_OF_GPUS and match["detail"]:
            resources[name]["parts"] = _parts_held(match["detail"])
    return resources


def _parts_held(detail: str) -> list[tuple[int, int, int]]:
    """Return (index, parts held, parts of the GPU) for each GPU of `0/4,2/4`."""
    held = []
    for index, part in enumerate(detail.split(",")):
        count, _, total = part.partition("/")
        if count.isdecimal() and total.isdecimal() and int(count):
            held.append((index, int(count), int(total)))
    return held


def shared_gpus(text: str) -> tuple[int, ...]:
    """Return the indexes of a node's GPUs of which jobs hold parts, from what is in use of it.

    Slurm lists the parts in use of each GPU; 26.05 writes `-` for a GPU that a job holds whole,
    earlier releases `0`.

    >>> shared_gpus("gpu:a100:1(IDX:3),shard:a100:3(2/2,0/2,1/2,-/2)")
    (0, 2)
    """
    shared = {
        index
        for match in _GRES.finditer(text)
        if match["name"] in PARTS_OF_GPUS
        for index, part in enumerate((match["detail"] or "").split(","))
        if part.partition("/")[0].strip("0-")
    }
    return tuple(sorted(shared))


def shards_of_gpus(text: str) -> tuple[int, ...]:
    """Return the shards that each GPU of a node has, from what is in use of it; () without any.

    >>> shards_of_gpus("gpu:a100:1(IDX:3),shard:a100:1(1/4,-/2)")
    (4, 2)
    """
    totals = (
        part.partition("/")[2]
        for match in _GRES.finditer(text)
        if match["name"] == "shard"
        for part in (match["detail"] or "").split(",")
    )
    return tuple(int(total) for total in totals if total.isdecimal())


def tres_of(text: str) -> dict[str, str]:
    """Return Slurm's `cpu=2,gres/gpu=1` as a mapping."""
    return {k: v for k, equal, v in (p.partition("=") for p in text.split(",")) if equal}


def number_of(value: Any) -> int | None:
    """Return a number of Slurm's JSON; None if it is unset or unlimited."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") and not value.get("infinite") else None
    return int(value) if isinstance(value, int | float) and value < _NO_VALUE else None


def text_of(value: Any) -> str:
    """Return a text of Slurm's JSON; "" for none, and for one that is not UTF-8."""
    return "" if value is None or _INVALID in str(value) else str(value)


def _words(value: Any) -> list[str]:
    """Return a list of words, or the one word."""
    return [str(w) for w in value] if isinstance(value, list) else [str(value)] if value else []


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _unless_null(text: str) -> str:
    return "" if text == "(null)" else text_of(text)


def _tolerant(decode: Any, content: bytes) -> Any:
    """Decode JSON; bytes that are not UTF-8 become the mark of invalid bytes."""
    try:
        return decode(content)
    except ValueError:  # before msgspec 0.23 a UnicodeDecodeError, since then its own error
        marked = content.decode("utf-8", errors="slurm-elastic-invalid").encode()
        if marked == content:
            raise
        return decode(marked)
