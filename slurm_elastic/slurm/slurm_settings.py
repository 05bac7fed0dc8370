"""Settings of a site's Slurm, read with Slurm's own commands for `selastic check`.

Needs neither pyslurm nor a running controller. A value that cannot be read is left empty, with the
reason: `selastic check` then still shows the others.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_elastic.core.directive_grammar import is_slice
from slurm_elastic.core.nodelist import expand
from slurm_elastic.slurm.command_environment import command_environment
from slurm_elastic.slurm.switches import read_topologies

_SETTING = re.compile(r"^(\w[\w/.]*)\s*=\s?(.*)$")
_ABSENT = ("(null)", "(null type)", "N/A")
#: GPU type in the `Gres=` of a node.
_GPU_TYPE = re.compile(r"(?:^|,)gpu:([^:,()]+):\d")
_INCLUDE_DEPTH = 5
#: AllocNodes and Nodes that name no list.
_ALL_NODES = ("ALL", "(null)", "")


@dataclass(frozen=True, kw_only=True)
class SlurmSite:
    """Settings of a site's Slurm that `selastic check` looks at.

    Attributes:
        settings: settings of slurm.conf, from slurmctld; unset ones are "".
        error: why there are no settings, else "".
        switches: whether a switch tree is configured.
        unused_topologies: topology and partition → why it is not used.
        admin_level: of the controller's account: None, Operator, Administrator, or "" for unknown.
        plugstack: lines that load plugins on this host, includes resolved.
        plugstack_error: why there are none, else "".
        closed_partitions: partitions to which their own nodes cannot submit.
        no_memory_default: partitions in which a job that asks for no memory gets all of its nodes.
        whole_nodes: partitions in which each job gets all of its nodes (OverSubscribe=EXCLUSIVE).
        unmanaged_nodes: nodes with GPUs of several types, or with slices of GPUs.
        single_submits: associations and QOS that let a user submit one job only.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    switches: bool = False
    unused_topologies: Mapping[str, str] = field(default_factory=dict)
    admin_level: str = ""
    plugstack: tuple[str, ...] = ()
    plugstack_error: str = ""
    closed_partitions: tuple[str, ...] = ()
    single_submits: tuple[str, ...] = ()
    no_memory_default: tuple[str, ...] = ()
    whole_nodes: tuple[str, ...] = ()
    unmanaged_nodes: tuple[str, ...] = ()


def read_settings(*, timeout_s: float = 20.0) -> tuple[dict[str, str], str]:
    """Return slurmctld's settings, by name, and why there are none, or ""."""
    text, error = _run(("scontrol", "show", "config"), timeout_s)
    settings = parse_settings(text)
    return settings, "" if settings else error or "scontrol show config printed no settings"


def gather(account: str = "selastic", *, timeout_s: float = 20.0) -> SlurmSite:
    """Ask slurmctld, slurmdbd and this host's files.

    Args:
        account: the Unix user that the controller runs as.
        timeout_s: for each command.
    """
    settings, error = read_settings(timeout_s=timeout_s)
    if error:
        return SlurmSite(error=error)
    topologies = read_topologies()
    users, _ = _run(
        ("sacctmgr", "-nP", "show", "user", account, "format=user,adminlevel"), timeout_s
    )
    partitions, _ = _run(("scontrol", "show", "partition", "-o"), timeout_s)
    associations, _ = _run(
        ("sacctmgr", "-nP", "show", "assoc", "format=user,account,maxsubmitjobs"), timeout_s
    )
    gres, _ = _run(("sinfo", "--all", "-h", "-N", "-o", "%N %G"), timeout_s)
    qos, _ = _run(("sacctmgr", "-nP", "show", "qos", "format=name,maxsubmitjobsperuser"), timeout_s)
    plugstack, problem = _plugstack(_plugstack_path(settings))
    return SlurmSite(
        settings=settings,
        switches=bool(topologies.switches),
        unused_topologies=topologies.unused,
        admin_level=parse_admin_level(users, account),
        plugstack=plugstack,
        plugstack_error=problem,
        closed_partitions=closed_partitions(partitions),
        single_submits=single_submits(associations, qos),
        whole_nodes=whole_node_partitions(partitions),
        no_memory_default=without_memory_default(partitions, settings),
        unmanaged_nodes=nodes_not_managed(gres),
    )


def parse_settings(text: str) -> dict[str, str]:
    """Return the output of `scontrol show config` as a mapping; the first of equal keys counts."""
    settings: dict[str, str] = {}
    for line in text.splitlines():
        match = _SETTING.match(line)
        if match:
            value = match[2].strip()
            settings.setdefault(match[1], "" if value in _ABSENT else value)
    return settings


def parse_admin_level(text: str, account: str) -> str:
    """Return an account's admin level from `sacctmgr -nP show user … format=user,adminlevel`."""
    for line in text.splitlines():
        user, _, level = line.partition("|")
        if user == account:
            return level.strip() or "None"
    return ""


def partition_fields(text: str) -> list[dict[str, str]]:
    """Return the fields of each line of `scontrol show partition -o`."""
    return [dict(w.partition("=")[::2] for w in line.split()) for line in text.splitlines()]


def closed_partitions(text: str) -> tuple[str, ...]:
    """Return the partitions on whose nodes no job can be submitted to them (`AllocNodes`).

    Args:
        text: output of `scontrol show partition -o`.

    >>> closed_partitions("PartitionName=gpu AllocNodes=login1 Nodes=g[01-02] State=UP")
    ('gpu',)
    """
    closed = []
    for fields in partition_fields(text):
        allowed, nodes = fields.get("AllocNodes", ""), fields.get("Nodes", "")
        if allowed in _ALL_NODES or nodes in _ALL_NODES:
            continue
        with contextlib.suppress(ValueError):
            if not set(expand(nodes)) <= set(expand(allowed)):
                closed.append(fields.get("PartitionName", ""))
    return tuple(closed)


def whole_node_partitions(text: str) -> tuple[str, ...]:
    """Return the partitions in which each job gets all of its nodes.

    Args:
        text: output of `scontrol show partition -o`.

    >>> whole_node_partitions("PartitionName=a OverSubscribe=EXCLUSIVE State=UP")
    ('a',)
    """
    partitions = partition_fields(text)
    return tuple(p["PartitionName"] for p in partitions if p.get("OverSubscribe") == "EXCLUSIVE")


def nodes_not_managed(text: str) -> tuple[str, ...]:
    r"""Return the nodes that have GPUs of several types, or slices of GPUs (MIG), sorted.

    Args:
        text: lines of a node and its `Gres=`; a node has one for each of its partitions.

    >>> nodes_not_managed("g3 gpu:1g.10gb:7\ng2 gpu:a100:2(S:0),gpu:v100:2\ng1 gpu:a100:4,shard:8")
    ('g2', 'g3')
    """
    nodes = dict(line.partition(" ")[::2] for line in text.splitlines())
    types = {name: set(_GPU_TYPE.findall(gres)) for name, gres in nodes.items()}
    return tuple(sorted(n for n, t in types.items() if len(t) > 1 or any(map(is_slice, t))))


def without_memory_default(text: str, settings: Mapping[str, str]) -> tuple[str, ...]:
    r"""Return the partitions where a job that asks for no memory gets all memory of its nodes.

    Args:
        text: output of `scontrol show partition -o`.
        settings: of slurm.conf.

    >>> without_memory_default(
    ...     "PartitionName=a JobDefaults=(null) DefMemPerNode=UNLIMITED\n"
    ...     "PartitionName=b JobDefaults=DefMemPerGPU=9 DefMemPerNode=UNLIMITED\n"
    ...     "PartitionName=c JobDefaults=(null) DefMemPerCPU=9",
    ...     {"SelectTypeParameters": "CR_CORE_MEMORY", "DefMemPerNode": "UNLIMITED"})
    ('a',)
    """
    if "MEMORY" not in settings.get("SelectTypeParameters", "").upper():
        return ()
    if _default_memory(settings):
        return ()
    partitions = partition_fields(text)
    return tuple(p.get("PartitionName", "") for p in partitions if p and not _default_memory(p))


def _default_memory(fields: Mapping[str, str]) -> bool:
    """Return whether slurm.conf, or a partition, has a default of the memory of jobs."""
    if "DefMemPerGPU" in fields.get("JobDefaults", ""):
        return True
    return any(
        fields.get(name, "UNLIMITED") not in ("UNLIMITED", "0", "")
        for name in ("DefMemPerCPU", "DefMemPerNode")
    )


def single_submits(associations: str, qos: str) -> tuple[str, ...]:
    r"""Return the associations and QOS with room for one job of a user only (`MaxSubmitJobs`).

    Args:
        associations: lines of user, account, MaxSubmitJobs.
        qos: lines of name, MaxSubmitJobsPerUser.

    >>> single_submits("alice|research|1\nbob|teaching|\n|root|1", "normal|\nsmall|1")
    ('user alice in account research', 'account root', 'QOS small')
    """
    return (*_associations(_limited_to_one(associations, 3)), *_qos(_limited_to_one(qos, 2)))


def _limited_to_one(text: str, columns: int) -> Iterable[list[str]]:
    rows = (line.split("|") for line in text.splitlines())
    return (row for row in rows if len(row) >= columns and row[columns - 1] == "1")


def _associations(rows: Iterable[list[str]]) -> Iterable[str]:
    for user, account, *_ in rows:
        yield f"user {user} in account {account}" if user else f"account {account}"


def _qos(rows: Iterable[list[str]]) -> Iterable[str]:
    return (f"QOS {name}" for name, *_ in rows)


def seconds(value: str) -> float | None:
    """Return the seconds of `30 sec`, `5 min` or `UNLIMITED` (infinite); None for anything else."""
    if value.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = re.fullmatch(r"([0-9]{1,12})(?: (sec|min))?", value)
    return int(match[1]) * (60.0 if match[2] == "min" else 1.0) if match else None


def options(value: str) -> dict[str, str]:
    """Return `a=1,b,c=2` as a mapping; flags have the value ""."""
    pairs = (word.partition("=") for word in value.split(",") if word)
    return {key.strip(): setting.strip() for key, _, setting in pairs}


def _plugstack_path(settings: Mapping[str, str]) -> Path:
    """Return the path of plugstack.conf: as configured, by default beside slurm.conf."""
    if settings.get("PlugStackConfig"):
        return Path(settings["PlugStackConfig"])
    return Path(settings.get("SLURM_CONF") or "/etc/slurm/slurm.conf").with_name("plugstack.conf")


def _plugstack(path: Path, depth: int = 0) -> tuple[tuple[str, ...], str]:
    """Return the lines of plugstack.conf and of its includes, and why it cannot be read, or ""."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return (), f"{path}: {error.strerror}"
    lines: list[str] = []
    for raw in text.splitlines():
        line = raw.partition("#")[0].strip()
        word, _, argument = line.partition(" ")
        if word == "include" and depth < _INCLUDE_DEPTH:
            pattern = argument.strip()
            folder = Path(pattern).parent if Path(pattern).is_absolute() else path.parent
            for included in sorted(folder.glob(Path(pattern).name)):
                lines += _plugstack(included, depth + 1)[0]
        elif line:
            lines.append(line)
    return tuple(lines), ""


def _run(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """Return a command's output and, if it failed, one line why."""
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=command_environment(),
        )
    except subprocess.TimeoutExpired:
        return "", f"{command[0]}: no answer in {timeout_s:g} s"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    output = process.stdout.decode(errors="surrogateescape")
    if process.returncode == 0:
        return output, ""
    error_text = " ".join(process.stderr.decode(errors="replace").split())
    return "", f"{command[0]}: {error_text or f'exit code {process.returncode}'}"
