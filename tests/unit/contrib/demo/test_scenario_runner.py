"""A phase begins once its condition is observed, or after its time-out."""

from dataclasses import replace

import pytest

from contrib.demo import scenario, scenario_runner
from contrib.demo.cluster_view import ClusterView, VisibleJob
from contrib.demo.demo_cluster import DemoError


class FakeCluster:
    """Cluster, watch and screen in one; each view has made ten steps since the last one."""

    def __init__(self, *, finishes: bool = True, answer: str = "") -> None:
        self.scripts: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self.view = ClusterView()
        self._finishes, self._answer = finishes, answer

    def run(self, script: str, *, user: str = "root", stdin: str = "") -> str:
        self.scripts.append((user, script))
        count = script.count("sbatch --parsable")
        ids = range(len(self.view.jobs) + 1, len(self.view.jobs) + 1 + count)
        names = [line.split("--job-name=")[1].split()[0] for line in script.splitlines()[1:]]
        jobs = {
            name: VisibleJob(job_id=i, name=name, user=user, state="RUNNING")
            for i, name in zip(ids, names, strict=True)
        }
        self.view = replace(self.view, jobs={**self.view.jobs, **jobs})
        return self._answer or "".join(f"{i}\n" for i in ids)

    def next(self) -> ClusterView:
        jobs = {
            name: replace(job, step=job.step + 10, state=self._state(job))
            for name, job in self.view.jobs.items()
        }
        self.view = ClusterView(time=self.view.time + 1, jobs=jobs)
        return self.view

    def _state(self, job: VisibleJob) -> str:
        return "COMPLETED" if self._finishes and job.step > 30 else job.state

    def decisions(self) -> list[str]:
        return ["gpt grows"] if self.view.time == 2 else []

    def announce(self, text: str, view: ClusterView) -> None:
        self.lines.append(f"» {text}")

    def log(self, text: str, view: ClusterView, *, style: str = "") -> None:
        self.lines.append(text)

    def show(self, view: ClusterView) -> None:
        pass


@pytest.fixture
def impatient(monkeypatch):
    clock = iter(range(10000))
    monkeypatch.setattr(scenario_runner.time, "monotonic", lambda: next(clock))


def run(
    cluster: FakeCluster, chosen: scenario.Scenario, *, forgetful: bool = False
) -> scenario_runner.ScenarioRunner:
    runner = scenario_runner.ScenarioRunner(cluster, chosen, cluster, cluster, forgetful=forgetful)
    runner.run()
    return runner


def test_it_carries_out_all_phases(impatient):
    cluster = FakeCluster()
    runner = run(cluster, scenario.short(kill=True))
    assert runner.missed == []
    assert runner.ids == {"etl": 1, "sim": 2, "night": 3, "gpt": 4}
    assert [user for user, _ in cluster.scripts] == ["bob", "alice", "bob", "alice", "bob"]
    assert cluster.scripts[3][1] == "scancel 4"
    assert cluster.lines[0] == "» bob's jobs leave one a100"
    assert "controller: gpt grows" in cluster.lines


def test_it_goes_on_without_what_never_comes(impatient):
    cluster = FakeCluster(finishes=False)
    runner = run(cluster, scenario.short(kill=True))
    assert runner.missed == ["gpt to train on 2 GPUs", "gpt to complete", "all jobs to end"]
    assert "after 120 s no longer waiting for gpt to complete" in cluster.lines


def test_an_answer_of_sbatch_that_is_no_id(impatient):
    with pytest.raises(DemoError, match="sbatch answered 'what'"):
        run(FakeCluster(answer="what"), scenario.short())


def test_the_bug_is_in_the_script_that_runs(impatient):
    cluster = FakeCluster()
    run(cluster, scenario.short(), forgetful=True)
    command = next(script for user, script in cluster.scripts if user == "alice")
    assert "EXAMPLES=/shared/scratch/demo/broken" in command
    assert "--samples 2048 --epochs 4" in command


def test_the_reference_trains_the_same():
    script = scenario_runner.reference_script(scenario.full())
    for name, training in scenario.full().trainings.items():
        assert f"reference/{name} {training.arguments}" in script
