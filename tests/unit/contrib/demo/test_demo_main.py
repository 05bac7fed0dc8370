"""From the command line to the exit code, with a `cluster` command that only pretends."""

import stat

import pytest

from contrib.demo import __main__ as demo
from contrib.demo import cluster


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Replace contrib/cluster/cluster by a shell script; it gets `--name NAME VERB …`."""

    def replace(script: str) -> None:
        command = tmp_path / "cluster"
        command.write_text(f'#!/bin/sh\necho "$3" >>{tmp_path}/verbs\n{script}\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(cluster, "_COMMAND", command)

    monkeypatch.chdir(tmp_path)
    return replace


def verbs(tmp_path) -> list[str]:
    return (tmp_path / "verbs").read_text().split()


def test_without_docker(pretend, capfd):
    pretend("echo 'cluster: Docker is missing' >&2; exit 3")
    assert demo.main([]) == 3
    assert capfd.readouterr().err == "cluster: Docker is missing\n"


def test_a_cluster_that_is_in_use_is_left_alone(pretend, capfd, tmp_path):
    pretend('[ "$3" = exec ] && echo train; exit 0')
    assert demo.main(["--name", "mine"]) == 1
    out = capfd.readouterr()
    assert out.err.startswith("demo: cluster mine is up and runs 1 jobs: take it down first")
    assert verbs(tmp_path) == ["status", "exec"]


@pytest.mark.parametrize(("options", "last"), [([], "down"), (["--keep"], "exec")])
def test_what_fails_on_the_cluster_is_one_line(pretend, capfd, tmp_path, options, last):
    pretend('case $3 in status) exit 1;; exec) echo "no space left" >&2; exit 1;; esac')
    assert demo.main(options) == 1
    assert capfd.readouterr().err == "demo: `install …` failed on the cluster: no space left\n"
    assert verbs(tmp_path)[-1] == last


def test_a_directory_that_is_somebody_elses(pretend, capfd, tmp_path):
    pretend("exit 0")
    (tmp_path / "thesis" / "jobs").mkdir(parents=True)
    assert demo.main(["--out", "thesis"]) == 1
    assert "thesis/jobs is not the demo's" in capfd.readouterr().err


def test_a_directory_that_cannot_be(pretend, capfd, tmp_path):
    pretend("exit 0")
    (tmp_path / "file").touch()
    assert demo.main(["--out", "file"]) == 1
    assert capfd.readouterr().err == "demo: file: File exists; choose another --out\n"


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_follows_the_verdict(monkeypatch, capfd, good, code):
    monkeypatch.setattr(demo, "perform", lambda _: good)
    assert demo.main([]) == code
    assert capfd.readouterr().out.startswith("in all 0 s")


def test_interrupted(monkeypatch, capfd):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "perform", interrupt)
    assert demo.main([]) == 130
    assert capfd.readouterr().err == "demo: interrupted\n"


def test_breaking_it_plays_the_short_scene(monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "perform", lambda options: asked.append(options) or True)
    demo.main(["--break", "kill-job"])
    assert (asked[0].short, asked[0].sabotage) == (True, "kill-job")
