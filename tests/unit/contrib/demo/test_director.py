"""The director waits for what an act needs to see, but not for ever."""

from dataclasses import replace

import pytest

from contrib.demo import director, scene
from contrib.demo.errors import DemoError
from contrib.demo.view import Seen, View


class Stage:
    """Cluster, watch and screen in one: every second something goes on."""

    def __init__(self, *, finishes: bool = True, answer: str = "") -> None:
        self.scripts: list[tuple[str, str]] = []
        self.told: list[str] = []
        self.view = View()
        self._finishes, self._answer = finishes, answer

    def run(self, script: str, *, user: str = "root", stdin: str = "") -> str:
        self.scripts.append((user, script))
        count = script.count("sbatch --parsable")
        ids = range(len(self.view.jobs) + 1, len(self.view.jobs) + 1 + count)
        names = [line.split("--job-name=")[1].split()[0] for line in script.splitlines()[1:]]
        jobs = {
            name: Seen(job_id=i, name=name, user=user, state="RUNNING")
            for i, name in zip(ids, names, strict=True)
        }
        self.view = replace(self.view, jobs={**self.view.jobs, **jobs})
        return self._answer or "".join(f"{i}\n" for i in ids)

    def next(self) -> View:
        jobs = {
            name: replace(job, step=job.step + 10, state=self._state(job))
            for name, job in self.view.jobs.items()
        }
        self.view = View(time=self.view.time + 1, jobs=jobs)
        return self.view

    def _state(self, job: Seen) -> str:
        return "COMPLETED" if self._finishes and job.step > 30 else job.state

    def decisions(self) -> list[str]:
        return ["gpt grows"] if self.view.time == 2 else []

    def announce(self, text: str, view: View) -> None:
        self.told.append(f"» {text}")

    def tell(self, text: str, view: View, *, style: str = "") -> None:
        self.told.append(text)

    def show(self, view: View) -> None:
        pass


@pytest.fixture
def impatient(monkeypatch):
    clock = iter(range(10000))
    monkeypatch.setattr(director.time, "monotonic", lambda: next(clock))


def play(stage: Stage, what: scene.Scene, *, forgetful: bool = False) -> director.Director:
    found = director.Director(stage, what, stage, stage, forgetful=forgetful)
    found.play()
    return found


def test_it_plays_all_acts(impatient):
    stage = Stage()
    found = play(stage, scene.short(kill=True))
    assert found.missed == []
    assert found.ids == {"etl": 1, "sim": 2, "night": 3, "gpt": 4}
    assert [user for user, _ in stage.scripts] == ["bob", "alice", "bob", "alice", "bob"]
    assert stage.scripts[3][1] == "scancel 4"
    assert stage.told[0] == "» bob's jobs leave one a100"
    assert "controller: gpt grows" in stage.told


def test_it_goes_on_without_what_never_comes(impatient):
    stage = Stage(finishes=False)
    found = play(stage, scene.short(kill=True))
    assert found.missed == ["gpt to train on 2 GPUs", "gpt to complete", "all jobs to be over"]
    assert "after 120 s no longer waiting for gpt to complete" in stage.told


def test_an_answer_of_sbatch_that_is_no_id(impatient):
    with pytest.raises(DemoError, match="sbatch answered 'what'"):
        play(Stage(answer="what"), scene.short())


def test_the_bug_is_in_the_script_that_runs(impatient):
    stage = Stage()
    play(stage, scene.short(), forgetful=True)
    command = next(script for user, script in stage.scripts if user == "alice")
    assert "EXAMPLES=/shared/scratch/demo/broken" in command
    assert "--samples 2048 --epochs 4" in command


def test_the_reference_trains_the_same():
    script = director.reference_script(scene.full())
    for name, training in scene.full().trainings.items():
        assert f"reference/{name} {training.arguments}" in script
