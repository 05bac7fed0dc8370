"""The command esrun: options, exit codes, signals; tests/cluster runs it in Slurm."""

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_elastic.job.esrun_options import UsageError, parse
from slurm_elastic.job.steps.step import failure_code, is_unreached
from tests.support.patience import PATIENCE_S

ESRUN = Path(__file__).resolve().parents[3] / "wrappers" / "esrun"

#: Runs the program of the first rank and prints srun's messages.
FAKE_SRUN = """#!/bin/sh
echo "$@" >>"$HOME/calls"
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2
while [ "$1" != sh ]; do shift; done
"$@" & child=$!
trap 'kill -USR1 $child' USR1
trap 'echo "srun: forcing job termination" >&2; kill -KILL $child' TERM
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
case $code in
    0) exit 0;;
    138) echo "srun: error: g01: task 1: User defined signal 1" >&2; exit 143;;
    *) echo "srun: error: g01: task 1: Exited with exit code $code" >&2; exit 143;;
esac
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a batch script on one node with two GPUs."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(FAKE_SRUN)
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    path = f"{srun.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return {
        "PATH": path,
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "g01",
        "SLURM_JOB_CPUS_PER_NODE": "4",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURMD_NODENAME": "g01",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }


def run(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ESRUN), *words], env=env, capture_output=True, text=True, check=False, timeout=60
    )


def outside(**env: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return {"PATH": path, **env}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_program_runs_as_a_rank(job: dict[str, str]) -> None:
    process = run(job, "sh", "-c", "echo $RANK/$WORLD_SIZE $MASTER_ADDR $SLURM_ELASTIC_RUN_ID")
    assert process.stdout == "0/2 127.0.0.1 slurm-7\n"
    assert process.returncode == 0
    assert process.stderr.startswith("esrun: attempt 1: 2 ranks on g01, port ")


@pytest.mark.parametrize("options", [(), ("--checkpoint", "*.pt")])
def test_a_full_disk_under_the_log_does_not_end_the_program(
    job: dict[str, str], options: tuple[str, ...]
) -> None:
    command = [str(ESRUN), *options, "sh", "-c", "echo trains; exit 3"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            command, env=job, stdout=subprocess.PIPE, stderr=full, check=False, timeout=60
        )
    assert (process.stdout, process.returncode) == (b"trains\n", 3)


def test_arguments_arrive_as_they_are(job: dict[str, str]) -> None:
    process = run(job, "printf", "%s|", "a b", "$HOME", "", "'", "--checkpoint", "*")
    assert process.stdout == "a b|$HOME||'|--checkpoint|*|"


def test_the_exit_code_is_the_first_failing_ranks(job: dict[str, str]) -> None:
    process = run(job, "sh", "-c", "exit 85")
    assert process.returncode == 85
    assert "Exited with exit code 85" in process.stderr, "srun's messages are passed on"
    assert "esrun: the program ended with exit code 85" in process.stderr


def test_a_script_that_resumes_does_not_begin_anew_where_its_checkpoints_are_not(
    job: dict[str, str],
) -> None:
    state = Path(job["HOME"], ".slurm-elastic", "slurm-7.json")
    state.parent.mkdir()
    pattern = f"{job['HOME']}/local/*.pt"
    state.write_text(json.dumps({"count": 3, "proven": True, "pattern": pattern}))
    env = job | {"SLURM_RESTART_COUNT": "1"}
    process = run(env, "--checkpoint", pattern, "sh", "-c", "echo trains")
    assert (process.stdout, process.returncode) == ("", 2)
    line = f"esrun: --checkpoint {pattern}: nothing matches on this node, though the job has"
    assert line in process.stderr
    Path(job["HOME"], "local").mkdir()
    Path(job["HOME"], "local", "1.pt").write_text("1")
    assert run(env, "--checkpoint", pattern, "sh", "-c", "echo trains").stdout == "trains\n"


#: Of an srun whose request slurmctld has not answered.
UNREACHED = (
    "srun: error: Unable to confirm allocation for job 7: Socket timed out on send/recv operation"
)


def fail_first_srun(job: dict[str, str], *lines: str) -> None:
    """Let the first srun of a job print these lines and fail."""
    srun = Path(job["HOME"], "bin", "srun")
    said = "\n".join(f"    echo {shlex.quote(line)} >&2" for line in lines)
    first = f'if ! [ -e "$HOME/tried" ]; then\n    touch "$HOME/tried"\n{said}\n    exit 1\nfi\n'
    srun.write_text(f"#!/bin/sh\n{first}{srun.read_text()}")


def test_srun_is_started_again_while_slurmctld_does_not_answer(job: dict[str, str]) -> None:
    expired = "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 7"
    fail_first_srun(job, UNREACHED, expired)
    process = run(job, "sh", "-c", "echo trains; exit 3")
    assert (process.stdout, process.returncode) == ("trains\n", 3)
    line = "esrun: slurmctld does not answer srun, which is started again in 2 s\n"
    assert process.stderr.count(line) == 1


@pytest.mark.parametrize("ended", ["", "srun: error: g02: task 0: Killed"])
def test_srun_is_started_again_while_a_node_does_not_answer(
    job: dict[str, str], ended: str
) -> None:
    failure = "Communication connection failure"
    fail_first_srun(
        job,
        f"srun: error: Task launch for StepId=7.0 failed on node g01: {failure}",
        f"srun: error: Application launch failed: {failure}",
        "srun: Job step aborted",
        ended,
    )
    process = run(job, "sh", "-c", "echo trains; exit 3")
    assert (process.stdout, process.returncode) == ("trains\n", 3)
    line = "esrun: a node does not answer srun, which is started again in 2 s\n"
    assert process.stderr.count(line) == 1


def test_a_program_whose_own_srun_was_not_answered_has_failed(job: dict[str, str]) -> None:
    process = run(job, "sh", "-c", f"echo trains; echo '{UNREACHED}' >&2; exit 1")
    assert (process.stdout, process.returncode) == ("trains\n", 1)


def test_a_job_that_ends_does_not_wait_for_slurmctld(job: dict[str, str]) -> None:
    Path(job["HOME"], "bin", "srun").write_text(
        f"#!/bin/sh\ntouch $HOME/up; echo '{UNREACHED}' >&2; exit 1\n"
    )
    process = begun(job, "true")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert errors.count("is started again") <= 1


def begun(job: dict[str, str], program: str, *options: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [str(ESRUN), *options, "sh", "-c", f"touch $HOME/up; {program}"],
        env=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + PATIENCE_S
    while not Path(job["HOME"], "up").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


def test_signals_reach_the_program(job: dict[str, str]) -> None:
    process = begun(job, "trap 'exit 9' USR1; while :; do sleep 0.05; done")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 9


def test_a_second_esrun_of_a_job_is_refused_until_the_first_one_has_ended(
    job: dict[str, str],
) -> None:
    process = begun(job, "until [ -e $HOME/end ]; do sleep 0.05; done")
    second = run(job, "echo", "trains")
    assert (second.stdout, second.returncode) == ("", 2)
    line = f"esrun: the job runs another esrun already (process {process.pid}): expected one at a"
    assert second.stderr.startswith(line)
    assert second.stderr.count("\n") == 1
    assert run(job, "-n", "echo").returncode == 0, "it starts nothing"
    assert run({**job, "SLURM_JOB_ID": "8"}, "echo", "trains").returncode == 0
    Path(job["HOME"], "end").touch()
    process.communicate(timeout=PATIENCE_S)
    assert run(job, "echo", "trains").returncode == 0


def test_a_signal_as_exit_code(job: dict[str, str]) -> None:
    process = begun(job, "exec sleep 60")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGUSR1


def test_sigterm_after_sigcont_is_left_to_slurm(job: dict[str, str]) -> None:
    process = begun(job, "sleep 2; exit 4")
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 4, "the ranks were left alone"


def test_a_second_sigterm_ends_the_step_at_once(job: dict[str, str]) -> None:
    process = begun(job, "exec sleep 60")
    status = Path(f"/proc/{process.pid}/status")
    while "SigBlk:\t0000000000000000" not in status.read_text():
        time.sleep(0.01)  # until then two signals are one
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert "forcing job termination" in errors


def test_dry_run(job: dict[str, str]) -> None:
    process = run(job, "-n", "--srun-args", "--container-image=x --label", "python", "train.py")
    assert process.stdout.startswith(
        "srun --ntasks=2 --nodes=1 --ntasks-per-node=2 --cpus-per-task=2"
    )
    assert "--container-image=x --label sh -c" in process.stdout
    assert not Path(job["HOME"], "calls").exists()


def test_a_dry_run_outside_a_job_starts_nothing(job: dict[str, str]) -> None:
    outside = {k: v for k, v in job.items() if not k.startswith("SLURM_")}
    for options in ((), ("--local", "2")):
        process = run(outside, "-n", *options, "touch", str(Path(job["HOME"], "started")))
        assert process.returncode == 2
        assert process.stderr == (
            "esrun: -n without a job is invalid: there is no srun command; use salloc\n"
        )
    assert not Path(job["HOME"], "started").exists()


def test_without_srun(job: dict[str, str]) -> None:
    tools = Path(job["HOME"], "bin")
    (tools / "srun").unlink()
    (tools / "readlink").symlink_to(shutil.which("readlink") or "")
    process = run({**job, "PATH": f"{tools}:{Path(sys.executable).parent}"}, "true")
    assert (process.returncode, process.stderr) == (127, "esrun: srun: not found\n")


def test_inside_an_srun_of_several_tasks(job: dict[str, str]) -> None:
    process = run({**job, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "true")
    assert process.returncode == 2
    assert process.stderr == "esrun: srun started several tasks of esrun: expected one; omit srun\n"


def test_in_a_batch_script_that_a_rank_has_submitted(job: dict[str, str]) -> None:
    """It has inherited the variables of that rank's step; its own slurmstepd tells."""
    env = {**job, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    for title, code in (("slurmstepd: [7.batch]", 0), ("slurmstepd: [7.0]", 2)):
        task = f"SLURM_TASK_PID=$$ exec {ESRUN} true"
        stepd = f"sh -c '{task}'; exit $?"
        command = ["bash", "-c", f'exec -a "{title}" sh -c "$0"', stepd]
        process = subprocess.run(command, env=env, capture_output=True, check=False, timeout=60)
        assert process.returncode == code, process.stderr


@pytest.mark.parametrize(
    ("title", "more", "code"),
    [
        ("slurmstepd: [7.0]", {}, 2),
        ("slurmstepd: [7.0]", {"SLURM_PTY_PORT": "4000"}, 0),
        ("slurmstepd: [7.interactive]", {}, 0),
        ("slurmstepd: [7.batch]", {}, 0),  # submitted by a rank
        ("slurmstepd: [7.0]", {"SLURM_SPANK_ELASTIC": ""}, 0),  # nobody changes such a job
        ("hidden", {}, 0),
    ],
)
def test_srun_before_esrun_is_refused_before_the_job_grows(
    job: dict[str, str], title: str, more: dict[str, str], code: int
) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_SPANK_ELASTIC": "1-2"}
    program = "from slurm_elastic.job.esrun import main; exit(main(['true']))"
    task = f'SLURM_TASK_PID=$$ exec {sys.executable} -c "{program}"'
    command = ["bash", "-c", f'exec -a "{title}" sh -c "$0"', f"sh -c {shlex.quote(task)}; exit $?"]
    process = subprocess.run(
        command,
        env={**job, **step, **more},
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert process.returncode == code, process.stderr
    if code:
        assert process.stderr == (
            b"esrun: srun started esrun, which fails as soon as the job has several GPUs:"
            b" omit srun\n"
        )


@pytest.mark.parametrize(
    ("squeue", "shown"),
    [("echo 0", "attempt 1: unset"), ("echo 2", "attempt 3: 2"), ("exit 1", "attempt 4: 3")],
)
def test_a_number_of_restarts_that_is_inherited_is_corrected(
    job: dict[str, str], squeue: str, shown: str
) -> None:
    tool = Path(job["HOME"], "bin", "squeue")
    tool.write_text(f'#!/bin/sh\n[ "$1" = --jobs=7 ] && {squeue}\n')
    tool.chmod(0o755)
    program = "echo ${SLURM_RESTART_COUNT-unset}"
    process = run({**job, "SLURM_RESTART_COUNT": "3"}, "sh", "-c", program)
    attempt, count = shown.split(": ")
    assert f"esrun: {attempt}: " in process.stderr
    assert process.stdout.split("\n")[0] == count


def test_a_heterogeneous_job_is_refused(job: dict[str, str]) -> None:
    process = run({**job, "SLURM_HET_SIZE": "2"}, "true")
    assert process.returncode == 2
    assert process.stderr == (
        "esrun: heterogeneous jobs cannot be elastic: start their components with srun\n"
    )


def test_outside_slurm_one_rank_runs() -> None:
    process = run(outside(), "sh", "-c", "echo $RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR; exit 3")
    assert process.stdout == "0/1 0 127.0.0.1\n"
    assert process.returncode == 3


def test_local_ranks_and_the_first_failure() -> None:
    process = run(outside(), "--local", "2", "sh", "-c", "[ $RANK = 1 ] && exit 7; exec sleep 60")
    assert process.returncode == 7
    show = "echo $RANK $CUDA_VISIBLE_DEVICES $GROUP_RANK/$GROUP_WORLD_SIZE"
    process = run(outside(), "--local=3", "--gpus=one", "sh", "-c", show)
    assert sorted(process.stdout.split("\n")) == ["", "0 0 0/1", "1 1 0/1", "2 2 0/1"]
    process = run(outside(CUDA_VISIBLE_DEVICES="4,6"), "--local=2", "sh", "-c", show)
    assert sorted(process.stdout.split("\n")) == ["", "0 4,6 0/1", "1 4,6 0/1"]


def test_local_signals() -> None:
    process = run(outside(), "--local", "2", "sh", "-c", "kill -SEGV $$")
    assert process.returncode == 128 + signal.SIGSEGV


#: Saves after SIGTERM, longer than its shell would wait, and exits with a code of its own.
SAVES_AND_EXITS = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    open(f"saved.{os.environ['RANK']}", "x")
    sys.exit(int(os.environ["CODE"]))
signal.signal(signal.SIGTERM, save)
open(f"ready.{os.environ['RANK']}", "x")
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("code", [0, 5])
@pytest.mark.parametrize("words", [["bash", "run.sh"], ["sh", "-c", "bash run.sh"], None])
def test_local_programs_below_a_shell_save_and_exit(
    tmp_path: Path, words: list[str] | None, code: int
) -> None:
    (tmp_path / "train.py").write_text(SAVES_AND_EXITS)
    (tmp_path / "run.sh").write_text(f"set -e\n{sys.executable} train.py\necho saved\n")
    command = [sys.executable, str(ESRUN), "--local", "2"]
    command += words or [sys.executable, "train.py"]
    env = outside(CODE=str(code))
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL)
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
    process.terminate()
    assert process.wait(PATIENCE_S) == code
    assert sorted(path.name for path in tmp_path.glob("saved.*")) == ["saved.0", "saved.1"]


def test_the_interrupt_of_a_terminal_reaches_local_ranks(tmp_path: Path) -> None:
    program = "import os, time; open(f\"ready.{os.environ['RANK']}\", 'x'); time.sleep(60)"
    command = [sys.executable, str(ESRUN), "--local", "2", sys.executable, "-c"]
    main, terminal = os.openpty()
    process = subprocess.Popen(
        [*command, program],
        cwd=tmp_path,
        env=outside(),
        stdin=terminal,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGINT
    os.close(main)
    os.close(terminal)


#: Reports to esrun once, as the library does, and exits with RESTART_CODE.
REPORTS_AND_RESTARTS = """
import os, sys, time
sys.path.insert(0, os.environ["TREE"])
from slurm_elastic.job.rank_socket import RESTART_CODE, RankSocket
port, file = os.environ["MASTER_PORT"], os.environ["HOME"] + "/attempts"
if os.environ["RANK"] == "0":
    link = RankSocket.connect()
    link.first(60)
    open(file, "a").write(port + "\\n")
while port not in (ports := (os.path.exists(file) and open(file).read() or "").split()):
    time.sleep(0.01)
if len(sys.argv) > 1 and len(ports) == int(sys.argv[1]):
    sys.exit()
if os.environ["RANK"] == "0":
    steps = {"rising": len(ports), "stuck": 5, "none": None}[os.environ["STEPS"]]
    link.send({"phase": "training", "step": steps})
os._exit(RESTART_CODE)
"""


@pytest.mark.parametrize("where", ["job", "local"])
@pytest.mark.parametrize(
    ("steps", "words", "attempts", "code"),
    [("rising", ["6"], 6, 0), ("stuck", [], 3, 83), ("none", [], 3, 83)],
)
def test_a_program_that_exits_with_the_restart_code(
    job: dict[str, str], where: str, steps: str, words: list[str], attempts: int, code: int
) -> None:
    env = {**job, "TREE": str(ESRUN.parents[1]), "STEPS": steps}
    options = [] if where == "job" else ["--local", "2"]
    process = run(env, *options, sys.executable, "-c", REPORTS_AND_RESTARTS, *words)
    assert process.returncode == code, process.stderr
    ports = Path(job["HOME"], "attempts").read_text().split()
    assert len(ports) == len(set(ports)) == attempts
    restarts = process.stderr.count("esrun: the program exited with 83: starting it again in place")
    assert restarts == attempts - 1
    assert ("not started again" in process.stderr) is (code == 83)


def test_programs_that_did_not_connect_may_exit_with_the_restart_code(job: dict[str, str]) -> None:
    for options in ([], ["--local", "2"]):
        process = run(job, *options, "sh", "-c", "echo once; exit 83")
        assert process.returncode == 83
        assert "again" not in process.stderr
        assert process.stdout.count("once") == (2 if options else 1)


def test_help_and_version() -> None:
    process = run(outside(), "--help")
    assert process.returncode == 0
    assert process.stdout.startswith("usage: esrun [options] program")
    assert max(map(len, process.stdout.splitlines())) <= 100
    assert run(outside(), "--version").stdout.startswith("esrun ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a program to run"),
        (["--checkpoint", "x"], "expected a program to run"),
        (["--chekpoint", "x", "a"], "--chekpoint: unknown option"),
        (["--checkpoint"], "--checkpoint: expected a value"),
        (["--checkpoint=", "a"], "--checkpoint: expected a pattern"),
        (["--signal", "USR2", "a"], "--signal: expected --checkpoint too"),
        (["--complete", "DONE", "a"], "--complete: expected --checkpoint too"),
        (["--checkpoint", "x", "--complete", "", "a"], "--complete:  is invalid: expected a pat"),
        (["--checkpoint", "x", "--complete", "/a", "a"], "relative to the checkpoint"),
        (
            ["--checkpoint", "x", "--complete", "{step}", "a"],
            "expected no braces but {} and {stem}",
        ),
        (["--checkpoint", "x", "--complete", "{}", "a"], "it matches the checkpoint itself"),
        (
            ["--checkpoint", "x", "--signal", "KILL", "a"],
            "--signal: KILL is invalid: expected USR1",
        ),
        (["--local", "0", "a"], "--local: 0 is invalid: expected a number"),
        (["--local", "two", "a"], "--local: two is invalid: expected a number"),
        (["--gpus", "two", "a"], "--gpus: two is invalid: expected one or all"),
        (["--srun-args", "'", "a"], "--srun-args: ' is invalid: No closing quotation"),
    ],
)
def test_invalid_command_lines(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(words)
    process = run(outside(), *words)
    assert process.returncode == 2
    assert process.stderr.startswith("esrun: ")
    assert "Traceback" not in process.stderr


def test_options_end_with_the_program() -> None:
    options = parse(["--checkpoint=c/*", "--signal", "sigusr2", "prog", "--signal", "x", "-n"])
    assert (options.checkpoint, options.signal) == ("c/*", "USR2")
    assert options.program == ["prog", "--signal", "x", "-n"]
    assert not options.dry_run
    assert parse(["--", "-n"]).program == ["-n"]
    assert parse(["--srun-args", "-l", "--srun-args=-u -v", "p"]).srun_args == ["-l", "-u", "-v"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"srun: error: g01: task 1: Exited with exit code 3", 3),
        (b"srun: error: g[01-02]: tasks 0-3,7: Exited with exit code 85", 85),
        (b"srun: error: g02: task 3: Segmentation fault (core dumped)", 139),
        (b"srun: error: g02: task 3: Killed", 137),
        (b"srun: error: g02: task 3: Terminated", 143),
        (b"srun: error: Unable to create step for job 5: Requested nodes are busy", None),
        (b"srun: Terminating StepId=24.0", None),
        (b"g02: task 3: Killed", None),
        (b"srun: error: g01: task 1: Exited with exit code", None),
        (b"", None),
    ],
)
def test_exit_codes_in_messages_of_srun(line: bytes, code: int | None) -> None:
    assert failure_code(line) == code


@pytest.mark.parametrize(
    ("line", "unreached"),
    [
        (UNREACHED.encode(), True),
        (b"srun: error: Unable to create step for job 5: Message receive failure", True),
        (b"srun: error: Unable to create step for job 5: Protocol authentication error", True),
        (b"srun: error: Unable to confirm allocation for job 7: Invalid job id specified", False),
        (b"srun: error: Unable to create step for job 5: Requested nodes are busy", False),
        (b"srun: error: Socket timed out on send/recv operation", False),
        (b"Unable to confirm allocation for job 7: Connection refused", False),
    ],
)  # fmt: skip
def test_errors_of_an_srun_that_slurmctld_has_not_answered(line: bytes, unreached: bool) -> None:
    assert is_unreached(line) is unreached


@pytest.mark.parametrize("make", [os.symlink, shutil.copy])
def test_the_wrapper_finds_its_python(tmp_path: Path, make: Callable[[Path, Path], object]) -> None:
    make(ESRUN, tmp_path / "esrun")
    if make is shutil.copy:
        (tmp_path / "python3").write_text('#!/bin/sh\necho "my python $2"\n')
        (tmp_path / "python3").chmod(0o755)
    process = subprocess.run(
        [str(tmp_path / "esrun"), "--version"], capture_output=True, text=True, check=False
    )
    if make is shutil.copy:
        assert process.stdout == f"my python {tmp_path / 'esrun'}\n"
    else:
        assert process.stdout.startswith("esrun ")


def on_trial(job: dict[str, str]) -> dict[str, str]:
    """Return the environment of a restart, with a controller that cannot be reached."""
    directory = Path(job["SLURM_SUBMIT_DIR"], ".slurm-elastic")
    directory.mkdir()
    (directory / "slurm-7.trained").touch()
    return {**job, "SLURM_RESTART_COUNT": "1", "SLURM_ELASTIC_CONTROLLER": "127.0.0.1:9"}


def test_a_program_that_fails_on_trial_does_not_end_the_job(job: dict[str, str]) -> None:
    process = begun(on_trial(job), "exit 3")
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting for the controller" in line:
            break
    else:
        pytest.fail("esrun has ended")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)  # the requeue
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3


def test_a_checkpoint_written_at_the_very_end_is_counted(job: dict[str, str]) -> None:
    """A script with one step left writes it and exits at once: it has done its work."""
    env = on_trial(job)
    folder = Path(job["HOME"], "ckpt")
    folder.mkdir()
    (folder / "1.pt").write_text("old")
    write = f"cat {folder}/1.pt; echo new >{folder}/.2; mv {folder}/.2 {folder}/2.pt"
    process = run(env, "--checkpoint", f"{folder}/*.pt", "sh", "-c", write)
    assert process.returncode == 0
    assert "waiting for the controller" not in process.stderr


#: Prints its options and the variables of its rank, as a launcher reads them.
SHOW = '#!/bin/sh\necho "$@" rank=$RANK gpus=$CUDA_VISIBLE_DEVICES\n'


@pytest.fixture
def torchrun(job: dict[str, str]) -> None:
    path = Path(job["HOME"], "bin", "torchrun")
    path.write_text(SHOW)
    path.chmod(0o755)


@pytest.mark.usefixtures("torchrun")
def test_a_launcher_is_started_with_the_shape_of_the_job(job: dict[str, str]) -> None:
    process = run(job, "torchrun", "--nproc_per_node", "8", "--standalone", "train.py", "a  b")
    assert process.returncode == 0, process.stderr
    port, _, said = process.stderr.split("port ")[1].partition(",")
    assert said == " one launcher per node\n"
    assert process.stdout == (
        "--nnodes=1 --nproc_per_node=2 --node_rank=0 --rdzv_backend=static --rdzv_id=slurm-7"
        f" --master_addr=127.0.0.1 --master_port={port} train.py a  b rank= gpus=\n"
    )


@pytest.mark.usefixtures("torchrun")
def test_a_launcher_on_this_machine(job: dict[str, str]) -> None:
    env = {"PATH": f"{job['HOME']}/bin:{job['PATH']}", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    process = run(env, "--local", "3", "torchrun", "train.py")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("--nnodes=1 --nproc_per_node=3 --node_rank=0 ")
    assert process.stdout.endswith(" train.py rank= gpus=0,1,2\n")
    process = run(env, "torchrun", "--nproc_per_node=2", "train.py")
    assert process.stdout == "--nproc_per_node=2 train.py rank=0 gpus=0,1,2\n"


def test_launchers_that_cannot_be_resized_are_refused(job: dict[str, str]) -> None:
    for options in ([], ["-n"], ["--local", "2"]):
        process = run(job, *options, "deepspeed", "--num_gpus=2", "train.py", "x")
        assert process.returncode == 2
        assert process.stderr.startswith("esrun: deepspeed: is invalid here: expected torchrun")
        assert process.stderr.endswith("write: esrun python train.py x\n")
        assert not Path(job["HOME"], "calls").exists()


#: Reports as `slurm_elastic.integrations` does, saves, prints the variables of the global batch.
REPORTS_AS_A_SCRIPT = """
import os, sys, time
sys.path.insert(0, os.environ["TREE"])
from slurm_elastic.job.rank_socket import RankSocket
names = ("WORLD_SIZE", "START_WORLD_SIZE", "MICRO_BATCHES", "ACCUMULATION", "ACCUMULATION_EXACT")
print(*(os.environ.get("SLURM_ELASTIC_" + name) for name in names))
print(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"))
link = RankSocket.connect()
link.send({"kind": "script", "step": 130})
link.send({"kind": "script", "checkpoint_step": 120})
time.sleep(0.5)
open("save.pt", "w").write("x" * 100)
"""


def test_what_keeps_the_global_batch_from_run_to_run(job: dict[str, str], tmp_path: Path) -> None:
    job |= {"TREE": str(ESRUN.parents[1])}
    command = [str(ESRUN), "--checkpoint", f"{tmp_path}/*.pt"]
    program = [sys.executable, "-c", REPORTS_AS_A_SCRIPT]

    def attempt(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
        words = [*command, *options, *program]
        return subprocess.run(
            words, env=job | env, cwd=tmp_path, capture_output=True, text=True, check=True
        )

    assert attempt().stdout.split() == ["2", "2", "None", "1", "1", "None"]
    later = {"SLURM_RESTART_COUNT": "1", "SLURM_GPUS_ON_NODE": "3", "SLURM_JOB_CPUS_PER_NODE": "8"}
    process = attempt(**later)
    assert process.stdout.split() == ["3", "2", "None", "1", "0", "None"]
    assert "--checkpoint is ignored" not in process.stderr
    memory = json.loads((tmp_path / ".slurm-elastic" / "slurm-7.json").read_text())
    assert (memory["start_world"], memory["count"]) == (2, 121)
    process = attempt("--micro-batches", "8", **later)
    assert process.stdout.split() == ["3", "2", "8", "3", "0", "3"]
    assert "3 ranks cannot share them evenly" in process.stderr


@pytest.mark.parametrize("options", [[], ["--local", "2"]])
def test_the_accumulation_that_a_script_is_given_follows_its_ranks(
    job: dict[str, str], options: list[str]
) -> None:
    program = ["sh", "-c", 'echo "$@"', "x", "--gradient_accumulation_steps", "8"]
    process = run(job, *options, "--micro-batches", "8", *program)
    assert set(process.stdout.splitlines()) == {"--gradient_accumulation_steps 4"}
    line = "--gradient_accumulation_steps 8 is replaced by 4: --micro-batches 8 on 2 ranks"
    assert f"esrun: {line}\n" in process.stderr
    if not options:
        env = job | {"SLURM_SPANK_ELASTIC": "1-4"}
        process = run(env, "--checkpoint", "*.pt", *program)
        assert process.stdout == "--gradient_accumulation_steps 8\n"
        assert "to keep it, give esrun --micro-batches 16 (" in process.stderr
        process = run(env, "--checkpoint", "*.pt", "--micro-batches", "script", *program)
        assert "to keep it" not in process.stderr


def test_a_script_is_not_started_on_ranks_that_cannot_share_its_micro_batches(
    job: dict[str, str], tmp_path: Path
) -> None:
    checkpoint, state = tmp_path / "step_60", tmp_path / ".slurm-elastic" / "slurm-7.json"
    checkpoint.mkdir()
    (checkpoint / "random_states_0.pkl").write_text("x")
    state.parent.mkdir()
    pattern = str(tmp_path / "step_*")
    training = {"step": 60, "world": 2}
    state.write_text(json.dumps({"count": 1, "pattern": pattern, "training": training}))
    later = job | {"SLURM_RESTART_COUNT": "1", "SLURM_GPUS_ON_NODE": "3"}
    options = ("--checkpoint", pattern, "--micro-batches", "4")
    program = ("sh", "-c", "echo started", "x", "--gradient_accumulation_steps", "4")
    process = run(later, *options, *program)
    assert (process.returncode, process.stdout) == (2, "")
    assert "4 of them on 2 ranks and 3 on 3 ranks" in process.stderr
    assert "allow only sizes that divide 4: --elastic=…,sizes=1:2:4\n" in process.stderr
    process = run(later | {"SLURM_GPUS_ON_NODE": "1"}, *options, *program)
    assert (process.returncode, process.stdout) == (0, "started\n")


@pytest.mark.parametrize("options", [[], ["--local", "2"]])
def test_the_loss_of_a_script_that_accumulates_itself_is_not_scaled_by_accelerate(
    job: dict[str, str], tmp_path: Path, options: list[str]
) -> None:
    show = "import os; print(os.environ.get('ACCELERATE_GRADIENT_ACCUMULATION_STEPS'))"
    script = tmp_path / "run_glue_no_trainer.py"
    command = (*options, "--micro-batches", "8", sys.executable, str(script))
    script.write_text(f"{show}\n# accelerator.accumulate(model): accelerator.backward(loss)")
    process = run(job, *command)
    assert set(process.stdout.split()) == {"4"}
    assert "accelerator" not in process.stderr
    script.write_text(f"{show}\n# accelerator.backward(loss / args.gradient_accumulation_steps)")
    process = run(job, *command)
    assert set(process.stdout.split()) == {"None"}
    assert "which would only scale its loss, is not set; it has to accumulate" in process.stderr
    process = run(job, *command, "--gradient_accumulation_steps", "8")
    assert "which would only scale its loss, is not set\n" in process.stderr
    script.write_text(f"# from fastai.distributed import *\n{show}")
    assert set(run(job, *command).stdout.split()) == {"None"}
