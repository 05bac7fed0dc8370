"""Steps after which ranks exchange their requests."""

from typing import Any

import pytest
import torch

from slurm_elastic.training.loop.step_boundary import StepBoundary, UnequalWeightsError
from slurm_elastic.training.regroup.loop_changes import LoopChanges
from slurm_elastic.training.sampler import Cursor
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.step_requests import StepRequests


class Group:
    """Two ranks of which the other has no requests."""

    rank, size, companion = 0, 2, ""

    def __init__(self) -> None:
        self.exchanges = 0
        self.difference = 0.0

    def total(self, values: list[float]) -> list[float]:
        self.exchanges += 1
        return values

    def differs(self, values: torch.Tensor) -> float:
        return self.difference


class Requests:
    """Requests of one rank."""

    def __init__(self) -> None:
        self.stop = False
        self.carried_out: list[tuple[int, float]] = []

    def collect(self, *, restart: bool) -> StepRequests:
        assert not restart
        return StepRequests(stop=self.stop)

    def carry_out(self, cursor: Cursor, agreed: StepRequests) -> None:
        self.carried_out.append((cursor.step, agreed.stop))


class Ignored:
    """A manager or reporter without effect."""

    timer: Any

    def __init__(self) -> None:
        self.timer = self

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Run:
    """Steps of a given length."""

    def __init__(self, step_s: float, *, every_step: bool = False, modules: Any = None) -> None:
        self.group, self.requests = Group(), Requests()
        self.now, self._step_s, self._step = 0.0, step_s, 0
        ignored: Any = Ignored()
        group: Any = self.group
        requests: Any = self.requests
        signals = Signals()
        changes = LoopChanges(group, signals=signals, enabled=False)
        changes.attach(ignored, reporter=ignored, save=ignored)
        self._boundary = StepBoundary(
            control_group=group,
            requests=requests,
            checkpoint_manager=ignored,
            reporter=ignored,
            signals=signals,
            modules=modules or {},
            sharded=False,
            resumed_from=None,
            restore_s=None,
            every_step=every_step,
            changes=changes,
            clock=lambda: self.now,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.now += self._step_s
            self._step += 1
            self._boundary.pass_over(Cursor(self._step, 0, 0))


def test_long_steps_exchange_after_each() -> None:
    run = Run(0.2)
    run.steps(50)
    assert run.group.exchanges == 50


def test_short_steps_exchange_about_every_tenth_of_a_second() -> None:
    run = Run(0.002)
    run.steps(1000)  # two seconds
    assert 15 <= run.group.exchanges <= 30


def test_a_request_waits_at_most_a_tenth_of_a_second_and_a_step() -> None:
    run = Run(0.002)
    run.steps(200)
    run.requests.stop = True
    before = run.now
    while not any(stop for _, stop in run.requests.carried_out):
        run.steps(1)
    assert run.now - before <= 0.1 + 2 * 0.002


def test_steps_without_measurable_time_exchange_now_and_then() -> None:
    run = Run(0.0)
    run.steps(1000)
    assert run.group.exchanges >= 10


def test_every_step_exchanges_where_each_is_saved() -> None:
    run = Run(0.001, every_step=True)
    run.steps(100)
    assert run.group.exchanges == 100


def test_ranks_with_other_weights_are_found_in_the_first_steps() -> None:
    run = Run(0.2, modules={"critic": torch.nn.Linear(3, 2)})
    run.group.difference = 1e-9  # rounding on another GPU
    run.steps(2)
    run.group.difference = 0.01
    with pytest.raises(UnequalWeightsError, match="critic: the weights of the ranks"):
        run.steps(1)
