"""Changes of a running training's ranks in place, on this machine.

    python -m benchmarks.resize.regroup [--millions 1,100] [--changes 30] [--base 2] [--companion 2]
        [--layout init|loop|pipeline|shard]

Processes with gloo, as esrun starts them; this program stands in for it. Where torch sees GPUs each
process has one of its own, and NCCL; there set SLURM_ELASTIC_IN_PLACE_NCCL=1 (`make test-gpu`).
Companions of ranks join and leave in turn. In the same run, a training that nothing disturbs, for
its losses. `--layout loop` is a loop of the script's own (`ElasticLoop`); with `pipeline`
each rank holds a stage, with `shard` a part of each parameter, so that a change goes through a
checkpoint. Columns:

    pause      end of the last step of one group → begin of the first step of the next, on rank 0
    gap        the same between two steps without a change
    request    companion desired, its processes not started yet → all ranks train together; or no
               longer desired → its processes have ended
    step       median duration of a step

The machine is shared: quote figures of one run only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.support.rank_processes import NCCL_HOST_VARIABLE, shared_gpus
from slurm_elastic.core.report import Report
from slurm_elastic.job.launch import free_port
from slurm_elastic.job.rank_socket import JOIN_VARIABLE, SOCKET_VARIABLE, socket_address
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.training.ranks.nccl_groups import NCCL_VARIABLE

_PATIENCE_S = 600.0
#: Steps between two changes.
_STEPS = 5
_BATCH = 16
_RUNS = itertools.count()
_WIDTHS = {1: (512, 512, 3), 100: (5760, 5760, 3)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resize.regroup")
    parser.add_argument("--millions", default="1,100", help="parameters: some of 1, 100")
    parser.add_argument("--changes", type=int, default=30, help="of the smallest model")
    parser.add_argument("--changes-of-large", type=int, default=6)
    parser.add_argument("--base", type=int, default=2)
    parser.add_argument("--companion", type=int, default=2)
    parser.add_argument("--layout", choices=tuple(TRAININGS), default="init")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [int(n) for n in args.millions.split(",")]
    if args.rank:
        TRAININGS[args.layout](sizes[0], args.rank)
        return
    for millions in sizes:
        changes = args.changes if millions == min(sizes) else args.changes_of_large
        figures = measure(
            millions, changes, base=args.base, companion=args.companion, layout=args.layout
        )
        if args.json:
            print(json.dumps(figures), flush=True)
        else:
            show(figures)


def train(millions: int, out: Path, *, shard: bool = False) -> None:
    """Train by `init` as one rank, until the process is killed."""
    from slurm_elastic.training import init  # noqa: I001, PLC0415
    import torch  # noqa: PLC0415

    model, dataset = _parts(millions)
    job = init(
        model,
        torch.nn.MSELoss(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        dataset,
        global_batch=_BATCH,
        epochs=1_000_000,
        checkpoint_dir=out / "checkpoints",
        checkpoint_every_s=1e9,
        shard=shard,
    )
    leads = job.rank == 0
    with (out / "steps.jsonl").open("a", buffering=1) as steps:
        for batch in job:
            begun = time.monotonic()
            loss = job.step(batch)
            if leads:
                row = {"step": batch.step, "loss": loss, "begun": begun, "ended": time.monotonic()}
                steps.write(json.dumps(row) + "\n")


def train_in_loop(millions: int, out: Path) -> None:
    """Train by `ElasticLoop` as one rank, until the process is killed."""
    from slurm_elastic.training import ElasticLoop  # noqa: I001, PLC0415
    import torch  # noqa: PLC0415

    model, dataset = _parts(millions)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loop = ElasticLoop(
        out / "checkpoints",
        global_batch=_BATCH,
        checkpoint_every_s=1e9,
        in_place=True,
        model=model,
        optimizer=optimizer,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    loader = loop.loader(dataset)
    leads = loop.rank == 0
    with (out / "steps.jsonl").open("a", buffering=1) as steps:
        for _ in loop.epochs(1_000_000):
            for inputs, targets in loader:
                begun = time.monotonic()
                outputs = wrapped(inputs.to(device))
                loss = torch.nn.functional.mse_loss(outputs, targets.to(device)) * loop.loss_weight
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                mean = loss.detach() / loop.world_size
                torch.distributed.all_reduce(mean)
                if leads:
                    row = {"step": loop.step + 1, "loss": float(mean)}
                    row |= {"begun": begun, "ended": time.monotonic()}
                    steps.write(json.dumps(row) + "\n")


def _parts(millions: int) -> tuple[Any, Any]:
    """Return the model and its dataset."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    first, width, layers = _WIDTHS[millions]
    model = torch.nn.Sequential(
        *[
            module
            for i in range(layers)
            for module in (torch.nn.Linear(first if i == 0 else width, width), torch.nn.Tanh())
        ]
    )
    samples = 256
    inputs, targets = torch.randn(samples, first), torch.randn(samples, width)
    return model, torch.utils.data.TensorDataset(inputs, targets)


TRAININGS: dict[str, Callable[[int, Path], None]] = {
    "init": train,
    "loop": train_in_loop,
    "pipeline": train,
    "shard": partial(train, shard=True),
}


class LocalRun:
    """Processes of one training, and esrun's end of their connection.

    A context manager: it kills the processes at the end, and prints their log if there is an error.

    Args:
        out: folder to make, for steps, checkpoints and the log.
        millions: of parameters.
        layout: one of `TRAININGS`.
        variables: further ones of the processes.
    """

    def __init__(
        self,
        out: Path,
        millions: int,
        layout: str = "init",
        *,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.out, self._millions, self._layout = out, millions, layout
        self._base = 0
        out.mkdir()
        name = f"@slurm-elastic-regroup-{os.getpid()}-{next(_RUNS)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(socket_address(name))
        listener.listen()
        self.group: list[dict[str, Any]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        state = ReportState(Report(job_id=0, run=0, phase="starting"))
        self._server = RankSocketServer(state, listener, on_group=self.group.append)
        self._server.start()
        self._server.set_companions({})
        self._environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK"))
        } | {SOCKET_VARIABLE: name, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        self._environment |= variables or {}
        if NCCL_VARIABLE in os.environ:
            self._environment[NCCL_VARIABLE] = os.environ[NCCL_VARIABLE]
        if layout == "pipeline":
            self._environment["SLURM_ELASTIC"] = "1-64,parallel=pipeline"

    def start_base(self, size: int) -> int:
        """Start the base; return the port for companions."""
        port = str(free_port(29500))
        self._base = size
        for rank in range(size):
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            self._start(MASTER_PORT=port, **ranks)
        answer = self.wait_for(lambda g: "can" in g)
        if not answer["can"]:
            raise RuntimeError(f"the ranks of this training cannot change: {answer['why']}")
        return int(answer["port"])

    def start_companion(self, job: int, size: int, port: int) -> list[subprocess.Popen[bytes]]:
        """Start the ranks of a companion."""
        return [
            self._start(
                **{JOIN_VARIABLE: str(job), "SLURM_PROCID": str(task), SOCKET_VARIABLE: ""},
                RANK=str(100 + task),
                WORLD_SIZE="999",
                LOCAL_RANK=str(self._base + task),
                MASTER_PORT=str(port),
            )
            for task in range(size)
        ]

    def desire(self, companions: dict[str, int]) -> None:
        """State which companions belong to the training."""
        self._server.set_companions(companions)

    def wait_for(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Return the first line of rank 0 about its group that fulfils a condition."""
        line: dict[str, Any] = wait(
            lambda: next((g for g in list(self.group) if condition(g)), None)
        )
        return line

    def wait_for_generation(self, number: int) -> dict[str, Any]:
        """Return rank 0's line about a change of this number."""
        return self.wait_for(lambda g: g.get("generation") == number)

    def take_steps(self, count: int) -> None:
        """Wait until this many further steps are done."""
        before = len(self.steps())
        wait(lambda: len(self.steps()) >= before + count)

    def steps(self) -> list[dict[str, Any]]:
        """Return the rows of all steps so far."""
        path = self.out / "steps.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def resources(self) -> tuple[int, int]:
        """Return the open files and the threads of rank 0."""
        process = Path("/proc") / str(self.processes[0].pid)
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            log = (self.out / "log").read_text(encoding="utf-8", errors="replace")
            sys.stderr.write(log[-4000:])
        for process in self.processes:
            process.kill()
            process.wait()

    def stop(self, count: int) -> list[int]:
        """Send SIGTERM to the first processes, as Slurm does, and return their exit codes."""
        for process in self.processes[:count]:
            process.terminate()
        return [process.wait(_PATIENCE_S) for process in self.processes[:count]]

    def _start(self, **variables: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.resize.regroup", "--rank", str(self.out)]
        if shared_gpus():
            variables[NCCL_HOST_VARIABLE] = f"rank-{variables['RANK']}"
        with (self.out / "log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--millions", str(self._millions), "--layout", self._layout],
                cwd=ROOT,
                env=self._environment | variables,
                stderr=log,
            )
        self.processes.append(process)
        return process


def measure(
    millions: int, changes: int, *, base: int, companion: int, layout: str = "init"
) -> dict[str, Any]:
    """Return the figures of some changes, half of them grows."""
    with tempfile.TemporaryDirectory(prefix="regroup-") as folder:
        with LocalRun(Path(folder) / "changed", millions, layout) as run:
            rows = _change(run, changes, base=base, companion=companion)
            steps = run.steps()
            resources = run.resources()
        undisturbed = undisturbed_losses(Path(folder), millions, layout, base, len(steps))
    times = {row["step"]: row for row in steps}
    changed = {row["step"] for row in rows}
    for row in rows:
        row["pause"] = times[row["step"] + 1]["begun"] - times[row["step"]]["ended"]
    gaps = [
        times[n + 1]["begun"] - times[n]["ended"]
        for n in times
        if n + 1 in times and n not in changed
    ]
    return {
        "millions": millions,
        "layout": layout,
        "base": base,
        "companion": companion,
        "rows": rows,
        "steps": len(steps),
        "lost_steps": lost_steps(steps),
        "resources": resources,
        "gap": statistics.median(gaps),
        "step": statistics.median(row["ended"] - row["begun"] for row in steps),
        "loss_difference": loss_difference(steps, undisturbed),
    }


def lost_steps(steps: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of missing or repeated steps in the rows of a training."""
    numbers: set[int] = {row["step"] for row in steps}
    return len(steps) - len(numbers) + max(numbers) - len(numbers)


def loss_difference(steps: Sequence[Mapping[str, Any]], losses: Mapping[int, float]) -> float:
    """Return the largest difference from the losses of another training, by step."""
    compared = [row for row in steps if row["step"] in losses]
    return max(abs(float(row["loss"]) - losses[row["step"]]) for row in compared)


def undisturbed_losses(
    folder: Path, millions: int, layout: str, base: int, steps: int
) -> dict[int, float]:
    """Return the losses, by step, of at least so many steps of a training without changes."""
    with LocalRun(folder / "undisturbed", millions, layout) as plain:
        plain.start_base(base)
        wait(lambda: len(plain.steps()) >= steps)
        return {row["step"]: row["loss"] for row in plain.steps()}


def _change(run: LocalRun, changes: int, *, base: int, companion: int) -> list[dict[str, Any]]:
    port = run.start_base(base)
    rows: list[dict[str, Any]] = []
    job = 4710
    ranks: list[subprocess.Popen[bytes]] = []
    for number in range(1, changes + 1):
        run.take_steps(_STEPS)
        grows = number % 2 == 1
        begun = time.monotonic()
        if grows:
            job += 1
            ranks = run.start_companion(job, companion, port)
        run.desire({str(job): companion} if grows else {})
        switched = run.wait_for_generation(number)
        if not grows:
            codes = [rank.wait(_PATIENCE_S) for rank in ranks]
            assert codes == [0] * companion, codes
        rows.append(
            {
                "kind": "grow" if grows else "shrink",
                "step": switched["step"],
                "request": time.monotonic() - begun,
            }
        )
    run.take_steps(_STEPS)
    return rows


def show(figures: dict[str, Any]) -> None:
    """Print one model's figures."""
    print(
        f"{figures['layout']}, {figures['millions']} M parameters, {figures['base']} ranks and a"
        f" companion of {figures['companion']}: {figures['steps']} steps,"
        f" {figures['lost_steps']} lost or repeated; loss differs by at most"
        f" {figures['loss_difference']:.1e}; step {1e3 * figures['step']:.0f} ms,"
        f" gap {1e3 * figures['gap']:.1f} ms; rank 0 has at the end"
        " {} open files and {} threads".format(*figures["resources"])
    )
    for kind in ("grow", "shrink"):
        rows = [row for row in figures["rows"] if row["kind"] == kind]
        for column in ("pause", "request"):
            values = sorted(row[column] for row in rows)
            if values:
                print(
                    f"  {kind:<7} {column:<8} p50 {1e3 * statistics.median(values):8.1f} ms"
                    f" ({1e3 * values[0]:.1f} to {1e3 * values[-1]:.1f}), n={len(values)}"
                )
    sys.stdout.flush()


def wait(condition: Callable[[], Any]) -> Any:
    """Wait until a condition returns a true value, and return that.

    Raises:
        TimeoutError: it does not.
    """
    end = time.monotonic() + _PATIENCE_S
    while not (result := condition()):
        if time.monotonic() > end:
            raise TimeoutError("benchmarks: regroup: the training does not go on")
        time.sleep(0.02)
    return result


if __name__ == "__main__":
    main()
