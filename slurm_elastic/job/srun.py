"""The srun command that starts one task per GPU, and the shell scripts that run in each task.

The step gets all GPUs of its nodes without binding. All are visible to the ranks, which select
their own by LOCAL_RANK, as under torchrun; with `--gpus one` only its own is visible to each. With
Slurm's per-task binding, sites that confine devices by cgroups would hide the other ranks' GPUs,
and NCCL could not use the links between them.

Part of each start: imports only modules that Python has loaded already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from slurm_elastic.job.slurm_env import STEP_VARIABLE, SlurmAllocation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_elastic.job.launchers.adaptation import AdaptedProgram

#: Ranks of each node of the step.
TASKS_VARIABLE = "ESRUN_TASKS"
_GPUS_VARIABLE = "ESRUN_GPUS"
#: Each command line that `launchers` changes or refuses contains one of them.
_LAUNCHER_WORDS = (
    *("torchrun", "torch.distributed", "torch/distributed", "accelerate", "deepspeed"),
    *("mpirun", "mpiexec", "orterun", "prun", "horovodrun", "srun"),
    *("composer", "colossalai", "fabric", "fastai", "paddle", "ibrun", "torchx", "ray", "vllm"),
)
#: Prefixes of the variables of the base's job, which srun would read as options for the companion,
#: and of those that stay.
_FOREIGN = ("SLURM", "SRUN_", "SBATCH_", "SALLOC_", "_SLURM", "SPANK_", "_SPANK")
_OWN = ("SLURM_ELASTIC_", "SLURM_CONF", "SLURM_RESTART_COUNT")
#: GPUs of the base; Slurm sets those of the companion.
_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"})
#: Set in ranks that join a running training: the companion in which they run.
JOIN_VARIABLE = "SLURM_ELASTIC_JOIN"
#: torchrun's limit of restarts has no counterpart: a number that no job reaches.
_MAX_RESTARTS = 1_000_000

#: Variables for torch and torchrun built without libuv, which they use by default.
WITHOUT_LIBUV = {"USE_LIBUV": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
#: Debian builds torch without libuv.
_DEBIAN_TORCH = "/usr/lib/python3/dist-packages/torch"

#: A launcher does not handle USR1 and USR2, and would die of them: it ignores them, and so do its
#: ranks until they handle them. A shell does not, because it could not set a trap for them then.
_EXECUTE_LAUNCHER = """
case ${1##*/} in *sh) ;; *) trap '' USR1 USR2;; esac
exec "$@"
"""

#: Shell code that, in an attempt on several jobs, sets the variables of Slurm as one step of the
#: base on all nodes would have them. A node with GPUs of two jobs counts twice, with other GPUs for
#: each.
_EXPORT_SLURM = """
if [ -n "$ESRUN_JOB" ]; then
    export SLURM_JOB_ID=$ESRUN_JOB SLURM_JOBID=$ESRUN_JOB
    export SLURM_PROCID=$((ESRUN_FIRST_RANK+SLURM_PROCID))
    export SLURM_NODEID=$((ESRUN_FIRST_NODE+SLURM_NODEID))
    for name in SLURM_NTASKS SLURM_NPROCS SLURM_STEP_NUM_TASKS; do
        export "$name=$ESRUN_WORLD"
    done
    for name in SLURM_NNODES SLURM_JOB_NUM_NODES SLURM_STEP_NUM_NODES; do
        export "$name=$GROUP_WORLD_SIZE"
    done
    for name in SLURM_NODELIST SLURM_JOB_NODELIST SLURM_STEP_NODELIST; do
        export "$name=$ESRUN_HOSTS"
    done
    for name in SLURM_TASKS_PER_NODE SLURM_STEP_TASKS_PER_NODE; do
        export "$name=$ESRUN_TASKS_PER_NODE"
    done
fi
unset ESRUN_JOB ESRUN_FIRST_RANK ESRUN_FIRST_NODE ESRUN_WORLD ESRUN_HOSTS ESRUN_TASKS_PER_NODE
"""

#: Exports the variables of a rank. With one GPU per rank it changes only the first variable that is
#: set: Slurm sets all unless the vendor is configured.
_EXPORT_RANK = f"""
tasks=${TASKS_VARIABLE}, node=$SLURM_NODEID
while [ "$node" -gt 0 ]; do tasks=${{tasks#*,}} node=$((node-1)); done
tasks=${{tasks%%,*}}
[ "${_GPUS_VARIABLE}" = one ] &&
for name in CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK; do
    eval "gpus=\\${{$name-}},"
    [ "$gpus" = , ] && continue
    i=$SLURM_LOCALID
    while [ "$i" -gt 0 ]; do gpus=${{gpus#*,}} i=$((i-1)); done
    [ -n "${{gpus%%,*}}" ] && export "$name=${{gpus%%,*}}"
    break
done
unset {TASKS_VARIABLE} {_GPUS_VARIABLE}
export RANK=$((${{ESRUN_FIRST_RANK:-0}}+SLURM_PROCID)) LOCAL_RANK=$SLURM_LOCALID
export NODE_RANK=$((${{ESRUN_FIRST_NODE:-0}}+SLURM_NODEID))
export WORLD_SIZE=${{ESRUN_WORLD:-$SLURM_STEP_NUM_TASKS}} LOCAL_WORLD_SIZE=$tasks
export GROUP_RANK=$NODE_RANK ROLE_RANK=$RANK ROLE_WORLD_SIZE=$WORLD_SIZE
export TORCHELASTIC_ERROR_FILE="${{TMPDIR:-/tmp}}/esrun-${STEP_VARIABLE}.$RANK.error.json"
[ "$tasks" -le 1 ] || export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
{_EXPORT_SLURM}"""

#: Runs as each task: exports the rank's variables and executes the program.
RANK_SCRIPT = f"""{_EXPORT_RANK}exec "$@"
"""

#: Shell code for a launcher that starts only one process, which takes its rank from the
#: environment.
LAUNCHED_RANK_SCRIPT = _EXPORT_RANK + _EXECUTE_LAUNCHER

#: Runs as each task of a step whose program is a launcher: the first task of each node starts it
#: with the shape of the job in its options, the others end. Each variable is replaced once: what
#: follows are the user's own words.
LAUNCHER_SCRIPT = f"""
[ "$SLURM_LOCALID" = 0 ] || exit 0
tasks=${TASKS_VARIABLE}, node=$SLURM_NODEID nodes=$GROUP_WORLD_SIZE
while [ "$node" -gt 0 ]; do tasks=${{tasks#*,}} node=$((node-1)); done
export ESRUN_LOCAL_RANKS=${{tasks%%,*}}
export ESRUN_NODE_RANK=$((${{ESRUN_FIRST_NODE:-0}}+SLURM_NODEID))
export ESRUN_NUM_PROCESSES=$((ESRUN_LOCAL_RANKS*nodes))
{_EXPORT_SLURM}
unset {TASKS_VARIABLE} {_GPUS_VARIABLE} PET_STANDALONE PET_RDZV_ENDPOINT
unset GROUP_WORLD_SIZE ROLE_NAME TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE
unset TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS RANK WORLD_SIZE LOCAL_RANK
count=$# names="ESRUN_LOCAL_RANKS ESRUN_NODE_RANK ESRUN_NUM_PROCESSES"
names=" $names SLURM_ELASTIC_RUN_ID MASTER_ADDR MASTER_PORT ESRUN_RENDEZVOUS "
folder=${{ESRUN_STATE:-${{SLURM_SUBMIT_DIR:-.}}/.slurm-elastic}}
unset ESRUN_STATE
export ESRUN_RENDEZVOUS="$folder/${STEP_VARIABLE}.rendezvous"
case "$*" in *ESRUN_RENDEZVOUS*) mkdir -p "$folder";; esac
while [ "$count" -gt 0 ]; do
    for name in $names; do
        case $1 in --*=\\$$name)
            eval "value=\\$$name"
            word=${{1%=*}}=$value; shift; set -- "$word" "$@"
            names="${{names%% $name *}} ${{names#* $name }}";;
        esac
    done
    word=$1 count=$((count-1)); shift; set -- "$@" "$word"
done
{_EXECUTE_LAUNCHER}"""

#: Prints this node's number and its GPUs.
_PROBE_SCRIPT = """
[ "$SLURM_LOCALID" != 0 ] || echo "$SLURM_NODEID ${CUDA_VISIBLE_DEVICES:-$ROCR_VISIBLE_DEVICES}"
"""


def probe_command(allocation: SlurmAllocation, env: Mapping[str, str]) -> list[str]:
    """Return an srun that prints each node's GPUs; the environment has only the first node's.

    A step that requests no GPUs gets all of the job's. In jobs submitted with GPUs per task it
    needs as many tasks as the job has. In jobs submitted with `--gpus`, srun refuses `--overlap`.
    """
    nodes = len(allocation.nodes)
    per_task = "gpu" in env.get("SLURM_TRES_PER_TASK", "")
    layout = (
        [f"--ntasks={max(nodes, allocation.tasks)}", "--overcommit"]
        if per_task and allocation.tasks
        else [f"--ntasks={nodes}", "--ntasks-per-node=1"]
    )
    return [
        *("srun", f"--nodes={nodes}", *layout, "--mem=0", "--gpu-bind=none", "--export=ALL"),
        *("--job-name=esrun-probe", "--input=none", "sh", "-c", _PROBE_SCRIPT),
    ]


def probed(output: str, nodes: int) -> tuple[int, ...] | None:
    """Return the GPUs of each node from the probe's output; None if a node is missing."""
    counts: dict[int, int] = {}
    for line in output.splitlines():
        node, _, gpus = line.partition(" ")
        if node.isdecimal():
            counts[int(node)] = len(gpus.split(",")) if gpus else 0
    if sorted(counts) != list(range(nodes)):
        return None
    return tuple(counts[node] for node in range(nodes))


def tasks_per_node(allocation: SlurmAllocation, gpus: Sequence[int]) -> tuple[int, ...]:
    """Return each node's tasks: one per GPU; without GPUs those requested, at least one a node."""
    if any(gpus):
        return tuple(gpus)
    nodes = len(allocation.nodes)
    tasks = max(allocation.tasks, nodes)
    return tuple(tasks // nodes + (node < tasks % nodes) for node in range(nodes))


def command(
    allocation: SlurmAllocation,
    tasks: Sequence[int],
    program: Sequence[str],
    *,
    gpus: bool,
    user_options: Sequence[str] = (),
    companion: bool = False,
    world: tuple[int, int] | None = None,
) -> list[str]:
    """Return the command line of the step.

    Args:
        allocation: the job's.
        tasks: number of each node; 0 excludes a node.
        program: command that each rank runs.
        gpus: whether each task gets a GPU.
        user_options: the user's options for srun, last so that they take precedence.
        companion: whether the allocation is a companion's, in which esrun does not run.
        world: nodes and ranks of all jobs of the attempt; None: of this one.

    Raises:
        SlurmElasticError: the program is a launcher that cannot be started once per node.
    """
    words, script, options = list(program), RANK_SCRIPT, list[str]()
    adapted = _adapted(program, world or (sum(1 for count in tasks if count), sum(tasks)))
    if adapted is not None:
        words, script = adapted.program, LAUNCHED_RANK_SCRIPT
        if adapted.per_node:
            # The launcher uses the CPUs of all tasks of its node; the other tasks end at once.
            script, options = LAUNCHER_SCRIPT, ["--cpu-bind=none", "--wait=0"]
    if companion:
        options.append(f"--jobid={allocation.job_id}")
    used_nodes = [
        (n, t, c) for n, t, c in zip(allocation.nodes, tasks, allocation.cpus, strict=True) if t
    ]
    if len({t for _, t, _ in used_nodes}) == 1 and len(used_nodes) == len(allocation.nodes):
        layout = [f"--nodes={len(used_nodes)}", f"--ntasks-per-node={used_nodes[0][1]}"]
    else:
        hosts = ",".join(name for name, count, _ in used_nodes for _ in range(count))
        layout = ["--distribution=arbitrary", f"--nodelist={hosts}"]
    cpus = min(c // t for _, t, c in used_nodes)
    return [
        *("srun", f"--ntasks={sum(tasks)}", *layout),
        f"--cpus-per-task={cpus}" if cpus else "--overcommit",
        # A step that asks for no GPU gets the shards of its job.
        *(("--gpus-per-task=1", "--gpu-bind=none") if gpus and not allocation.shards else ()),
        *("--mem=0", "--overlap", "--export=ALL", "--kill-on-bad-exit=1"),
        f"--job-name={os.path.basename(program[0])[:40]}",  # noqa: PTH119 - pathlib is slow to load
        *options,
        *user_options,
        *("sh", "-c", script, "esrun", *words),
    ]


def companion_environment(
    env: Mapping[str, str],
    allocation: SlurmAllocation,
    *,
    master: tuple[str, int],
    first_rank: int,
    nodes: int,
    mark: str,
) -> dict[str, str]:
    """Return the environment of ranks of a companion that join a training.

    Rank and world are provisional: the library replaces them when they join.

    Args:
        env: of the base's step.
        allocation: the companion's.
        master: host and port of the store that newcomers join.
        first_rank: provisional number of its first rank.
        nodes: number of nodes with it.
        mark: of its processes.
    """
    ranks = allocation.gpus[0] or 0
    return {
        **without_job(env),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "GROUP_WORLD_SIZE": str(nodes),
        "SLURM_ELASTIC_WORLD_SIZE": str(first_rank + ranks),
        JOIN_VARIABLE: str(allocation.job_id),
        STEP_VARIABLE: mark,
        "ESRUN_FIRST_RANK": str(first_rank),
        "ESRUN_FIRST_NODE": str(nodes - 1),
        "ESRUN_WORLD": str(first_rank + ranks),
        TASKS_VARIABLE: str(ranks),
    }


def without_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of the base's job, for a step in another."""
    return {
        name: value
        for name, value in env.items()
        if name not in _DEVICES and (not name.startswith(_FOREIGN) or name.startswith(_OWN))
    }


def _adapted(program: Sequence[str], world: tuple[int, int]) -> AdaptedProgram | None:
    """Return the command line to run in place of one that contains a launcher."""
    if not may_contain_launcher(program):
        return None
    # Slow to load, rarely needed.
    from slurm_elastic.job.launchers.adaptation import WorldShape, adapt  # noqa: PLC0415

    return adapt(program, WorldShape(*world, without_libuv=without_libuv()))


def may_contain_launcher(program: Sequence[str]) -> bool:
    """Return whether a command line has to be searched for a launcher."""
    return any(name in word for word in program for name in _LAUNCHER_WORDS)


def helper_command(
    nodes: Sequence[str], script: str, *arguments: str, job_id: int | None = None, gpus: int = 0
) -> list[str]:
    """Return an srun that runs a shell script once on each of these nodes, beside the step.

    Args:
        nodes: of the job.
        script: text of the script.
        arguments: of the script.
        job_id: of the companion to which the nodes belong; None: to this job.
        gpus: of each node that the script may look at, those of other steps included.
    """
    gres = f"--gres=gpu:{gpus}" if gpus else "--gres=none"
    return [
        *("srun", *([] if job_id is None else [f"--jobid={job_id}"])),
        *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(nodes)}", gres, "--mem=0", "--overlap"),
        *("--job-name=esrun-helper", "--input=none", "--quiet"),
        *("sh", "-c", script, "esrun", *arguments),
    ]


def step_environment(
    env: Mapping[str, str],
    allocation: SlurmAllocation,
    tasks: Sequence[int],
    *,
    port: int,
    socket: str,
    step: str,
    gpus: str = "all",
    restarts: int = 0,
) -> dict[str, str]:
    """Return the environment of the step; `RANK_SCRIPT` adds each rank's own variables.

    Args:
        env: the batch script's, without stale variables.
        allocation: the job's.
        tasks: number of each node.
        port: a free port on the first node.
        socket: address at which this esrun listens for rank 0.
        step: mark of this step.
        gpus: "all" GPUs of a node are visible to each rank, or "one".
        restarts: how often the program was started before, in all runs of the job.
    """
    used = [count for count in tasks if count]
    first = next(name for name, count in zip(allocation.nodes, tasks, strict=True) if count)
    return {
        **(WITHOUT_LIBUV if without_libuv() else {}),
        **env,
        "MASTER_ADDR": "127.0.0.1" if len(used) == 1 and first == allocation.here else first,
        "MASTER_PORT": str(port),
        **torch_environment(allocation.run_id, nodes=len(used), restarts=restarts),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "SLURM_ELASTIC_RUN_ID": allocation.run_id,
        "SLURM_ELASTIC_RESTART": str(allocation.run),
        "SLURM_ELASTIC_SOCKET": socket,
        STEP_VARIABLE: step,
        TASKS_VARIABLE: ",".join(map(str, used)),
        _GPUS_VARIABLE: gpus,
    }


def torch_environment(run_id: str, *, nodes: int, restarts: int) -> dict[str, str]:
    """Return the variables of torchrun's workers that are equal on all ranks.

    Rank 0 has to serve the store: there is no agent that does.
    """
    return {
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(_MAX_RESTARTS),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def without_libuv() -> bool:
    """Return whether Debian's torch is installed; `USE_LIBUV=0` does no harm to others."""
    return os.path.isdir(_DEBIAN_TORCH)  # noqa: PTH112 - pathlib is slow to load
