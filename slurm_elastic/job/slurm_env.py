"""The allocation of a job, read from the environment of its batch script.

After a requeue with a new shape, some `SLURM_*` variables still describe the shape at
submission; `clean` removes them, and nothing here reads them. The GPUs of the *other* nodes are
not in the environment: `slurm_elastic.job.srun.probe_command` queries them.

Part of each start: imports only modules that Python has loaded already.

>>> expand("rack1n[01-03,7],login")
['rack1n01', 'rack1n02', 'rack1n03', 'rack1n7', 'login']
>>> unfold("4(x2),1")
[4, 4, 1]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_elastic.core.errors import SlurmElasticError

#: Variables that describe the submission; srun would read them as options. srun sets new ones for
#: the tasks of the step.
STALE = frozenset(
    """
    SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_GPU_BIND
    SLURM_GPU_FREQ SLURM_GRES SLURM_GRES_FLAGS SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE
    SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_TRES
    SLURM_TASKS_PER_NODE SLURM_TRES_PER_TASK SLURM_TRES_BIND SLURM_CPUS_PER_TASK
    SRUN_CPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_MEM_PER_GPU SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE
    SLURM_DISTRIBUTION SLURM_HOSTFILE SLURM_EXCLUSIVE SLURM_EXACT SLURM_OVERCOMMIT SLURM_OVERLAP
    SLURM_WHOLE SLURM_CORE_SPEC SLURM_THREAD_SPEC SLURM_RESV_PORTS SLURM_EXPORT_ENV
    SLURM_KILL_BAD_EXIT SLURM_WAIT SLURM_RELATIVE SLURM_STEP_ID SLURM_STEPID
    """.split()  # noqa: SIM905 - 40 quoted names are harder to read
)

#: Marks the processes of one step, for those that look for them in /proc.
STEP_VARIABLE = "SLURM_ELASTIC_STEP"
#: Marks those in a companion, for the companion's script, over all steps.
COMPANION_VARIABLE = "SLURM_ELASTIC_COMPANION"
#: First port and number of ports: below Linux's ephemeral ports (32768 and up), above the ports of
#: a cluster's daemons.
_FIRST_PORT, _PORTS = 20000, 12700


class AllocationError(SlurmElasticError):
    """An environment without a job that esrun can start; the message is one line."""


class SlurmAllocation:
    """The current allocation of the job.

    Attributes:
        job_id: the raw id, for array tasks too.
        run: how often Slurm has restarted the job. A job that a restarted one has submitted
            inherits that one's number, until `RankLaunch.settle` has asked Slurm.
        run_id: identifier that is the same over all restarts.
        start_time: epoch seconds of this start of the job; None outside a batch script.
        nodes: names in Slurm's order; rank 0 runs on the first.
        nodelist: the same in Slurm's folded form.
        cpus: number of CPUs of each node.
        gpus: number of GPUs of each node; None where the environment has no number.
        tasks: number of tasks requested; used for jobs without GPUs.
        here: this node's name; empty outside the allocation (salloc on a login node).
        shards: whether it holds shards of a GPU instead of whole GPUs.
    """

    __slots__ = (
        "cpus",
        "gpus",
        "here",
        "job_id",
        "nodelist",
        "nodes",
        "run",
        "run_id",
        "shards",
        "start_time",
        "tasks",
    )

    def __init__(self, env: Mapping[str, str]) -> None:
        if int(env.get("SLURM_HET_SIZE", "0") or 0) > 1:
            raise AllocationError(
                "heterogeneous jobs cannot be elastic: start their components with srun"
            )
        try:
            self.job_id = int(env["SLURM_JOB_ID"])
            self.run = int(env.get("SLURM_RESTART_COUNT", "0") or 0)
            self.nodelist = env.get("SLURM_JOB_NODELIST") or env["SLURM_NODELIST"]
            self.nodes = tuple(expand(self.nodelist))
            self.cpus = tuple(unfold(env.get("SLURM_JOB_CPUS_PER_NODE", "")))
            self.tasks = int(env.get("SLURM_NTASKS", "0") or 0)
            start_time = env.get("SLURM_JOB_START_TIME")
            self.start_time = int(start_time) if start_time else None
            on_node = _gpus_here(env)
        except (KeyError, ValueError) as error:
            raise AllocationError(f"the environment of the job is invalid: {error}") from None
        if len(self.cpus) != len(self.nodes):
            self.cpus = (1,) * len(self.nodes)
        self.here = env.get("SLURMD_NODENAME", "")
        self.shards = bool(env.get("SLURM_SHARDS_ON_NODE"))
        self.run_id = f"{env.get('SLURM_CLUSTER_NAME') or 'slurm'}-{self.job_id}"
        on_other_nodes = None if on_node or on_node is None else 0
        self.gpus = (on_node, *[on_other_nodes] * (len(self.nodes) - 1))


def _gpus_here(env: Mapping[str, str]) -> int | None:
    """Return the number of GPUs of the batch host; None if it is unknown (salloc)."""
    count = env.get("SLURM_GPUS_ON_NODE")
    if count:
        return int(count)
    listed = env.get("SLURM_JOB_GPUS") or env.get("CUDA_VISIBLE_DEVICES")
    if listed:
        return len(listed.split(","))
    return 0 if env.get("SLURMD_NODENAME") else None


def tasks_of_step(env: Mapping[str, str]) -> int:
    """Return the number of tasks of a step that run this program; 1 in a batch script.

    A batch script that a rank has submitted inherits the variables of that rank's step.
    """
    if "SLURM_STEP_ID" not in env or _is_in_batch_script(env):
        return 1
    return int(env.get("SLURM_STEP_NUM_TASKS", "1") or 1)


def is_started_by_srun(env: Mapping[str, str]) -> bool:
    """Return whether srun started this in an elastic job, instead of its batch script.

    It would be started once for each GPU when the job has several. A terminal (`srun --pty`) is
    none of that.
    """
    if "SLURM_STEP_ID" not in env or "SLURM_PTY_PORT" in env or not env.get("SLURM_SPANK_ELASTIC"):
        return False
    title = _step_title(env).partition(b"\0")[0]
    step = title.rpartition(b".")[2].partition(b"]")[0]
    return step.isdigit()


def _is_in_batch_script(env: Mapping[str, str]) -> bool:
    """Return whether Slurm started this as the batch step."""
    return b".batch]" in _step_title(env)


def _step_title(env: Mapping[str, str]) -> bytes:
    """Return the title of the slurmstepd that started this (`slurmstepd: [7.batch]`), or b""."""
    from pathlib import Path  # noqa: PLC0415 - slow, rarely needed

    try:
        task = Path(f"/proc/{int(env['SLURM_TASK_PID'])}/stat").read_bytes()
        parent = int(task.rpartition(b")")[2].split()[1])
        return Path(f"/proc/{parent}/cmdline").read_bytes()
    except (KeyError, ValueError, IndexError, OSError):
        return b""


def clean(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy without the variables that describe the submission."""
    return {name: value for name, value in env.items() if name not in STALE}


def master_port(job_id: int, run: int, attempt: int) -> int:
    """Return a port that differs between jobs, restarts and attempts."""
    return _FIRST_PORT + (job_id * 7919 + run * 131 + attempt * 17) % _PORTS


def following_ports(port: int) -> Iterable[int]:
    """Return `port` and the ports to try after it, within the range of `master_port`."""
    return (_FIRST_PORT + (port - _FIRST_PORT + i) % _PORTS for i in range(200))


def expand(nodelist: str) -> list[str]:
    """Return the node names of Slurm's folded form, in its order."""
    names = []
    for part in _split(nodelist):
        head, bracket, bracketed = part.partition("[")
        if not bracket:
            names.append(part)
            continue
        ranges, _, tail = bracketed.partition("]")
        tails = expand(tail) if tail else [""]
        for number in _numbers(ranges):
            names += [f"{head}{number}{end}" for end in tails]
    return names


def unfold(counts: str) -> list[int]:
    """Return one number per node from Slurm's `4(x2),1`."""
    numbers: list[int] = []
    for part in filter(None, counts.split(",")):
        count, _, times = part.partition("(x")
        numbers += [int(count)] * int(times.rstrip(")") or 1)
    return numbers


def _split(nodelist: str) -> list[str]:
    """Split a node list at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(nodelist):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append(nodelist[start:index])
            start = index + 1
    return [part for part in [*parts, nodelist[start:]] if part]


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if dash:
            width = len(first)
            numbers += [str(n).zfill(width) for n in range(int(first), int(last) + 1)]
        else:
            numbers.append(part)
    return numbers
