"""Association and QOS limits, read from the accounting database.

Slurm keeps a job pending that would exceed a GPU or node limit, however it was reshaped, but
accepts an operator's update beyond CPU and memory limits: so placement keeps to all of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from slurm_elastic.core.cluster import Job, Limit, Node
from slurm_elastic.slurm.limit_caps import AssociationRow, QosRow, TimedCaps, job_limits
from slurm_elastic.slurm.scontrol import SlurmUnreachableError
from slurm_elastic.slurm.slurm_command import output

_RESOURCES = {"gres/gpu": "gpu", "node": "node", "cpu": "cpu", "mem": "mem"}
#: Columns with the limits of one job.
_EACH = "MaxTRES,MaxWall,MaxTRESPerNode,MaxTRESMins,GrpTRESRunMins"
#: Flag of a QOS whose limits replace those of the partition's QOS.
_OVER_PARTITION = "OverPartQOS"
#: Flag of a QOS whose limits are percentages.
_RELATIVE = "Relative"
_NO_CAP = 2.0**63
_WALL = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-9]{2}):([0-9]{2})")
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


@dataclass
class AccountingLimits:
    """Limits of the accounting database, read again every `refresh_s` seconds.

    Without slurmdbd there are none. While it does not answer, the last known limits stay in force.

    Attributes:
        cluster: cluster whose associations count, if several share a slurmdbd; "" for all.
    """

    refresh_s: float = 60.0
    timeout_s: float = 20.0
    cluster: str = ""
    qos: tuple[QosRow, ...] = ()
    associations: tuple[AssociationRow, ...] = ()
    _read_s: float | None = field(default=None, repr=False)
    _problem: str = field(default="", repr=False)

    def limits(
        self,
        jobs: Iterable[Job],
        partition_qos: Mapping[str, str] | None = None,
        nodes: Iterable[Node] = (),
    ) -> tuple[Limit, ...]:
        """Return the limits of jobs that run or are pending."""
        if self._read_s is None or time.monotonic() - self._read_s > self.refresh_s:
            self._refresh()
        return job_limits(self.qos, self.associations, jobs, partition_qos, nodes)

    def _refresh(self) -> None:
        self._read_s = time.monotonic()
        filters = (f"cluster={self.cluster}",) if self.cluster else ()
        try:
            self.qos = parse_qos(
                self._show("qos", f"Name,GrpTRES,MaxTRESPU,MaxTRESPA,{_EACH},Flags")
            )
            self.associations = parse_associations(
                self._show("assoc", f"Account,User,Partition,ParentName,GrpTRES,{_EACH}", *filters)
            )
        except SlurmUnreachableError as error:
            problem = f"{error}; the last known limits stay in force"
        else:
            problem = ""
        if problem and problem != self._problem:
            structlog.get_logger("limits").warning(problem)
        self._problem = problem

    def _show(self, entity: str, columns: str, *filters: str) -> str:
        command = ("sacctmgr", "-nP", "show", entity, *filters, f"format={columns}")
        return output(*command, timeout_s=self.timeout_s).decode(errors="replace")


def parse_qos(text: str) -> tuple[QosRow, ...]:
    """Parse the lines of `sacctmgr -nP show qos`."""
    rows = []
    for line in text.splitlines():
        if line.count("|") >= 5:
            name, *columns = line.split("|")
            group, user, account, each = map(parse_tres, columns[:4])
            timed, wall_s = TimedCaps(*map(parse_tres, columns[5:8])), parse_wall(columns[4])
            flags = columns[8].split(",") if len(columns) > 8 else []
            over, relative = _OVER_PARTITION in flags, _RELATIVE in flags
            rows.append(QosRow(name, group, user, account, each, wall_s, timed, over, relative))
    return tuple(rows)


def parse_associations(text: str) -> tuple[AssociationRow, ...]:
    """Parse the lines of `sacctmgr -nP show assoc`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 6]
    return tuple(
        AssociationRow(
            account=r[0],
            user=r[1],
            partition=r[2],
            parent=r[3],
            group=parse_tres(r[4]),
            per_job=parse_tres(r[5]),
            wall_s=parse_wall(r[6]),
            timed=TimedCaps(*map(parse_tres, r[7:10])),
        )
        for r in rows
    )


def parse_wall(text: str) -> int | None:
    """Return a time limit in seconds; None for no limit.

    >>> parse_wall("1-02:00:00"), parse_wall("00:30:00"), parse_wall("")
    (93600, 1800, None)
    """
    match = _WALL.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(n or 0) for n in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_tres(text: str) -> dict[str, int]:
    """Return caps from Slurm's notation, memory in MB, of the resources that a resize can change.

    >>> parse_tres("cpu=8,gres/gpu:a100=4,gres/gpu=6,mem=2G,billing=9")
    {'cpu': 8, 'gpu:a100': 4, 'gpu': 6, 'mem': 2048}
    """
    caps = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        base, _, gpu_type = name.partition(":")
        resource = _RESOURCES.get(base)
        if resource is None or not value:
            continue
        factor = _UNITS.get(value[-1].upper())
        try:
            number = float(value[:-1]) * factor if factor else float(value)
        except ValueError:  # "UNLIMITED", or a word of a later Slurm
            continue
        if 0 <= number < _NO_CAP:  # -1 clears a limit
            caps[f"{resource}:{gpu_type}" if gpu_type else resource] = int(number)
    return caps
