"""The demo from command line to exit code, with a fake `cluster` command."""

import stat

import pytest

from contrib.demo import __main__ as demo
from contrib.demo import demo_cluster


@pytest.fixture
def fake_command(tmp_path, monkeypatch):
    """Replace contrib/cluster/cluster by a shell script; it gets `--name NAME VERB …`."""

    def replace(script: str) -> None:
        command = tmp_path / "cluster"
        command.write_text(f'#!/bin/sh\necho "$3" >>{tmp_path}/verbs\n{script}\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(demo_cluster, "_COMMAND", command)

    monkeypatch.chdir(tmp_path)
    return replace


def verbs(tmp_path) -> list[str]:
    return (tmp_path / "verbs").read_text().split()


def test_without_docker(fake_command, capfd):
    fake_command("echo 'cluster: Docker is missing' >&2; exit 3")
    assert demo.main([]) == 3
    assert capfd.readouterr().err == "cluster: Docker is missing\n"


def test_a_cluster_that_is_in_use_is_left_alone(fake_command, capfd, tmp_path):
    fake_command('[ "$3" = exec ] && echo train; exit 0')
    assert demo.main(["--name", "mine"]) == 1
    out = capfd.readouterr()
    assert out.err.startswith("demo: cluster mine is up and runs 1 jobs: take it down first")
    assert verbs(tmp_path) == ["status", "exec"]


@pytest.mark.parametrize(("options", "last"), [([], "down"), (["--keep"], "exec")])
def test_what_fails_on_the_cluster_is_one_line(fake_command, capfd, tmp_path, options, last):
    fake_command('case $3 in status) exit 1;; exec) echo "no space left" >&2; exit 1;; esac')
    assert demo.main(options) == 1
    assert capfd.readouterr().err == "demo: `install …` failed on the cluster: no space left\n"
    assert verbs(tmp_path)[-1] == last


def test_a_directory_that_is_somebody_elses(fake_command, capfd, tmp_path):
    fake_command("exit 0")
    (tmp_path / "thesis" / "jobs").mkdir(parents=True)
    assert demo.main(["--out", "thesis"]) == 1
    assert "thesis/jobs is not the demo's" in capfd.readouterr().err


def test_a_directory_that_cannot_be(fake_command, capfd, tmp_path):
    fake_command("exit 0")
    (tmp_path / "file").touch()
    assert demo.main(["--out", "file"]) == 1
    assert capfd.readouterr().err == "demo: file: File exists; choose another --out\n"


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_follows_the_checks(monkeypatch, capfd, good, code):
    monkeypatch.setattr(demo, "run_demo", lambda _: good)
    assert demo.main([]) == code
    assert capfd.readouterr().out.startswith("in all 0 s")


def test_interrupted(monkeypatch, capfd):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupt)
    assert demo.main([]) == 130
    assert capfd.readouterr().err == "demo: interrupted\n"


def test_break_runs_the_short_scenario(monkeypatch):
    given = []
    monkeypatch.setattr(demo, "run_demo", lambda options: given.append(options) or True)
    demo.main(["--break", "kill-job"])
    assert (given[0].short, given[0].sabotage) == (True, "kill-job")
