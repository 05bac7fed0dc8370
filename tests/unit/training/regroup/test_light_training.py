"""The light training says to esrun what a training of the library says, in the same order."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.container_cluster.light_trainings import PROGRAM, expected_steps
from tests.support.patience import PATIENCE_S
from tests.support.trainings.member_faults import MemberFault
from tests.support.trainings.training_runs import FakeLauncher, TrainingRuns, unused_port

#: Functions of the library before which a rank that joins dies, and moments of a light one.
MOMENTS = {
    "slurm_elastic.training.regroup.regrouping:GroupMember._form": "prepare",
    "slurm_elastic.training.regroup.live_training:LiveTraining.take_over": "turn",
}
ROOT = Path(__file__).parents[4]
STEPS = 60
OPTIONS = {"epochs": STEPS // 6, "step_s": 0.05}


class LightRuns(TrainingRuns):
    """Attempts of one light training."""

    def start(self, size: int, *, launcher: FakeLauncher | None = None, **_: Any) -> None:
        port = unused_port()
        for rank in range(size):
            environment = {"SLURM_ELASTIC_SOCKET": str(launcher.path) if launcher else ""}
            if size > 1:
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self.ranks.append(self._rank(environment))

    def start_companion(self, job: int, size: int, *, port: int, **options: Any) -> list[Any]:
        started = []
        for fault in options.get("faults", ()):
            (self.out / "die").write_text(MOMENTS[fault.function])
        for task in range(size):
            environment = {"SLURM_ELASTIC_JOIN": str(job), "SLURM_PROCID": str(task)}
            environment |= {"RANK": str(10 * job + task), "WORLD_SIZE": "999"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            started.append(self._rank(environment))
        self.ranks += started
        return started

    def _rank(self, environment: dict[str, str]) -> "_Rank":
        words = ["--out", str(self.out), "--samples", "72", "--epochs", str(OPTIONS["epochs"])]
        words += ["--global-batch", "12", "--step", str(OPTIONS["step_s"])]
        command = [sys.executable, "-m", PROGRAM, *words, "--checkpoint-every", "600"]
        with (self.out / "rank0.err").open("a") as log:
            process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
                stderr=log,
            )
        return _Rank(process)


class _Rank:
    """A process with the interface of `multiprocessing.Process`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid, self.terminate, self.kill = process.pid, process.terminate, process.kill

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


Scenario = Callable[[TrainingRuns, FakeLauncher], None]


def begin(runs: TrainingRuns, launcher: FakeLauncher, size: int) -> int:
    launcher.set_companions({})
    runs.start(size, launcher=launcher, **OPTIONS)
    return int(launcher.wait_for_group(can=True)["port"])


def wait_for_measured_steps(runs: TrainingRuns) -> None:
    """Wait until the library has measured steps: two warm it up, and it reports three or more."""
    runs.wait_for_step(max(runs.losses(), default=0) + 8)


def grows_saves_and_shrinks(runs: TrainingRuns, launcher: FakeLauncher) -> None:
    port = begin(runs, launcher, 2)
    runs.start_companion(4711, 2, port=port, **OPTIONS)
    runs.start_companion(4712, 1, port=port, **OPTIONS)
    launcher.set_companions({"4711": 2, "4712": 1})
    launcher.wait_for_group(generation=1)
    launcher.order("notice", notice=5)
    launcher.wait_for("saved", notice=5)
    launcher.order("resume")
    launcher.set_companions({"4712": 1})
    launcher.wait_for_group(generation=2)


def loses_a_companion(runs: TrainingRuns, launcher: FakeLauncher) -> None:
    port = begin(runs, launcher, 1)
    first, _ = runs.start_companion(4711, 2, port=port, **OPTIONS)
    launcher.set_companions({"4711": 2})
    launcher.wait_for_group(generation=1)
    first.kill()
    launcher.wait_for_group(lost=["4711"])


def a_companion_gets_sigterm(runs: TrainingRuns, launcher: FakeLauncher) -> None:
    port = begin(runs, launcher, 1)
    (rank,) = runs.start_companion(4711, 1, port=port, **OPTIONS)
    launcher.set_companions({"4711": 1})
    launcher.wait_for_group(generation=1)
    # Before its first step with the others it would end at once, with another exit code.
    runs.wait_for_step(max(runs.losses(), default=0) + 3)
    rank.terminate()
    launcher.wait_for_group(lost=["4711"])


def is_not_desired_any_more(runs: TrainingRuns, launcher: FakeLauncher) -> None:
    """One of two companions does not come; the controller gives it up."""
    port = begin(runs, launcher, 1)
    runs.start_companion(4711, 1, port=port, **OPTIONS)
    launcher.set_companions({"4711": 1, "4712": 1})
    runs.wait_for_step(max(runs.losses(), default=0) + 3)
    launcher.set_companions({"4711": 1})
    launcher.wait_for_group(companions={"4711": 1})


def newcomer_dies(runs: TrainingRuns, launcher: FakeLauncher, function: str) -> None:
    port = begin(runs, launcher, 2)
    faults = [MemberFault(rank=47110, function=function)]
    (rank,) = runs.start_companion(4711, 1, port=port, faults=faults, **OPTIONS)
    launcher.set_companions({"4711": 1})
    rank.join(PATIENCE_S)
    step = max(runs.losses(), default=0)
    runs.wait_for_step(step + 3)
    launcher.set_companions({})


def is_ended_by_slurm(runs: TrainingRuns, launcher: FakeLauncher) -> None:
    port = begin(runs, launcher, 2)
    runs.start_companion(4711, 1, port=port, **OPTIONS)
    launcher.set_companions({"4711": 1})
    launcher.wait_for_group(generation=1)
    wait_for_measured_steps(runs)
    for rank in runs.ranks[:2]:
        rank.terminate()


def loses_a_rank_of_the_base(runs: TrainingRuns, launcher: FakeLauncher) -> None:
    port = begin(runs, launcher, 2)
    runs.start_companion(4711, 1, port=port, **OPTIONS)
    launcher.set_companions({"4711": 1})
    launcher.wait_for_group(generation=1)
    wait_for_measured_steps(runs)
    runs.ranks[1].kill()


def may_not_change(runs: TrainingRuns, launcher: FakeLauncher) -> None:
    runs.start(2, launcher=launcher, **OPTIONS)


@pytest.fixture
def light(tmp_path: Path) -> Iterator[LightRuns]:
    runs = LightRuns(tmp_path / "light")
    yield runs
    runs.kill()


def said(runs: TrainingRuns, launcher: FakeLauncher, scenario: Scenario) -> dict[str, Any]:
    """Run a scenario; return all that was said to esrun, without times and steps, and the codes."""
    try:
        scenario(runs, launcher)
        codes = runs.join()
    finally:
        launcher.close()
    phases = [(r["phase"], r.get("notice"), r.get("exit_code")) for r in launcher.reports]
    group = [
        {k: v for k, v in line.items() if k not in ("step", "pause_s", "port")}
        for line in launcher.group
    ]
    if scenario is loses_a_companion:
        group = list(without_dropped_attempt(group))
    return {
        "codes": codes,
        "phases": [p for p, before in zip(phases, [None, *phases], strict=False) if p != before],
        "group": group,
        "fields": sorted({name for report in launcher.reports for name in report}),
    }


def without_dropped_attempt(group: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leave out a generation that was dropped as a member was lost, and its number.

    Whether a loss is seen before or after the next generation is begun depends on the moment.
    """
    dropped = 0
    for line in group:
        if line.get("why") == "a member is lost":
            dropped += 1
        elif "generation" in line:
            yield line | {"generation": line["generation"] - dropped}
        else:
            yield line


#: Fields that the library measures, or knows of its model, and a light training does not have.
MEASURED = (
    *("supported_options", "weight_bytes", "optimizer_bytes", "gpu_bytes"),
    *("exchange", "exposed", "exchange_s", "exchange_bytes"),
    *("data_s", "forward_s", "backward_s", "sync_s", "optimizer_s", "peak_memory_bytes"),
    *("profile", "profile_batch", "micro_step_s", "grad_sqr", "grad_var"),
)


@pytest.mark.parametrize(
    "scenario",
    [
        grows_saves_and_shrinks,
        loses_a_companion,
        a_companion_gets_sigterm,
        is_not_desired_any_more,
        is_ended_by_slurm,
        loses_a_rank_of_the_base,
        may_not_change,
        *(partial(newcomer_dies, function=function) for function in MOMENTS),
    ],
    ids=lambda scenario: getattr(scenario, "__name__", "newcomer_dies"),
)
def test_it_says_what_the_library_says(
    runs: TrainingRuns, light: LightRuns, tmp_path: Path, scenario: Scenario
) -> None:
    library = said(runs, FakeLauncher(tmp_path / "esrun"), scenario)
    own = said(light, FakeLauncher(tmp_path / "esrun-light"), scenario)
    assert {k: v for k, v in own.items() if k != "fields"} == {
        k: v for k, v in library.items() if k != "fields"
    }
    assert set(library["fields"]) - set(MEASURED) == set(own["fields"])


def test_its_steps_do_not_depend_on_the_ranks(light: LightRuns, tmp_path: Path) -> None:
    launcher = FakeLauncher(tmp_path / "esrun")
    try:
        loses_a_companion(light, launcher)
        assert light.join()[:1] == [0], light.log()
    finally:
        launcher.close()
    expected = expected_steps(72, int(OPTIONS["epochs"]), 12)
    assert light.losses() == {n: loss for n, (_, loss) in enumerate(expected, start=1)}


def test_it_is_started_again_when_all_its_steps_are_done(light: LightRuns) -> None:
    for _ in range(2):
        light.start(2)
        assert light.join() == [0, 0], light.log()
    assert sorted(light.losses()) == list(range(1, STEPS + 1))
