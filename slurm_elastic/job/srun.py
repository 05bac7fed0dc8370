"""The srun command that starts one task per GPU, and the shell scripts that run in each task.

The step gets all GPUs of its nodes without binding, and each rank selects its own by
`CUDA_VISIBLE_DEVICES`. With Slurm's per-task binding, sites that confine devices by cgroups would
hide the other ranks' GPUs, and NCCL could not use the links between them.

Part of each start: imports only modules that Python has loaded already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from slurm_elastic.job.slurm_env import SlurmAllocation

#: Marks the processes of one step for `SIGNAL_SCRIPT`.
STEP_VARIABLE = "SLURM_ELASTIC_STEP"
_TASKS_VARIABLE = "ESRUN_TASKS"

#: Debian builds torch without libuv, which torch's rendezvous uses by default.
_DEBIAN_TORCH = "/usr/lib/python3/dist-packages/torch"

#: Runs as each task: selects the rank's GPU, exports the rank's variables, executes the program.
#: Changes only the first variable that is set: Slurm sets all unless the vendor is configured.
RANK_SCRIPT = f"""
tasks=${_TASKS_VARIABLE}, node=$SLURM_NODEID
while [ "$node" -gt 0 ]; do tasks=${{tasks#*,}} node=$((node-1)); done
for name in CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK; do
    eval "gpus=\\${{$name-}},"
    [ "$gpus" = , ] && continue
    i=$SLURM_LOCALID
    while [ "$i" -gt 0 ]; do gpus=${{gpus#*,}} i=$((i-1)); done
    [ -n "${{gpus%%,*}}" ] && export "$name=${{gpus%%,*}}"
    break
done
unset {_TASKS_VARIABLE}
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID
export WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_WORLD_SIZE=${{tasks%%,*}}
exec "$@"
"""

#: Sends signal $1 to this node's tasks of step $2, but not to their children: data-loader workers
#: would die of it. The parent of a task is slurmstepd, or (hidepid) is not visible.
_SIGNAL_TASKS = f"""
signal_tasks() {{
    found=1
    for file in $(grep -lzFx "{STEP_VARIABLE}=$2" /proc/[0-9]*/environ 2>/dev/null); do
        pid=${{file%/environ}} pid=${{pid#/proc/}} parent=
        while read -r key value; do
            [ "$key" = PPid: ] && parent=$value && break
        done 2>/dev/null </proc/$pid/status
        read -r name 2>/dev/null </proc/$parent/comm || name=slurmstepd
        case $name in slurmstepd*) kill -s "$1" "$pid" 2>/dev/null && found=0;; esac
    done
    return $found
}}
"""
# Slurm repeats its SIGTERM, and sends it to helper steps too.
SIGNAL_SCRIPT = "trap '' TERM" + _SIGNAL_TASKS + 'signal_tasks "$@"'

#: Prints `ready`. After USR2 it kills the tasks at Slurm's SIGTERM, which they may ignore. USR1
#: ends it. The `sleep` is short: one that misses the signal delays the end of the step.
GUARD_SCRIPT = (
    _SIGNAL_TASKS
    + """
armed=
trap 'armed=1' USR2
trap 'exit 0' USR1
trap 'trap "" TERM; [ -n "$armed" ] && signal_tasks "$@"; exit 0' TERM
echo ready
while :; do sleep 1 >/dev/null & wait; done
"""
)

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
) -> list[str]:
    """Return the command line of the step.

    Args:
        allocation: the job's.
        tasks: number of each node; 0 excludes a node.
        program: command that each rank runs.
        gpus: whether each task gets a GPU.
        user_options: the user's options for srun, last so that they take precedence.
    """
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
        *(("--gpus-per-task=1", "--gpu-bind=none") if gpus else ()),
        *("--mem=0", "--overlap", "--export=ALL", "--kill-on-bad-exit=1"),
        f"--job-name={os.path.basename(program[0])[:40]}",  # noqa: PTH119 - pathlib is slow to load
        *user_options,
        *("sh", "-c", RANK_SCRIPT, "esrun", *program),
    ]


def helper_command(nodes: Sequence[str], script: str, *arguments: str) -> list[str]:
    """Return an srun that runs a shell script once on each of these nodes, beside the step."""
    return [
        *("srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(nodes)}", "--gres=none", "--mem=0", "--overlap"),
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
) -> dict[str, str]:
    """Return the environment of the step; `RANK_SCRIPT` adds each rank's own variables.

    Args:
        env: the batch script's, without stale variables.
        allocation: the job's.
        tasks: number of each node.
        port: a free port on the first node.
        socket: address at which this esrun listens for rank 0.
        step: mark of this step.
    """
    used = [count for count in tasks if count]
    first = next(name for name, count in zip(allocation.nodes, tasks, strict=True) if count)
    return {
        **({"USE_LIBUV": "0"} if without_libuv() else {}),
        **env,
        "MASTER_ADDR": "127.0.0.1" if len(used) == 1 and first == allocation.here else first,
        "MASTER_PORT": str(port),
        "SLURM_ELASTIC_RUN_ID": allocation.run_id,
        "SLURM_ELASTIC_RESTART": str(allocation.run),
        "SLURM_ELASTIC_SOCKET": socket,
        STEP_VARIABLE: step,
        _TASKS_VARIABLE: ",".join(map(str, used)),
    }


def without_libuv() -> bool:
    """Return whether Debian's torch is installed; `USE_LIBUV=0` does no harm to others."""
    return os.path.isdir(_DEBIAN_TORCH)  # noqa: PTH112 - pathlib is slow to load
