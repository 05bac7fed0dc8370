"""Fixtures of the training library's tests, all of which need torch."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.needs import require

require("python/torch")

import torch  # noqa: E402

from tests.support.trainings.training_runs import FakeLauncher, TrainingRuns  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.torch)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[TrainingRuns]:
    """Yield a training run; its ranks are killed after the test."""
    started = TrainingRuns(tmp_path / "run")
    yield started
    started.kill()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[FakeLauncher]:
    """Yield a fake launcher in place of esrun."""
    fake = FakeLauncher(tmp_path / "socket")
    yield fake
    fake.close()
