"""Start of the ranks.

Each restart of a job waits for this module, so it imports almost nothing: srun starts about
15 ms after Python. The modules that supervise it are imported later.
"""

from __future__ import annotations

# `signal` and `socket` themselves would double the time until the ranks run.
import _signal  # type: ignore[import-not-found]
import _socket
import os
import select
import sys
import time
from collections.abc import Mapping, Sequence

from slurm_elastic.job import srun
from slurm_elastic.job.environment.sole_esrun import lock_job
from slurm_elastic.job.environment.standard_input import StandardInput
from slurm_elastic.job.environment.state_directory import (
    forget_older,
    state_directories,
    writable,
)
from slurm_elastic.job.environment.world_variables import (
    DIRECTIVE_VARIABLE,
    inexact_line,
    read_start_world,
    world_variables,
)
from slurm_elastic.job.esrun_options import Options
from slurm_elastic.job.launchers.accumulation_option import (
    advice,
    own_accumulation,
    with_accumulation,
)
from slurm_elastic.job.slurm_env import (
    COMPANION_VARIABLE,
    STEP_VARIABLE,
    SlurmAllocation,
    clean,
    following_ports,
    master_port,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_elastic.job.environment.joint_shape import CompanionPart, JointShape

_PROBE_S = 20.0

#: Signals that esrun handles.
SIGNALS = frozenset(
    (
        *(_signal.SIGHUP, _signal.SIGINT, _signal.SIGTERM),
        *(_signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGCONT),
    )
)


def log_line(text: str) -> None:
    """Write one line to the job's log; on a full disk it is lost, and the job goes on."""
    line = f"esrun: {text}\n"
    try:
        descriptor = sys.stderr.fileno()
    except OSError:  # it is no file
        sys.stderr.write(line)
        return
    try:  # not buffered: what cannot be written would change the exit code of Python
        os.write(descriptor, line.encode("utf-8", "backslashreplace"))
    except OSError:
        return


def hold_signals() -> None:
    """Block `SIGNALS` until their handlers are installed; children do not inherit this."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, SIGNALS)


class SrunProcess:
    """A started srun.

    Attributes:
        pid: process id.
        errors: descriptor from which its error output can be read.
        mark: value of `SLURM_ELASTIC_STEP` in its tasks.
        started: `time.monotonic()` of the start.
    """

    __slots__ = ("errors", "mark", "pid", "started")

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        mark: str,
        stdin: StandardInput | None = None,
    ) -> None:
        self.mark = mark
        self.started = time.monotonic()
        descriptor = stdin.open() if stdin is not None else None
        try:
            self.pid, self.errors = _spawn(command, env, [2], stdin=descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def ends_within(self, seconds: float) -> bool:
        """Wait at most this long for the end; return whether it has ended. Does not reap it."""
        handle = os.pidfd_open(self.pid)
        try:
            return bool(select.select([handle], [], [], seconds)[0])
        finally:
            os.close(handle)


class RankLaunch:
    """The job's step, to be started once or several times.

    Attributes:
        allocation: the job's nodes, CPUs and GPUs.
        options: of the command line.
        submitted: environment of the batch script.
        tasks: number of ranks of each node.
        gpus: whether each rank gets a GPU.
        attempt: starts so far in this run of the job.
        environment: of the last start.
        mark: of the last start.
        listener: listening socket for rank 0.
        stdin: standard input of the program.
        parts: companions in which the next start has ranks, too.
        started_parts: of the last start: each of them with its srun.
    """

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        self.options = options
        self.allocation = SlurmAllocation(env)
        self.tasks: tuple[int, ...] = ()
        self.gpus = False
        self.attempt = 0
        self.environment: dict[str, str] = {}
        self.mark = ""
        self.submitted = env
        self.stdin = StandardInput()
        self.parts: tuple[CompanionPart, ...] = ()
        self.started_parts: list[tuple[int, SrunProcess]] = []
        self._env = clean(env)
        self._probe: tuple[int, int] | None = None
        self._restarts: tuple[int, int] | None = None
        name = f"slurm-elastic-{self.allocation.job_id}-{os.urandom(6).hex()}"
        self._socket = f"@{name}"
        self._job_lock: _socket.socket | None = None
        self.listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self.listener.bind(f"\0{name}")
        self.listener.listen(16)

    def lock_job(self) -> None:
        """Refuse every other esrun of the job until this one ends.

        Raises:
            SecondEsrunError: another one runs.
        """
        directory = self.submitted.get("SLURM_SUBMIT_DIR") or "."
        self._job_lock = lock_job(self.allocation.run_id, directory)

    def begin_queries(self) -> None:
        """Start the queries that `settle` reads: GPUs of other nodes, and the job's restarts."""
        if None in self.allocation.gpus:
            command = srun.probe_command(self.allocation, self.submitted)
            self._probe = _spawn(command, self._env, [1])
        if self.allocation.run:
            options = (f"--jobs={self.allocation.job_id}", "--noheader", "--Format=RestartCnt")
            try:
                self._restarts = _spawn(("squeue", *options), self._env, [1])
            except OSError:  # there is no squeue: the number in the environment counts
                self._restarts = None

    def settle(self) -> None:
        """Decide how many ranks each node runs."""
        self._correct_run()
        counts = [count or 0 for count in self.allocation.gpus]
        if self._probe is not None:
            nodes = len(self.allocation.nodes)
            answer = srun.probed(_collect(*self._probe), nodes) or self._held_gpus()
            if answer is None:
                log_line(
                    f"GPUs of the other nodes: no answer; assuming {counts[0]} each, as on this one"
                )
            counts = [counts[0]] * nodes if answer is None else list(answer)
        self.gpus = any(counts)
        self.tasks = srun.tasks_per_node(self.allocation, counts)

    def _held_gpus(self) -> tuple[int, ...] | None:
        """Return each node's GPUs from slurmctld, as a node has not answered; None: nor has it."""
        # Slow to load, rarely needed.
        from slurm_elastic.job.environment.held_gpus import held_gpus  # noqa: PLC0415

        words = ("scontrol", "show", "job", "--details", str(self.allocation.job_id))
        try:
            return held_gpus(_collect(*_spawn(words, self._env, [1])), self.allocation.nodes)
        except OSError:
            return None

    def _correct_run(self) -> None:
        """Take the number of restarts from Slurm, if it answers."""
        answer = _collect(*self._restarts).strip() if self._restarts is not None else ""
        if answer.isdecimal() and int(answer) != self.allocation.run:
            self.allocation.run = int(answer)
            self._env["SLURM_RESTART_COUNT"] = answer
            if not self.allocation.run:
                del self._env["SLURM_RESTART_COUNT"]  # as Slurm in a first attempt

    def command(self) -> list[str]:
        """Return the srun command line that `start` runs; companions have their own."""
        joint = self._joint()
        return srun.command(
            self.allocation,
            self.tasks,
            self._program()[0],
            gpus=self.gpus,
            user_options=self.options.srun_args,
            world=(joint.nodes, joint.ranks) if joint else None,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks, those in companions included."""
        return sum(self.tasks) + sum(part.ranks for part in self.parts)

    @property
    def hosts(self) -> list[tuple[int | None, list[str]]]:
        """Hosts that run ranks, each once: (companion by which it is reached, names)."""
        groups: list[tuple[int | None, list[str]]] = [(None, self.nodes)]
        for part in self.parts:
            if not any(part.node in names for _, names in groups):
                groups.append((part.job_id, [part.node]))
        return groups

    def _program(self) -> tuple[list[str], str]:
        """Return the program's arguments for the present ranks, and a line for the log or ""."""
        options = self.options
        return with_accumulation(options.program, options.micro_batches, self.ranks)

    def _advice(self, world: int) -> str:
        """Return a line on `--micro-batches` at the first start of a script that is resized."""
        options, is_first = self.options, self.allocation.run == 0 and self.attempt == 1
        is_given = options.micro_batches is not None or options.keeps_batch
        if not is_first or options.checkpoint is None or is_given:
            return ""
        return advice(options.program, world, self._env.get(DIRECTIVE_VARIABLE, ""))

    def _joint(self) -> JointShape | None:
        """Return the shape of an attempt on several jobs; None: it is on one."""
        if not self.parts:
            return None
        # Slow to load, rarely needed.
        from slurm_elastic.job.environment.joint_shape import JointShape  # noqa: PLC0415

        return JointShape.of(self.allocation, self.tasks, self.parts)

    def start(self, instead: Sequence[str] = ()) -> SrunProcess:
        """Start the step, on a port that no earlier attempt used.

        Args:
            instead: command to run on this host in place of the step's srun.
        """
        job = self.allocation
        if job.run == 0 and self.attempt == 0 and job.start_time is not None:
            forget_older(state_directories(self._env), job.run_id, job.start_time)
        port = free_port(master_port(job.job_id, job.run, self.attempt))
        self.attempt += 1
        mark = f"{job.run_id}.{job.run}.{self.attempt}"
        world, micro_batches = self.ranks, self.options.micro_batches
        own_line = own_accumulation(self.options.program, micro_batches)
        env = srun.step_environment(
            self._env,
            job,
            self.tasks,
            port=port,
            socket=self._socket,
            step=mark,
            gpus=self.options.gpus,
            restarts=job.run + self.attempt - 1,
        )
        env |= world_variables(
            self._env,
            world=world,
            start_world=read_start_world(self._env, job.run_id),
            micro_batches=micro_batches,
            for_accelerate=not own_line,
        )
        joint = self._joint()
        if joint:
            env |= joint.variables(job.job_id, 0) | {"MASTER_ADDR": self.nodes[0]}
        command = list(instead) or self.command()
        if any("$ESRUN_RENDEZVOUS" in word for word in command if word != srun.LAUNCHER_SCRIPT):
            env["ESRUN_STATE"] = writable(state_directories(self._env)) or ""
        self.environment, self.mark = env, mark
        child = SrunProcess(command, env, mark, self.stdin)
        self.started_parts = self._start_parts(joint, env) if joint else []
        by_launcher = ", one launcher per node" if srun.LAUNCHER_SCRIPT in command else ""
        again = " in place" if self.attempt > 1 else ""
        shape = describe(job, self.tasks)
        if joint:
            held = (f"{p.job_id} ({p.ranks} on {p.node})" for p in self.parts)
            shape = f"{joint.ranks} ranks, {shape} and in companions {', '.join(held)}"
        log_line(f"attempt {job.run + 1}{again}: {shape}, port {port}{by_launcher}")
        if micro_batches and (line := inexact_line(micro_batches, world)):
            log_line(line)
        if line := self._program()[1] or self._advice(world):
            log_line(line)
        if own_line and job.run == 0 and self.attempt == 1:
            log_line(own_line)
        return child

    def _start_parts(
        self, shape: JointShape, env: Mapping[str, str]
    ) -> list[tuple[int, SrunProcess]]:
        """Start the ranks in companions; return each of these with its srun."""
        started, first = [], shape.nodes - len(self.parts)
        for node, part in enumerate(self.parts, first):
            command = srun.command(
                part.allocation,
                (part.ranks,),
                self._program()[0],
                gpus=True,
                user_options=self.options.srun_args,
                companion=True,
                world=(shape.nodes, shape.ranks),
            )
            own = {
                **srun.without_job(env),
                **shape.variables(self.allocation.job_id, node),
                srun.TASKS_VARIABLE: str(part.ranks),
                COMPANION_VARIABLE: part.mark,
            }
            started.append((part.job_id, SrunProcess(command, own, env[STEP_VARIABLE], self.stdin)))
        return started

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes that run ranks."""
        by_node = zip(self.allocation.nodes, self.tasks, strict=True)
        return [name for name, count in by_node if count]


def describe(allocation: SlurmAllocation, tasks: Sequence[int]) -> str:
    """Return the ranks and nodes as text: `6 ranks on g[01-02] (4+2)`."""
    ranks = sum(tasks)
    text = f"{ranks} rank{'s' if ranks > 1 else ''} on {allocation.nodelist}"
    if len(set(tasks)) > 1 and len(tasks) <= 16:
        text += f" ({'+'.join(map(str, tasks))})"
    return text


def free_port(first: int) -> int:
    """Return the first port from `first` on that can be bound on this host, where rank 0 runs."""
    for port in following_ports(first):
        sock = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        try:
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
        except OSError:
            continue
        finally:
            sock.close()
        return port
    return first


def _spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    captured: Sequence[int],
    *,
    stdin: int | None = None,
) -> tuple[int, int]:
    """Start a process; return its id and a descriptor that reads what it writes to `captured`."""
    read_end, write_end = os.pipe()
    try:
        actions = [(os.POSIX_SPAWN_DUP2, write_end, fd) for fd in captured]
        if stdin is not None:
            actions.append((os.POSIX_SPAWN_DUP2, stdin, 0))
        pid = os.posix_spawnp(
            command[0], list(command), dict(env), file_actions=actions, setsigmask=()
        )
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return pid, read_end


def _collect(pid: int, output: int) -> str:
    """Return all that a query prints within `_PROBE_S`; end it then."""
    data, end = b"", time.monotonic() + _PROBE_S
    while select.select([output], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(output, 65536)
        if not part:
            break
        data += part
    else:
        os.kill(pid, 15)
    os.close(output)
    os.waitpid(pid, 0)
    return data.decode("ascii", "replace")
