"""A batch that is ordered during training: all ranks apply it with the same step."""

import dataclasses
import json
import math
import multiprocessing
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.core.report import Orders
from slurm_elastic.training import Freezing, TrainingJob, init
from slurm_elastic.training.sampler import Sampler
from tests.support.trainings import training_runs as harness
from tests.support.trainings.fixed_criterion import FixedCriterion
from tests.support.trainings.small_buckets import SmallBuckets
from tests.support.trainings.training_runs import FakeLauncher, TrainingRuns

SAMPLES, INITIAL, EPOCHS = 200, 10, 6
SCHEDULE = EPOCHS * SAMPLES // INITIAL


def parts(optimizer: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    made = harness.OPTIMIZERS[optimizer](model.parameters())
    return model, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, SCHEDULE)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(SAMPLES, 6, generator=generator)
    return points, (points @ torch.randn(6, 4, generator=generator)).argmax(dim=1)


def train(rank: int, environment: dict[str, str], out: Path, options: dict[str, Any]) -> None:
    """Train as one rank."""
    os.environ.update(environment | {"SLURM_ELASTIC": options["elastic"]})
    multiprocessing.set_start_method("fork", force=True)
    os.dup2(os.open(out / f"rank{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    SmallBuckets().prepare(rank)
    model, optimizer, scheduler = parts(options["optimizer"])
    job = init(
        model,
        torch.nn.CrossEntropyLoss(),
        optimizer,
        torch.utils.data.TensorDataset(*data()),
        global_batch=INITIAL,
        epochs=EPOCHS,
        checkpoint_dir=out / "ckpt",
        seed=3,
        scheduler=scheduler,
        micro_batch=options.get("micro_batch"),
        workers=options.get("workers", 0),
        batch_rule=options.get("rule", "sqrt"),
        overlap="buckets",
    )
    follow(job, options["plan"])
    with (out / f"steps-rank{rank}.jsonl").open("a", buffering=1) as steps:
        for batch in job:
            taken, rate = job._batch_size.now, optimizer.param_groups[0]["lr"]
            loss = job.step(batch)
            line = {"step": batch.step, "epoch": batch.epoch, "batch": taken, "loss": loss}
            line |= {"indices": batch.indices, "rate": rate, "gain": job._agreed.gain}
            exchange = getattr(job._strategy, "_exchange", None)
            line["schedule"] = exchange.number if exchange else None
            steps.write(json.dumps(line) + "\n")
            if rank == 0 and batch.step == options.get("end_at"):
                os.kill(os.getpid(), signal.SIGTERM)
    job.finish()
    torch.save(dict(job.model.state_dict()), out / f"end{rank}.pt")


def follow(job: TrainingJob, plan: dict[int, int | None]) -> None:
    """Replace the controller's orders: from each step of `plan` on its batch is ordered."""
    orders = job._reporter.orders

    def planned() -> Orders:
        begun = [at for at in plan if at <= job.steps_done]
        return dataclasses.replace(orders(), batch=plan[max(begun)] if begun else None)

    job._reporter.orders = planned  # type: ignore[method-assign]


class BatchRuns(TrainingRuns):
    """TrainingRuns that run `train` above."""

    def start(self, size: int, *, launcher: FakeLauncher | None = None, **options: Any) -> None:
        port = harness.unused_port()
        for rank in range(size):
            environment = {"OMP_NUM_THREADS": "1", "SLURM_ELASTIC_SOCKET": ""}
            if size > 1:
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if launcher is not None:
                environment["SLURM_ELASTIC_SOCKET"] = str(launcher.path)
            started = harness.PROCESSES.Process(
                target=train, args=(rank, environment, self.out, options)
            )
            started.start()
            self.ranks.append(started)

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return the steps by number: samples of all ranks together, and common values."""
        found: dict[int, dict[str, Any]] = {}
        samples: dict[int, list[int]] = defaultdict(list)
        for path in sorted(self.out.glob("steps-rank*.jsonl")):
            for line in harness.lines(path):
                samples[line["step"]] += line.pop("indices")
                assert found.setdefault(line["step"], line) == line
        return {n: found[n] | {"indices": samples[n]} for n in sorted(found)}


@pytest.fixture
def ranks(tmp_path: Path):
    started = BatchRuns(tmp_path / "run")
    yield started
    started.kill()


def plain(steps: dict[int, dict[str, Any]], optimizer: str, rule: str) -> dict[str, torch.Tensor]:
    """Train a plain loop on the same batches; check losses and rates, return the parameters."""
    points, labels = data()
    model, made, _ = parts(optimizer)
    base, position, taken = made.param_groups[0]["lr"], 0.0, 0
    for number, step in steps.items():
        order_ = Sampler(samples=SAMPLES, global_batch=1, epochs=EPOCHS, seed=3).order(
            step["epoch"]
        )
        at = order_[taken : taken + step["batch"]]
        assert sorted(step["indices"]) == sorted(at.tolist()), number
        k = max(len(at), min(step["batch"], INITIAL)) / INITIAL
        rate = base * (1 + math.cos(math.pi * int(position + 1e-4) / SCHEDULE)) / 2
        assert step["rate"] == pytest.approx(rate, rel=1e-5, abs=1e-9), number
        made.param_groups[0]["lr"] = rate * (step["gain"] if rule == "adascale" else math.sqrt(k))
        made.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(points[at]), labels[at])
        loss.backward()
        made.step()
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-5), number
        taken += len(at)
        position += step["gain"] if rule == "adascale" else len(at) / INITIAL
        if taken == SAMPLES:
            taken = 0
            position = position if rule == "adascale" else math.ceil(position - 1e-9)
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("optimizer", "rule", "workers", "parallel"),
    [("adamw", "sqrt", 1, "data"), ("sgd", "adascale", 0, "data"), ("sgd", "sqrt", 0, "pipeline")],
)
def test_a_training_with_changing_batches_equals_a_plain_loop(
    ranks, optimizer, rule, workers, parallel
) -> None:
    options = {"optimizer": optimizer, "rule": rule, "workers": workers, "micro_batch": 7,
               "elastic": f"1-4,batch=4-60,parallel={parallel}"}  # fmt: skip
    ranks.start(2, **options, plan={12: 37}, end_at=17)
    assert ranks.join() == [143, 143], ranks.log()
    # Other ranks go on with the batch that these had.
    before = len(ranks.steps())
    ranks.start(3, **options, plan={before + 3: 10**6, before + 9: 2, before + 15: 25})
    assert ranks.join() == [0] * 3, ranks.log()
    steps = ranks.steps()
    assert list(steps) == list(range(1, len(steps) + 1))
    taken = [step["batch"] for step in steps.values()]
    changes = [b for a, b in zip([0, *taken], taken, strict=False) if a != b]
    assert changes == [10, 37, 60, 4, 25]
    assert steps[before + 1]["batch"] == 37
    if parallel == "data":  # what of the exchange is exposed is measured anew for each batch
        schedules = [step["schedule"] for step in steps.values()]
        assert [b for a, b in zip([None, *schedules], schedules, strict=False) if a != b] == (
            [0, 2] * (1 + len(changes))
        ), schedules
    expected = plain(steps, optimizer, rule)
    ends = {
        name: value
        for rank in range(3)
        for name, value in torch.load(ranks.out / f"end{rank}.pt").items()
    }
    assert ends.keys() == expected.keys()
    for name, value in ends.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    log = ranks.log()
    assert log.count("a step takes 37 samples instead of 10; the learning rate") == 1
    if rule == "adascale":
        gains = {step["batch"]: step["gain"] for step in steps.values()}
        assert gains[10] == 1
        assert 1 < gains[60] <= 6


def make(out: Path, **options: Any) -> TrainingJob:
    model, optimizer, scheduler = parts("sgd")
    return init(model, torch.nn.CrossEntropyLoss(), optimizer,
                torch.utils.data.TensorDataset(*data()), scheduler=scheduler, checkpoint_dir=out,
                **{"global_batch": INITIAL, "epochs": 2, "seed": 3} | options)  # fmt: skip


def test_an_ordered_batch_is_applied_and_reported(tmp_path, launcher, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_ELASTIC", "1-4,batch=10-50")
    monkeypatch.setenv("SLURM_ELASTIC_SOCKET", str(launcher.path))
    launcher.set_orders(batch=40)
    launcher.order("run")
    job = make(tmp_path, epochs=10**6, micro_batch=15)
    for batch in job:
        job.step(batch)
        if batch.share.count == 40:
            break
    for batch in job:
        job.step(batch)
        if any(r.get("global_batch") == 40 for r in list(launcher.reports)):
            break
    job.finish()
    report = launcher.wait_for("training", global_batch=40)
    assert (report["initial_batch"], report["micro_batch"], report["accumulation"]) == (10, 14, 2)


def test_an_ordered_batch_is_ignored_without_the_directive(tmp_path) -> None:
    job = make(tmp_path)
    follow(job, {3: 40})
    counts = [batch.share.count for batch in job if job.step(batch)]
    job.finish()
    assert counts == [INITIAL] * 40


def test_one_number_in_the_directive_fixes_the_batch(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("SLURM_ELASTIC", "1-4,batch=40")
    job = make(tmp_path)
    rates: list[float] = []
    job.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    counts = [batch.share.count for batch in job if job.step(batch)]
    job.finish()
    assert counts == [40] * 10
    assert rates[0] == pytest.approx(0.1 * 2)
    assert job.scheduler.last_epoch == 40  # as many as with a batch of 10
    stderr = capfd.readouterr().err
    assert "global_batch is 10, the directive says batch=40: a step takes 40 samples" in stderr


def test_a_doubled_batch_thaws_all_layers(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("SLURM_ELASTIC", "1-4,batch=10-40,freeze=auto,max-penalty=100%")

    how = Freezing(
        criterion=FixedCriterion(1), every=1, passes=1, begin=0.0, settled=1e9, alpha=1.0
    )
    job = make(tmp_path, freeze=how, epochs=20)
    follow(job, {40: 15, 50: 30})
    frozen, batches = [], []
    for batch in job:
        job.step(batch)
        frozen.append(job.frozen)
        batches.append(batch.share.count)
    job.finish()
    assert frozen[39] == 1
    changed = batches.index(30)
    assert frozen[batches.index(15) : changed] == [1] * (changed - batches.index(15))
    assert 0 in frozen[changed : changed + 3]
    assert "all layers train again: the batch was 10, now it is 30" in capfd.readouterr().err
