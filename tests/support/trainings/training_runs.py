"""Training runs of several processes, and a fake launcher in place of esrun.

Ranks are forked from a server that has imported torch once: they start in
milliseconds, so that a sequence of five attempts takes a second, not a minute.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.core.report import ACTIONS, PHASES, Orders
from slurm_elastic.job.launch import free_port
from slurm_elastic.training import init
from slurm_elastic.training.signals import STOPPED
from tests.support.patience import PATIENCE_S
from tests.support.trainings.kill_points import KillPoint, write_pid

PROCESSES = multiprocessing.get_context("forkserver")
#: Imported once by the server, not by each rank; the library first, as in a job.
PROCESSES.set_forkserver_preload(
    [
        "slurm_elastic.training",
        "slurm_elastic.models.pipedream.partitioner",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.fx.experimental.symbolic_shapes",
        "torch.optim.swa_utils",
        # What torch and numpy import at the first batch, or with the first checkpoint.
        "multiprocessing.queues",
        "multiprocessing.resource_sharer",
        "numpy.random",
        "torch.profiler._cupti_monitor",
        "torch.utils.serialization.config",
        __name__,
        *(
            f"tests.support.trainings.{name}"
            for name in ("forked_scripts", "loop_runs", "pipeline_ranks")
        ),
        "tests.support.trainings.server_start",
    ]
)

SAMPLES, BATCH, EPOCHS = 70, 12, 3
#: Coordinates of a sample, and its possible labels.
WIDTH, LABELS = 6, 4
STEPS = EPOCHS * 6
#: Once this file exists, steps no longer last `step_s`.
HURRY = "hurry"
#: Counts the ports taken.
_PORTS = itertools.count()


def enter_rank(rank: int, environment: dict[str, str], out: Path, options: dict[str, Any]) -> None:
    """Make this process one rank of an attempt, with a log of its own."""
    os.environ.update(environment)
    # As in a job: data-loader workers are forked from the rank itself.
    multiprocessing.set_start_method("fork", force=True)
    log = os.open(out / f"rank{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    write_pid(out, options["attempt"], rank)
    torch.set_num_threads(1)


def train(rank: int, environment: dict[str, str], out: Path, options: dict[str, Any]) -> None:
    """Train as one rank; `options` are those of `TrainingRuns.start`."""
    enter_rank(rank, environment, out, options)
    attempt = options["attempt"]
    kill_point: KillPoint | None = options.get("kill_point")
    if kill_point is not None and kill_point.watched == rank:
        kill_point.set(out, attempt)
    else:
        kill_point = None
    for fault in options.get("faults", ()):
        fault.prepare(rank)
    epochs = options.get("epochs", EPOCHS)
    user_state = UserState(options.get("padding_kb", 1))
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    layers, dataset = MODELS[options.get("model", "plain")](generator, options)
    for _, layer in layers[: options.get("frozen", 0)]:
        layer.requires_grad_(requires_grad=False)
    job = init(
        layers,
        torch.nn.CrossEntropyLoss(),
        OPTIMIZERS[options.get("optimizer", "adamw")],
        dataset,
        global_batch=BATCH,
        epochs=epochs,
        checkpoint_dir=out / "ckpt",
        seed=3,
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs * 6),
        micro_batch=options.get("micro_batch"),
        workers=options.get("workers", 0),
        checkpoint_every_s=options.get("every_s", 600.0),
        background_saves=options.get("background", False),
        clip_norm=options.get("clip_norm"),
        shard=options.get("shard", False),
        overlap=options.get("overlap", "auto"),
        recompute=options.get("recompute", False),
        spatial=options.get("spatial"),
        keep_slabs=options.get("keep_slabs", False),
        tensor=options.get("tensor", 1),
        tensor_styles=options.get("tensor_styles"),
        schedule=options.get("schedule", "1f1b"),
        extra={"user_state": user_state} if "padding_kb" in options else None,
    )
    (out / f"pid{rank}").write_text(str(os.getpid()))
    assert user_state.steps == (job.resumed_from or 0) or "padding_kb" not in options
    with (
        (out / f"begun-rank{rank}.jsonl").open("a", buffering=1) as begun,
        (out / f"samples-rank{rank}.jsonl").open("a", buffering=1) as samples,
        (out / "losses.jsonl").open("a", buffering=1) as losses,
    ):
        for count, batch in enumerate(job, start=1):
            line = {"step": batch.step, "epoch": batch.epoch}
            begun.write(json.dumps(line | {"attempt": attempt, "indices": batch.indices}) + "\n")
            if kill_point is not None:
                kill_point.begin(count)
            for fault in options.get("faults", ()):
                fault.begin(batch.step)
            loss = job.step(batch)
            user_state.steps += 1
            trained = {"indices": batch.indices, "read": getattr(dataset, "read_bytes", None)}
            samples.write(json.dumps(line | trained) + "\n")
            if rank == 0:
                where = {"world": job.world_size, "layout": job.layout}
                where |= {"reduced_bytes": job.reduced_bytes}
                losses.write(json.dumps(line | {"loss": loss} | where) + "\n")
            if not (out / HURRY).exists():
                time.sleep(options.get("step_s", 0.0))
            if batch.step == options.get("signal_at") and rank == 0:
                os.kill(os.getpid(), options["signal"])
    job.finish()


Parts = tuple[list[tuple[str, torch.nn.Module]], torch.utils.data.Dataset[Any]]


def labelled_points(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points to classify, and their labels."""
    points = torch.randn(SAMPLES, WIDTH, generator=generator)
    return points, (points @ torch.randn(WIDTH, LABELS, generator=generator)).argmax(dim=1)


def plain(generator: torch.Generator, options: dict[str, Any]) -> Parts:
    """Return two layers with weights, and points to classify."""
    layers = [
        ("front", torch.nn.Linear(WIDTH, 16)),
        ("act", torch.nn.Tanh()),
        ("drop", torch.nn.Dropout(options.get("dropout", 0.0))),
        ("back", torch.nn.Linear(16, LABELS)),
    ]
    return layers, torch.utils.data.TensorDataset(*labelled_points(generator))


def narrow(generator: torch.Generator, options: dict[str, Any]) -> Parts:
    """Return two halves with many weights and a small activation between them."""
    _, dataset = plain(generator, options)
    halves = [("front", 6), ("back", 4)]
    layers: list[tuple[str, torch.nn.Module]] = []
    for name, width in halves:
        layers += [(f"{name}_in", torch.nn.Linear(width, 200)), (f"{name}_act", torch.nn.Tanh())]
        layers += [(f"{name}_out", torch.nn.Linear(200, 4))]
    return layers, dataset


class Spread(torch.nn.Module):
    """Each value of a sample, repeated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 1 << 18)


class Gathered(torch.nn.Module):
    """Means of what `Spread` has repeated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, WIDTH).mean(1)


def voluminous(generator: torch.Generator, options: dict[str, Any]) -> Parts:
    """Return a model of few weights, which keeps 57 MB of activations for each sample."""
    layers, dataset = plain(generator, options)
    wide = [("lift", torch.nn.Linear(WIDTH, WIDTH)), ("spread", Spread())]
    wide += [(f"wide{i}", torch.nn.ReLU()) for i in range(8)]
    return [*wide, ("gathered", Gathered()), *layers], dataset


class Head(torch.nn.Module):
    """Scores of each word, with classes in the second dimension as the loss expects them."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight).transpose(1, 2)


def tied(generator: torch.Generator, _options: dict[str, Any]) -> Parts:
    """Return nine layers whose last shares the weights of the first, and sequences of words."""
    words = torch.randint(11, (SAMPLES, 4), generator=generator)
    embedding = torch.nn.Embedding(11, 16)
    layers: list[tuple[str, torch.nn.Module]] = [("embed", embedding)]
    for name in ("mid1", "mid2", "mid3"):
        layers += [(name, torch.nn.Linear(16, 16)), (f"{name}_act", torch.nn.Tanh())]
    layers += [("norm", torch.nn.LayerNorm(16)), ("head", Head(embedding.weight))]
    return layers, torch.utils.data.TensorDataset(words[:, :-1], words[:, 1:])


def transformer(generator: torch.Generator, options: dict[str, Any]) -> Parts:
    """Return a small transformer, and sequences of words."""
    words = torch.randint(11, (SAMPLES, 5), generator=generator)
    block = torch.nn.TransformerEncoderLayer(
        12, 6, 24, dropout=options.get("dropout", 0.0), batch_first=True
    )
    layers: list[tuple[str, torch.nn.Module]] = [("embed", torch.nn.Embedding(11, 12))]
    layers += [(f"block{i}", copy.deepcopy(block)) for i in range(2)]
    layers += [("wide", torch.nn.Linear(12, 6000)), ("narrow", torch.nn.Linear(6000, 12))]
    layers += [("norm", torch.nn.LayerNorm(12)), ("last", torch.nn.Linear(12, 11))]
    layers += [("classes", Transposed())]
    return layers, torch.utils.data.TensorDataset(words[:, :-1], words[:, 1:])


class Transposed(torch.nn.Module):
    """Scores of each word, with classes in the second dimension as the loss expects them."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.transpose(1, 2)


class WeightsUsedDirectly(torch.nn.Module):
    """A layer whose weights the model multiplies by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, 12000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.inner.weight)


class HalfPrecision(torch.nn.Module):
    """Two layers whose products are computed in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, LABELS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.pair(x).float()


def half(generator: torch.Generator, _options: dict[str, Any]) -> Parts:
    """Return a model that computes in mixed precision, and points to classify."""
    layers: list[tuple[str, torch.nn.Module]] = [("only", HalfPrecision())]
    return layers, torch.utils.data.TensorDataset(*labelled_points(generator))


def direct(generator: torch.Generator, _options: dict[str, Any]) -> Parts:
    """Return a model that does not call its layer, and points to classify."""
    layers: list[tuple[str, torch.nn.Module]] = [("only", WeightsUsedDirectly())]
    return layers, torch.utils.data.TensorDataset(*labelled_points(generator))


def cosmology(generator: torch.Generator, options: dict[str, Any]) -> Parts:
    """Return a small CosmoFlow, volumes of odd extents or `files` of these, and their classes."""
    dropout = torch.nn.Dropout(options.get("dropout", 0.0))
    layers: list[tuple[str, torch.nn.Module]] = [
        ("conv1", torch.nn.Conv3d(2, 4, 3, padding=1)),
        ("norm1", torch.nn.GroupNorm(2, 4)),
        ("act1", torch.nn.LeakyReLU(0.3)),
        ("pool1", torch.nn.AvgPool3d(3, 2, 1)),
        ("drop", dropout),
        ("conv2", torch.nn.Conv3d(4, 6, 3, stride=2, padding=1)),
        ("act2", torch.nn.LeakyReLU(0.3)),
        ("flat", torch.nn.Flatten()),
        ("dense", torch.nn.Linear(6 * 3 * 2 * 1, 8)),
        ("act3", torch.nn.Tanh()),
        ("back", torch.nn.Linear(8, LABELS)),
    ]
    volumes = torch.randn(SAMPLES, 2, 9, 6, 4, generator=generator)
    labels = (volumes.mean((2, 3, 4)) @ torch.randn(2, LABELS, generator=generator)).argmax(dim=1)
    if "files" in options:
        return layers, options["files"]
    return layers, torch.utils.data.TensorDataset(volumes, labels)


class SmallUNet(torch.nn.Module):
    """A U-Net of two levels, with a class for each voxel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Conv3d(2, 4, 3, padding=1), torch.nn.Tanh())
        self.low = torch.nn.Sequential(
            torch.nn.MaxPool3d(2), torch.nn.Conv3d(4, 6, 3, padding=1), torch.nn.InstanceNorm3d(6)
        )
        self.up = torch.nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.last = torch.nn.Conv3d(8, LABELS, 3, padding=1)

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        high = self.first(volume)
        return self.last(torch.cat([high, self.up(torch.relu(self.low(high)))], dim=1))


def segmentation(generator: torch.Generator, _options: dict[str, Any]) -> Parts:
    """Return a small U-Net, volumes, and the class of each voxel."""
    volumes = torch.randn(SAMPLES, 2, 8, 4, 4, generator=generator)
    labels = (volumes[:, 0] > 0.0).long() + 2 * (volumes[:, 1] > 0.5).long()
    return [("unet", SmallUNet())], torch.utils.data.TensorDataset(volumes, labels)


MODELS: dict[str, Callable[[torch.Generator, dict[str, Any]], Parts]] = {
    "plain": plain,
    "narrow": narrow,
    "voluminous": voluminous,
    "tied": tied,
    "transformer": transformer,
    "direct": direct,
    "half": half,
    "cosmology": cosmology,
    "segmentation": segmentation,
}


class UserState:
    """State of the script, so large that a save takes a while."""

    def __init__(self, kilobytes: int) -> None:
        self.steps = 0
        self._size = 256 * kilobytes

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "padding_kb": torch.full((self._size,), float(self.steps))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        assert bool((state["padding_kb"] == self.steps).all())


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def foreach(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, foreach=True)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": adamw,
    "sgd": sgd,
    "plain-sgd": plain_sgd,
    "foreach": foreach,
}


class TrainingRuns:
    """Attempts of one training run, in one directory."""

    target: Callable[[int, dict[str, str], Path, dict[str, Any]], None] = staticmethod(train)

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.ranks: list[Any] = []
        self.attempts = 0

    def start(self, size: int, *, launcher: FakeLauncher | None = None, **options: Any) -> None:
        """Start an attempt with this number of ranks."""
        port = unused_port()
        self.attempts += 1
        options |= {"attempt": self.attempts}
        for rank in range(size):
            environment = {"OMP_NUM_THREADS": "1", "SLURM_ELASTIC_SOCKET": ""}
            environment["SLURM_ELASTIC"] = options.get("directive", "")
            # Not by monkeypatch: the fork server has the environment of the first test with it.
            environment |= options.get("environment", {})
            if size > 1:
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if launcher is not None:
                environment["SLURM_ELASTIC_SOCKET"] = str(launcher.path)
            process = PROCESSES.Process(
                target=self.target, args=(rank, environment, self.out, options)
            )
            process.start()
            self.ranks.append(process)

    def start_companion(self, job: int, size: int, *, port: int, **options: Any) -> list[Any]:
        """Start ranks that join the running attempt; return their processes."""
        options |= {"attempt": self.attempts}
        started = []
        for task in range(size):
            # As provisional as those of esrun, and different from all others.
            rank = 10 * job + task
            environment = {"OMP_NUM_THREADS": "1", "SLURM_ELASTIC_SOCKET": ""}
            environment |= {"SLURM_ELASTIC": "", "SLURM_ELASTIC_JOIN": str(job)}
            environment |= {"SLURM_PROCID": str(task), "RANK": str(rank), "WORLD_SIZE": "999"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment |= options.get("environment", {})
            process = PROCESSES.Process(
                target=self.target, args=(rank, environment, self.out, options)
            )
            process.start()
            started.append(process)
        self.ranks += started
        return started

    def run(self, size: int, **options: Any) -> None:
        """Run an attempt that ends by itself."""
        self.start(size, **options)
        assert self.join() == [0] * size, self.log()

    def run_until(self, step: int, size: int, **options: Any) -> None:
        """Run an attempt that Slurm ends after this step, or that ends by itself after the last."""
        stop = {"signal_at": step, "signal": signal.SIGTERM} if step < STEPS else {}
        self.start(size, **options, **stop)
        assert set(self.join()) == ({STOPPED} if stop else {0}), self.log()

    def join(self, timeout: float = PATIENCE_S) -> list[int | None]:
        """Return the exit codes of the attempt's ranks.

        Those that have not ended after the timeout have None, and are killed; where they stood is
        in the log.
        """
        end = time.monotonic() + timeout
        for process in self.ranks:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.ranks]
        if None in codes:
            self.dump_stacks()
        self.kill()
        return codes

    def dump_stacks(self) -> str:
        """Let ranks that still run write their Python stacks to the log; return the log."""
        self.signal(signal.SIGUSR1)  # of `enter_rank`
        time.sleep(1)
        return self.log()

    def signal(self, number: int) -> None:
        """Send a signal to every rank, as Slurm does."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.ranks:
            process.join()
        self.ranks = []

    def hurry(self) -> None:
        """End the pauses between steps (`step_s`): what the test waited for has happened."""
        (self.out / HURRY).touch()

    def wait_for_step(self, step: int) -> None:
        def description() -> str:
            return f"step {step}; ranks ended with {[p.exitcode for p in self.ranks]}\n{self.log()}"

        wait(lambda: max(self.losses(), default=0) >= step, description)

    def losses(self) -> dict[int, float]:
        """Return the losses by step, as last computed."""
        return {line["step"]: line["loss"] for line in lines(self.out / "losses.jsonl")}

    def sizes(self) -> list[int]:
        """Return the numbers of ranks of the attempts, in order."""
        sizes = [line["world"] for line in lines(self.out / "losses.jsonl")]
        return [b for a, b in zip([0, *sizes], sizes, strict=False) if a != b]

    def layouts(self) -> list[str]:
        """Return the layouts of the attempts, in order."""
        layouts = [line["layout"] for line in lines(self.out / "losses.jsonl")]
        return [b for a, b in zip(["", *layouts], layouts, strict=False) if a != b]

    def samples(self) -> list[Counter[int]]:
        """Return how often each sample was trained on, by epoch."""
        counts: dict[int, Counter[int]] = {}
        for path in self.out.glob("samples-rank*.jsonl"):
            for line in lines(path):
                counts.setdefault(line["epoch"], Counter()).update(line["indices"])
        return [counts[epoch] for epoch in sorted(counts)]

    def log(self) -> str:
        return "".join(p.read_text() for p in sorted(self.out.glob("rank*.err")))

    def saved_steps(self) -> list[int]:
        return sorted(int(p.name[5:]) for p in (self.out / "ckpt").glob("step_*"))


class FakeLauncher:
    """The esrun end of `slurm_elastic.job.rank_socket`: collects reports, sends orders.

    Actions, orders and phases that do not exist are errors of the test.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: list[dict[str, Any]] = []
        #: Fields that are sent before the first report.
        self.announced: list[dict[str, Any]] = []
        self._orders: dict[str, Any] = {"seq": 0, "action": "run", "report_every_s": 0.0}
        self._connection: socket.socket | None = None
        self._closed = False
        #: Lines about the group of ranks, of all attempts.
        self.group: list[dict[str, Any]] = []
        self._companions: dict[str, int] | None = None
        #: Seconds after which a rank that connects gets its first message.
        self.first_message_after_s = 0.0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def order(self, action: str, notice: int | None = None) -> None:
        """Send an action, beside the other orders."""
        assert action in ACTIONS, action
        self.set_orders(action=action, notice=notice)

    def set_orders(self, **orders: Any) -> None:
        """Send orders such as layout, batch or frozen, beside the action."""
        assert orders.keys() <= Orders.__dataclass_fields__.keys(), orders
        self._orders |= {"seq": self._orders["seq"] + 1} | orders
        self._send()

    def set_companions(self, companions: dict[str, int]) -> None:
        """Send the desired companions and their numbers of ranks."""
        self._companions = dict(companions)
        self._send()

    def wait_for_group(self, **fields: Any) -> dict[str, Any]:
        """Return the first line about the group with these fields."""
        return wait(
            lambda: next((g for g in list(self.group) if fields.items() <= g.items()), None),
            lambda: f"{fields}; group: {self.group}",
        )

    def wait_for(self, phase: str, **fields: Any) -> dict[str, Any]:
        """Return the first report of this phase with these fields since `clear_reports`."""
        assert phase in PHASES, phase

        def match() -> dict[str, Any] | None:
            for report in list(self.reports):
                if report["phase"] == phase and fields.items() <= report.items():
                    return report
            return None

        return wait(match, f"{phase} {fields}; reports: {self.reports[-3:]}")

    def clear_reports(self) -> None:
        self.reports.clear()

    def begin_attempt(self) -> None:
        """Forget the reports of the attempt before, whose ranks have ended, once all are read."""
        wait(lambda: self._connection is None, "the end of the last attempt's reports")
        self.clear_reports()

    def close(self) -> None:
        self._closed = True
        with socket.socket(socket.AF_UNIX) as last:  # wakes `accept`
            last.connect(str(self.path))
        self._thread.join(PATIENCE_S)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed:
            self._connection, _ = self._listener.accept()
            with (
                self._connection,
                self._connection.makefile() as lines,
                contextlib.suppress(OSError),
            ):
                time.sleep(self.first_message_after_s)
                self._send()
                for line in lines:
                    message = json.loads(line)
                    if "group" in message:
                        self.group.append(message["group"])
                    elif "phase" in message["report"]:
                        self.reports.append(message["report"])
                    else:
                        self.announced.append(message["report"])
            self._connection = None

    def _send(self) -> None:
        connection = self._connection
        if connection is not None:
            orders = {k: v for k, v in self._orders.items() if v is not None}
            message: dict[str, Any] = {"orders": orders}
            if self._companions is not None:
                message["companions"] = self._companions
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")


def wait(condition: Callable[[], Any], name: str | Callable[[], str]) -> Any:
    """Wait until `condition` returns a true value, and return that."""
    end = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        if time.monotonic() > end:
            pytest.fail(f"timeout while waiting for {name if isinstance(name, str) else name()}")
        time.sleep(0.02)
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in path.read_text().splitlines()]
    return []


def unused_port() -> int:
    """Return a port below those of outgoing connections, which might take it before its use."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return free_port(20000 + worker % 8 * 1000 + next(_PORTS) % 200 * 5)
