"""The shell scripts that signal ranks, run under a parent whose name begins with slurmstepd."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_elastic.job.signals import signal_scripts
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S
from tests.support.process_state import is_alive

#: Of this run of the tests: others may run on the same machine.
MARK = f"test.{os.getpid()}"

#: Starts the command in its arguments as a task, and waits for it.
STEPD = """
import os, subprocess, sys
open('/proc/self/comm', 'w').write('slurmstepd')
env = dict(os.environ, SLURM_ELASTIC_STEP=sys.argv[1])
sys.exit(subprocess.run(sys.argv[2:], env=env).returncode)
"""

#: A rank: writes each signal into the file of its name, with a child as of a data loader.
RANK = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    time.sleep(60)
    os._exit(0)
def handle(number, frame):
    open(sys.argv[1], 'a').write(f'{signal.Signals(number).name} ')
    if number == signal.SIGTERM:
        os._exit(0)
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, handle)
open(sys.argv[1], 'w').close()
while True:
    time.sleep(0.05)
"""

#: A launcher that handles no signal: its ranks have RANK in their environment, it has not.
LAUNCHER = """
import os, subprocess, sys
ranks = [subprocess.Popen(sys.argv[2:] + [f'{sys.argv[1]}{rank}'], env={**os.environ, 'RANK': '0'})
         for rank in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""


@contextmanager
def task(
    tmp_path: Path, *command: str, files: tuple[str, ...] = ("rank",), rank: str | None = "0"
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a task until its ranks have installed their handlers; end all its processes then."""
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    stepd = subprocess.Popen(
        [sys.executable, "-c", STEPD, MARK, *command],
        cwd=tmp_path,
        env=env | ({"RANK": rank} if rank else {}),
    )
    try:
        end = time.monotonic() + PATIENCE_S
        while not all((tmp_path / name).exists() for name in files):
            assert time.monotonic() < end
            time.sleep(0.02)
        yield stepd
    finally:
        send("KILL")
        stepd.wait(PATIENCE_S)


def send(name: str, mark: str = MARK) -> int:
    command = ["sh", "-c", signal_scripts.SIGNAL_SCRIPT, "esrun", name, mark]
    process = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert not process.stderr
    return process.returncode


def received(path: Path, expected: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while path.read_text().strip() != expected:
        assert time.monotonic() < end, path.read_text()
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_a_rank_gets_the_signal_and_its_data_loader_does_not(tmp_path: Path) -> None:
    with task(tmp_path, sys.executable, "-c", RANK, "rank") as stepd:
        (rank,) = children_of(stepd.pid)
        (loader,) = children_of(rank)
        assert send("USR2", "another") == 1
        assert send("USR2") == 0
        received(tmp_path / "rank", "SIGUSR2")
        assert is_alive(loader)


@pytest.mark.parametrize(
    "script",
    [
        "{rank}; true",
        "set -o pipefail; {rank} 2>&1 | tee log",
        "sleep 60 & {rank}; true",
        "timeout 60 bash -c '{rank}; true'; true",
    ],
)
def test_the_rank_below_a_shell_gets_the_signal(tmp_path: Path, script: str) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = script.format(rank=f"{sys.executable} rank.py rank")
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{command}\n")
    with task(tmp_path, "bash", "run.sh") as stepd:
        assert send("USR2") == 0
        received(tmp_path / "rank", "SIGUSR2")
        assert stepd.poll() is None, "no shell and no filter has died of it"
        assert send("TERM") == 0
        received(tmp_path / "rank", "SIGUSR2 SIGTERM")


@pytest.mark.parametrize("shell", ["tcsh", "csh", "zsh", "fish", "mksh"])
def test_a_shell_of_any_kind_is_passed_by(tmp_path: Path, shell: str) -> None:
    # By their names: the shells themselves may not be installed.
    shutil.copy(shutil.which("dash") or "/bin/sh", tmp_path / shell)
    (tmp_path / "rank.py").write_text(RANK)
    with task(tmp_path, str(tmp_path / shell), "-c", f"{sys.executable} rank.py rank; true") as job:
        assert send("USR2") == 0
        received(tmp_path / "rank", "SIGUSR2")
        assert job.poll() is None


def test_a_shell_with_a_trap_gets_the_signal_itself(tmp_path: Path) -> None:
    script = "trap 'echo shell >got' USR2; touch up; while :; do sleep 0.1; done"
    with task(tmp_path, "bash", "-c", script, files=("up",)):
        assert send("USR2") == 0
        end = time.monotonic() + PATIENCE_S
        while not (tmp_path / "got").exists():
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_shell_that_runs_nothing_ends_at_term_only(tmp_path: Path) -> None:
    with task(tmp_path, "bash", "-c", "touch up; while :; do sleep 1; done", files=("up",)) as step:
        assert send("USR2") == 1
        assert step.poll() is None
        assert send("TERM") == 0
        assert step.wait(PATIENCE_S) == 256 - signal.SIGTERM


def test_the_ranks_below_a_launcher_get_the_signal(tmp_path: Path) -> None:
    command = ["-c", LAUNCHER, "rank", sys.executable, "-c", RANK]
    files = ("rank0", "rank1")
    with task(tmp_path, sys.executable, *command, files=files, rank=None) as stepd:
        assert send("USR2") == 0
        for name in files:
            received(tmp_path / name, "SIGUSR2")
        assert stepd.poll() is None
        assert send("TERM") == 0
        for name in files:
            received(tmp_path / name, "SIGUSR2 SIGTERM")
        assert stepd.wait(PATIENCE_S) == 0


def test_the_ranks_of_the_real_torchrun(tmp_path: Path) -> None:
    """Torchrun itself ignores USR2 (`LAUNCHER_SCRIPT`), and passes on TERM."""
    own_file = 'import os, sys\nsys.argv[1:] = ["rank" + os.environ["RANK"]]\n'
    (tmp_path / "t.py").write_text(own_file + RANK)
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc_per_node=2 t.py"
    command = ["sh", "-c", f"trap '' USR1 USR2; exec {torchrun}"]
    files = ("rank0", "rank1")
    with task(tmp_path, *command, files=files, rank=None) as stepd:
        assert send("USR2") == 0
        for name in files:
            received(tmp_path / name, "SIGUSR2")
        assert send("TERM") == 0
        for name in files:
            received(tmp_path / name, "SIGUSR2 SIGTERM")
        stepd.wait(PATIENCE_S)


def test_kill_ends_all_processes(tmp_path: Path) -> None:
    with task(tmp_path, "bash", "-c", f'{sys.executable} -c "$0" rank; sleep 60', RANK) as stepd:
        (shell,) = children_of(stepd.pid)
        (rank,) = children_of(shell)
        pids = [shell, rank, *children_of(rank)]
        assert send("KILL") == 0
        stepd.wait(PATIENCE_S)
        end = time.monotonic() + PATIENCE_S
        while any(Path(f"/proc/{pid}/cmdline").exists() and is_alive(pid) for pid in pids):
            assert time.monotonic() < end
            time.sleep(0.02)


def test_kill_spares_the_steps_own_srun(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    shutil.copy(shutil.which("sleep") or "", srun)
    env = {**os.environ, "SLURM_ELASTIC_STEP": MARK}
    with subprocess.Popen([srun, "60"], env=env) as process:
        try:
            while b"srun" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                time.sleep(0.01)
            with task(tmp_path, "bash", "-c", "touch up; exec sleep 60", files=("up",)) as step:
                assert send("KILL") == 0
                step.wait(PATIENCE_S)
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("signals", "calls"),
    [("TERM", ""), ("USR2 USR2 TERM", "KILL m.1"), ("USR2 USR2 USR1", "THAW m.1"), ("USR1", "")],
)
def test_a_guard_acts_at_sigterm_once_armed(signals: str, calls: str) -> None:
    function = 'signal_tasks() { echo "$@"; }\narmed=\n'
    script = signal_scripts.GUARD_SCRIPT.replace("armed=\n", function, 1)
    with subprocess.Popen(
        ["sh", "-c", script, "esrun", "KILL", "m.1"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as guard:
        assert guard.stdout is not None
        assert guard.stdout.readline() == "ready\n"
        for name in signals.split():
            subprocess.run(["kill", "-s", name, "--", f"-{guard.pid}"], check=True)
            time.sleep(0.2)
        printed = [x for x in guard.stdout.read().splitlines() if x[:4] not in ("STOP", "froz")]
        assert "\n".join(printed) == calls
        assert guard.wait() == 0


@contextmanager
def guard(shell: str = "sh") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [shell, "-c", signal_scripts.GUARD_SCRIPT, "esrun", "KILL", MARK],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def step_pids() -> list[int]:
    """Return the processes of the step."""
    pids = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURM_ELASTIC_STEP={MARK}\0" in environ.read_text(errors="replace"):
                pids.append(int(environ.parent.name))
        except OSError:
            continue
    return pids


def states() -> str:
    """Return the states of all processes of the step: S sleeps, T is stopped."""
    found = ""
    for pid in step_pids():
        try:
            found += Path(f"/proc/{pid}/status").read_text().split("State:\t")[1][0]
        except OSError:
            continue
    return "".join(sorted(set(found) - {"Z"}))


def until(wanted: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while (found := states().replace("R", "S")) != wanted:
        assert time.monotonic() < end, found
        time.sleep(0.02)


def test_frozen_ranks_stand_until_they_are_let_go(tmp_path: Path) -> None:
    with task(tmp_path, sys.executable, "-c", RANK, "rank"), guard() as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "frozen\n"
        until("T")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE_S) == 0
        until("S")


def test_the_end_of_a_job_reaches_a_guard_that_bash_runs(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to(shutil.which("bash") or "")
    with (
        task(tmp_path, sys.executable, "-c", RANK, "rank") as stepd,
        guard(str(tmp_path / "sh")) as process,
    ):
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "frozen\n"
        process.send_signal(signal.SIGUSR2)
        time.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert stepd.wait(PATIENCE_S) in (-9, 247)


def test_slurms_sigcont_does_not_let_frozen_ranks_save_again(tmp_path: Path) -> None:
    with task(tmp_path, sys.executable, "-c", RANK, "rank") as stepd, guard() as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "frozen\n"
        process.send_signal(signal.SIGUSR2)
        send("THAW")
        process.send_signal(signal.SIGCONT)
        until("T")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert stepd.wait(PATIENCE_S) in (-9, 247)
        assert (tmp_path / "rank").read_text() == ""


#: A rank that overwrites its only checkpoint all the time; its output shows each result.
SAVER = """
import os, sys, time
while True:
    try:
        with open(sys.argv[1], 'w') as file:
            file.write('whole')
        os.write(1, b'+')
    except OSError:
        os.write(1, b'-')
    time.sleep(0.01)
"""


@contextmanager
def armed_guard(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Freeze a saver between two saves, and arm the guard; yields it and the saver's results."""
    results = tmp_path / "results"
    script = f"exec {sys.executable} -c '{SAVER.replace(chr(39), chr(34))}' ckpt >{results}"
    with task(tmp_path, "bash", "-c", script, files=("ckpt",)), guard() as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "frozen\n"
        process.send_signal(signal.SIGUSR2)
        yield process, results


def appended(results: Path, sign: str) -> None:
    """Wait until the saver's newest result is this one."""
    size, end = results.stat().st_size, time.monotonic() + PATIENCE_S
    while not results.read_text()[size:].endswith(sign):
        assert time.monotonic() < end, results.read_text()[-20:]
        time.sleep(0.02)


def limits(pid: int) -> str:
    text = Path(f"/proc/{pid}/limits").read_text().partition("Max open files")[2]
    return text.split()[0]


@needs("prlimit")
@pytest.mark.parametrize("ends", [False, True], ids=["guard", "without guard"])
def test_ranks_that_run_after_an_answer_overwrite_no_checkpoint(tmp_path: Path, ends: bool) -> None:
    with armed_guard(tmp_path) as (process, results):
        (rank,) = step_pids()
        end = time.monotonic() + PATIENCE_S
        while limits(rank) != "0":
            assert time.monotonic() < end
            time.sleep(0.02)
        os.kill(rank, signal.SIGCONT)
        appended(results, "-")  # it may have been frozen with the file open
        (tmp_path / "ckpt").write_text("kept")
        appended(results, "-")
        assert (tmp_path / "ckpt").read_text() == "kept"
        # A notice that is withdrawn gives the files back, also if the guard was killed.
        if ends:
            process.kill()
            process.wait()
            send("THAW")
        else:
            process.send_signal(signal.SIGUSR1)
        appended(results, "+")


#: A command that sends USR1 to the guard and its commands, as srun does, at one of its calls.
INTERRUPTED = """#!/bin/sh
trap '' USR1
{program} "$@"
code=$?
echo >>{calls}
[ "$(wc -l <{calls})" != {call} ] || kill -s USR1 0
exit $code
"""


@needs("prlimit")
@pytest.mark.parametrize(("name", "call"), [("grep", 2), ("prlimit", 1)])
def test_a_notice_withdrawn_in_the_middle_of_a_freeze_lets_ranks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    command = tmp_path / "bin" / name
    command.parent.mkdir()
    text = INTERRUPTED.format(program=shutil.which(name), calls=tmp_path / "calls", call=call)
    command.write_text(text)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    with armed_guard(tmp_path) as (process, results):
        assert process.wait(PATIENCE_S) == 0
        appended(results, "+")


def test_frozen_ranks_get_the_end_of_a_job_that_comes_before_the_answer(tmp_path: Path) -> None:
    with task(tmp_path, sys.executable, "-c", RANK, "rank") as stepd, guard() as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "frozen\n"
        send("TERM")
        process.send_signal(signal.SIGTERM)
        stepd.wait(PATIENCE_S)
        assert (tmp_path / "rank").read_text() == "SIGTERM "


def test_guards_let_ranks_go_on_whose_esrun_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = signal_scripts.GUARD_SCRIPT.replace("-lt 150", "-lt 2")
    assert script != signal_scripts.GUARD_SCRIPT
    monkeypatch.setattr(signal_scripts, "GUARD_SCRIPT", script)
    with task(tmp_path, sys.executable, "-c", RANK, "rank"), guard() as process:
        process.send_signal(signal.SIGUSR2)
        until("T")
        until("S")
