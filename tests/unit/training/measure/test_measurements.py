"""Measurements of a job: times of a step's parts, and gradient noise."""

import doctest
import json
import time

import pytest
import torch

from slurm_elastic.core.layers import Layer
from slurm_elastic.core.report import Report
from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointDirectory
from slurm_elastic.training.measure import gradient_noise as noises
from slurm_elastic.training.measure.gradient_noise import (
    ConsecutiveSteps,
    GradientNoise,
    squared_norm,
)
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.measure.memory_sizes import gpu_bytes, optimizer_bytes, peak_memory
from slurm_elastic.training.measure.memory_sizes import weight_bytes as bytes_of_weights
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.measure.step_times import (
    CLOSELY,
    EVERY,
    SELDOM,
    SOON,
    WARM_UP,
    Phases,
    StepDurations,
    StepParts,
    StepTimer,
)
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.reporting import Reporter
from tests.support.trainings.training_runs import LABELS, WIDTH, FakeLauncher, TrainingRuns

DIMENSIONS = 400
#: |G|^2 and the trace of a sample's covariance: the true values of what is estimated.
SQR, TRACE = 4.0, float(DIMENSIONS)


def sample_gradients(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return gradients of single samples, shape (count, DIMENSIONS)."""
    true = torch.full((DIMENSIONS,), (SQR / DIMENSIONS) ** 0.5)
    return true + torch.randn(count, DIMENSIONS, generator=generator)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def steps(timer: StepTimer, now: list[float], durations, **parts) -> None:
    for duration in durations:
        now[0] += duration
        if parts:
            timer.parts(StepParts(**parts))
        timer.end()


def micro(timer: StepTimer) -> tuple[float, int, float | None]:
    taken = timer.take()
    assert taken is not None
    return taken.step_s, taken.steps, taken.micro_step_s


def test_a_micro_step_is_the_mean_pass_or_the_step_without_its_all_reduce(now) -> None:
    timer = StepTimer()
    passes = {"forward_s": 0.6, "backward_s": 1.2, "sync_s": 0.5}
    steps(timer, now, [9.0, 9.0, 2.0, 2.0, 2.0], **passes)
    assert micro(timer) == (2.0, 3, 1.5)
    steps(timer, now, [2.0] * 3, **passes, micro_batches=4)
    assert micro(timer) == (2.0, 3, pytest.approx(0.45))
    steps(timer, now, [2.0] * 3)
    assert timer.take() == StepDurations(2.0, 3, None)


def test_a_micro_step_stays_positive_where_the_all_reduce_takes_longer(now) -> None:
    timer = StepTimer()
    steps(timer, now, [1.0] * 5, forward_s=0.1, sync_s=5.0)
    assert micro(timer)[2] == pytest.approx(0.01)


def test_the_micro_step_of_a_pipeline_is_a_whole_pass(now) -> None:
    timer = StepTimer()
    passes = {"forward_s": 0.6, "backward_s": 1.2, "sync_s": 0.5, "micro_batches": 4}
    steps(timer, now, [9.0, 9.0, 2.0, 2.0, 2.0], **passes, reduce_s=0.25)
    assert micro(timer) == (2.0, 3, 1.75)
    steps(timer, now, [2.0] * 3, **passes, reduce_s=0.0)
    assert micro(timer) == (2.0, 3, 2.0)


def test_parts_are_medians_and_a_step_without_samples_has_no_passes(now) -> None:
    timer = StepTimer()
    steps(timer, now, [1.0] * 3, forward_s=1.0, backward_s=2.0, sync_s=3.0, optimizer_s=4.0)
    steps(timer, now, [1.0], forward_s=1.0, backward_s=2.0, sync_s=7.0)
    steps(timer, now, [1.0] * 2, sync_s=7.0, micro_batches=0)
    taken = timer.take()
    assert taken is not None
    found = (taken.forward_s, taken.backward_s, taken.sync_s, taken.optimizer_s)
    assert found == (1.0, 2.0, 5.0, 4.0)
    steps(timer, now, [1.0] * 3)
    assert timer.take() == StepDurations(1.0, 3, None)


def test_steps_longer_than_the_time_between_reports_are_measured_over_several(now) -> None:
    timer = StepTimer()
    steps(timer, now, [9.0, 9.0])
    for _ in range(2):
        for _ in range(2):
            steps(timer, now, [60.0], forward_s=20.0, backward_s=30.0, sync_s=10.0)
            assert timer.take() is None
        steps(timer, now, [60.0], forward_s=20.0, backward_s=30.0, sync_s=10.0)
        assert micro(timer) == (60.0, 3, 50.0)


def test_waiting_for_the_loader_is_timed(now) -> None:
    def load():
        for seconds in (50.0, 60.0, 0.5, 0.25, 0.5):
            now[0] += seconds
            yield seconds

    timer = StepTimer()
    for _ in timer.waiting(load()):
        now[0] += 2.0
        timer.end()
    taken = timer.take()
    assert taken is not None
    assert (taken.step_s, taken.data_s) == (2.5, 0.5)  # the first two steps do not count


def test_time_in_one_phase_adds_up(now) -> None:
    phases = Phases(torch.device("cpu"))
    for name, seconds in (("forward", 1.0), ("", 5.0), ("backward", 2.0), ("forward", 1.5)):
        phases.enter(name)
        now[0] += seconds
    phases.enter("")
    assert phases.ready
    assert phases.totals() == {"forward": 2.5, "backward": 2.0, "": 5.0}


def test_peak_memory_is_the_largest_so_far() -> None:
    before = peak_memory(torch.device("cpu"))
    torch.ones(2**24)  # 64 MiB, gone at once
    after = peak_memory(torch.device("cpu"))
    assert before
    assert after
    assert after >= max(before, 2**26)


def test_state_of_an_optimizer_that_holds_a_part_is_that_of_the_whole_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    weights = bytes_of_weights(model)
    assert weights == 2 * (64 + 8) * 4
    optimizer = torch.optim.Adam(model[0].parameters())
    assert optimizer_bytes(optimizer, weights) is None
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state = optimizer_bytes(optimizer, weights)
    assert state is not None
    assert 2 * weights <= state < 2.1 * weights
    assert gpu_bytes(torch.device("cpu")) is None


def test_few_steps_are_sampled() -> None:
    timer, looked = StepTimer(), []
    for step in range(500):
        if timer.sampled:
            looked.append(step - WARM_UP)
        timer.end()
    assert looked[:CLOSELY] == list(range(CLOSELY))
    rest = looked[CLOSELY:]
    assert [s for s in rest if s <= SOON] == list(range(EVERY, SOON + 1, EVERY))
    assert [s for s in rest if s > SOON] == list(range(SOON + SELDOM, 500 - WARM_UP, SELDOM))
    timer.on = False
    assert not timer.sampled


@pytest.mark.parametrize(("small", "large"), [(8, 64), (16, 32), (1, 1000)])
def test_two_batch_sizes_give_norm_and_variance(small: int, large: int) -> None:
    generator = torch.Generator().manual_seed(small)
    noise = GradientNoise(initial_batch=50)
    for _ in range(300):
        samples = sample_gradients(large, generator)
        noise.add(
            small=float(samples[:small].mean(0).square().sum()),
            small_batch=small,
            large=float(samples.mean(0).square().sum()),
            large_batch=large,
        )
    fields = noise.fields()
    assert fields["grad_var"] == pytest.approx(TRACE / 50, rel=0.1)
    assert fields["grad_sqr"] == pytest.approx(SQR, abs=TRACE / large / 2 + 0.5)


def test_consecutive_steps_give_norm_and_variance() -> None:
    generator = torch.Generator().manual_seed(1)
    noise = GradientNoise(initial_batch=64)
    pairs = ConsecutiveSteps(noise)
    for step in range(600):
        mean = sample_gradients(64, generator).mean(0)
        pairs.observe([mean[:100], mean[100:]], 64, keep=step % 2 == 0)
    fields = noise.fields()
    assert fields["grad_var"] == pytest.approx(TRACE / 64, rel=0.1)
    assert fields["grad_sqr"] == pytest.approx(SQR, rel=0.15)


def test_steps_of_different_sizes_are_not_compared() -> None:
    noise = GradientNoise(initial_batch=64)
    pairs = ConsecutiveSteps(noise)
    for step in range(40):
        pairs.observe([torch.ones(3)], 64 + step % 2, keep=True)
    assert noise.fields() == {}


def test_examples_in_the_docstring_hold() -> None:
    assert doctest.testmod(noises).failed == 0


def test_gradient_noise_is_restored_after_a_resize() -> None:
    noise, other = GradientNoise(initial_batch=8), GradientNoise(initial_batch=8)
    for small in (3.0, 3.5, 2.5) * 4:
        noise.add(small=small, small_batch=8, large=1.5, large_batch=32)
    other.restore(json.loads(json.dumps(noise.state())))
    assert other.fields() == noise.fields() != {}
    for one in (noise, other):
        one.add(small=4.0, small_batch=4, large=1.5, large_batch=32)
    assert other.fields() == noise.fields()


@pytest.mark.parametrize(
    "bad",
    [None, [], {}, {"sqr": "x"}, {"sqr": 1.0, "trace": float("nan"), "weight": 1.0, "count": 9}],
)
def test_an_invalid_noise_state_is_ignored(bad) -> None:
    noise = GradientNoise(initial_batch=8)
    noise.restore(bad)
    noise.restore(GradientNoise(initial_batch=8).state())
    assert noise.fields() == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_an_overflow_is_ignored(bad: float) -> None:
    noise = GradientNoise(initial_batch=8)
    for small in (3.0, bad) * 10:
        noise.add(small=small, small_batch=8, large=1.5, large_batch=32)
    assert noise.fields() == {"grad_sqr": 1.0, "grad_var": 2.0}


def test_a_negative_estimate_of_the_norm_is_reported_as_zero() -> None:
    noise = GradientNoise(initial_batch=8)
    for _ in range(20):
        noise.add(small=4.0, small_batch=8, large=0.5, large_batch=32)
    assert noise.fields()["grad_sqr"] == 0.0


def test_half_precision_does_not_overflow() -> None:
    assert float(squared_norm([torch.full((4,), 300.0, dtype=torch.float16)])) == 360000.0


@pytest.mark.parametrize("pieces", [1, 4])
def test_step_profiler_measures_times_and_noise(pieces: int) -> None:
    """Use one rank, with and without micro-batches; the gradient is the mean of the inputs."""
    generator = torch.Generator().manual_seed(pieces)
    weights = torch.nn.Parameter(torch.zeros(DIMENSIONS))
    timer, noise = StepTimer(), GradientNoise(initial_batch=32)
    watch = StepProfiler(timer=timer, noise=noise, parameters=[weights], rank_group=RankGroup())
    for _ in range(1500):
        weights.grad = None
        watch.begin()
        for part in sample_gradients(32, generator).chunk(pieces):
            watch.forward()
            summed = (part @ weights).sum()
            watch.backward()
            summed.backward()
            watch.micro_batch_done(len(part))
        small, inverse = watch.reducing()
        assert weights.grad is not None
        weights.grad.div_(32)
        watch.reduced([float(small), inverse], 32)
        watch.optimizing()
        weights.grad.zero_()  # as clipping may: what was kept is a copy
        watch.end()
        timer.end()
    taken = timer.take()
    assert taken is not None
    parts = [taken.forward_s, taken.backward_s, taken.sync_s, taken.optimizer_s]
    assert None not in parts
    assert sum(parts[:2]) > 0
    fields = noise.fields()
    assert fields["grad_var"] == pytest.approx(TRACE / 32, rel=0.2)
    assert fields["grad_sqr"] == pytest.approx(SQR, rel=0.5)


@pytest.mark.parametrize(
    ("world", "micro_batch", "expected"),
    [(1, None, (64, 0)), (3, None, (22, 0)), (1, 20, (16, 3)), (2, 8, (8, 3)), (100, 8, (1, 0))],
)
def test_reports_contain_micro_batch_and_accumulation(world: int, micro_batch, expected) -> None:
    fields = Reporter(
        rank=1, world_size=world, global_batch=64, micro_batch=micro_batch
    )._common_fields
    assert (fields["micro_batch"], fields["accumulation"]) == expected
    assert fields.get("max_micro_batch") == micro_batch


@pytest.mark.parametrize(("size", "micro_batch"), [(1, None), (2, None), (2, 3)])
def test_reports_contain_the_measurements(
    runs: TrainingRuns, launcher: FakeLauncher, size: int, micro_batch: int | None
) -> None:
    runs.run(size, launcher=launcher, micro_batch=micro_batch, step_s=0.01)
    measured = [r for r in launcher.reports if r.get("micro_step_s")]
    last = [r for r in launcher.reports if r["phase"] == "training"][-1]
    assert measured
    assert all(0 < r["micro_step_s"] <= r["step_time_s"] for r in measured)
    for name in ("data_s", "forward_s", "backward_s", "sync_s", "optimizer_s"):
        assert all(0 <= r[name] <= r["step_time_s"] * 10 for r in measured), name
    assert all(r["peak_memory_bytes"] > 2**20 for r in measured)
    # A ring of two ranks: each passes on as many bytes as the gradients have.
    gradients = 4 * ((WIDTH + 1) * 16 + 17 * LABELS) if size > 1 else 0
    assert all(gradients <= r["exchange_bytes"] <= gradients + 500 * (size - 1) for r in measured)
    assert all(Report.from_wire({"job_id": 1, "run": 0} | r) for r in launcher.reports)
    assert last["initial_batch"] == last["global_batch"] == 12
    assert last["micro_batch"] * size * (last["accumulation"] + 1) == 12
    if size > 1:  # one rank sees fewer pairs than it wants in so short a run
        assert last["grad_var"] > 0


@pytest.mark.parametrize("size", [1, 2])
def test_the_layer_profile_is_reported_and_saved(
    runs: TrainingRuns, launcher: FakeLauncher, size: int
) -> None:
    runs.run(size, launcher=launcher, step_s=0.01)
    reports = [r for r in launcher.reports if "profile" in r]
    assert len(reports) == 1
    assert reports[0]["profile_batch"] == 12 // size
    rows = {row[0]: row for row in reports[0]["profile"]}
    assert list(rows) == ["front", "act", "drop", "back"]
    assert rows["front"][3:] == [12 // size * 16 * 4, 7 * 16 * 4]
    kept = CheckpointDirectory(runs.out / "ckpt", keep=1, log=lambda _: None).newest()
    assert kept is not None
    measured = MeasuredLayers.restored(kept.kept["profile"])
    assert measured is not None
    assert [layer.name for layer in measured.layers] == list(rows)
    assert "the layer profile" not in runs.log()


def test_a_layer_profile_above_the_limit_is_not_reported(
    launcher: FakeLauncher, monkeypatch
) -> None:
    monkeypatch.setenv("SLURM_ELASTIC_SOCKET", str(launcher.path))
    reporter = Reporter(rank=0, world_size=1, global_batch=8)
    reporter.orders(wait_s=60.0)  # which say to report every step
    many = MeasuredLayers(4, tuple(Layer(f"layer{n}", 1.0, 1.0, 1, 1) for n in range(1001)))
    assert "at most 1000 layers" in reporter.profile(many)
    reporter.timer.end()
    reporter.training(step=1, progress=0.5, checkpoint={})
    assert reporter.profile(MeasuredLayers(4, many.layers[:2])) == ""
    reporter.training(step=2, progress=0.5, checkpoint={})
    reporter.training(step=3, progress=0.5, checkpoint={})
    reporter.ended(step=3, progress=1.0, code=0, checkpoint={})
    launcher.wait_for("ended")
    assert [r["step"] for r in launcher.reports if "profile" in r] == [2]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_stages_report_their_times_and_layers(
    runs: TrainingRuns, launcher: FakeLauncher, schedule: str
) -> None:
    directive = "1-2,parallel=pipeline"
    runs.run(2, launcher=launcher, step_s=0.01, directive=directive, schedule=schedule)
    assert runs.layouts() == ["1x2"]
    measured = [r for r in launcher.reports if r.get("forward_s")]
    assert measured
    for name in ("backward_s", "sync_s", "optimizer_s", "data_s"):
        assert all(r[name] > 0 for r in measured), name
    assert all(0 < r["micro_step_s"] <= r["step_time_s"] for r in measured)
    for r in measured:
        # Four times as many micro-batches as the pipeline holds, of the whole batch.
        assert (r["micro_batch"], r["accumulation"], r["micro_batches"]) == (12, 0, 8)
        assert Report.from_wire({"job_id": 1, "run": 0} | r).micro_batches == 8
    reports = [r for r in launcher.reports if "profile" in r]
    assert [row[0] for row in reports[0]["profile"]] == ["front", "act", "drop", "back"]
