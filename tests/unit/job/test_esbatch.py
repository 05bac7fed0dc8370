"""The command esbatch, with an sbatch and an sinfo that print their arguments."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_elastic.core.directive import DirectiveError
from slurm_elastic.job import esbatch as module
from slurm_elastic.job.esbatch import EsbatchError, plan, read_sinfo, without_elastic

ROOT = Path(__file__).parents[3]
ADDED = ["--requeue", "--open-mode=append"]
MIXED = {"a100": 4, "v100": 8}


def planned(words: str, script: str = "", cluster=MIXED, **environment: str) -> list[str]:
    command, elastic = plan(words.split(), script, environment, lambda partition: cluster)
    assert elastic
    return command


def test_doctest():
    assert doctest.testmod(module).failed == 0


def test_without_directive_nothing_changes():
    arguments = ["-N2", "--gres=gpu:1", "train.sh", "--elastic=5"]
    assert plan(arguments, "#SBATCH -n2\n", {}, dict) == (arguments, False)


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ("--elastic=2-4 job.sh --elastic=9 -N2", "job.sh --elastic=9 -N2"),
        ("--elastic 2-4 -J name --wait -vQ job.sh a b", "-J name --wait -vQ | job.sh a b"),
        ("--time 60 --elastic=2-4 -vJ name -- job.sh", "--time 60 -vJ name | -- job.sh"),
        ("-Jname -W --elastic=2-4 --nice --exclusive", "-Jname -W --nice --exclusive |"),
        ("--elastic=2-4 --requeue --wrap=hostname", "--wrap=hostname |"),
        ("--elastic=9 --elastic=2-4 --export NONE job.sh", "--export NONE | job.sh"),
    ],
)
def test_other_options_are_passed_on(words, rest):
    before, bar, after = rest.partition("|")
    before, after = (before, after) if bar else ("", before)
    shape = ["--nodes=1", "--gres=gpu:2"]
    expected = [*before.split(), "--comment=elastic:2-4", *ADDED, *shape, *after.split()]
    assert planned(words) == expected


@pytest.mark.parametrize(
    "asks",
    [
        *("--gres=gpu:2", "-G4", "-G 4", "--gpus=4", "--gpus-per-node 2", "--gpus-per-socket=1"),
        *("--gpus-per-task=1 -n4", "--ntasks-per-gpu=1 -n 4", "--tres-per-task=cpu:2,gres/gpu:1"),
    ],
)
def test_own_shape_stays(asks):
    expected = [*asks.split(), "--comment=elastic:2-4", *ADDED, "job.sh"]
    assert planned(f"--elastic=2-4 {asks} job.sh", cluster=None) == expected
    assert planned("--elastic=2-4 job.sh", f"#SBATCH {asks}\n", None) == expected[-4:]
    assert planned("--elastic=2-4 job.sh", SBATCH_GPUS="4") == expected[-4:]


@pytest.mark.parametrize(
    ("elastic", "cluster", "shape"),
    [
        ("2-16", MIXED, "--nodes=1 --gres=gpu:2"),
        ("6-16", MIXED, "--nodes=1 --gres=gpu:v100:6"),
        ("6-16,types=a100:v100", MIXED, "--nodes=2 --gres=gpu:a100:3"),
        ("7-16,types=a100:v100", MIXED, "--nodes=2 --gpus=a100:7"),
        ("2-16,types=v100", MIXED, "--nodes=1 --gres=gpu:v100:2"),
        ("2-16,types=h100:v100", MIXED, "--nodes=1 --gres=gpu:v100:2"),
        ("16", {"a100": 4}, "--nodes=4 --gres=gpu:4"),
        ("16", {"": 8}, "--nodes=2 --gres=gpu:8"),
        ("16", {}, "--nodes=4 --gres=gpu:4"),
        ("2,types=a100:v100", {}, "--nodes=1 --gres=gpu:a100:2"),
        ("12-16 -C a100", MIXED, "--nodes=3 --gres=gpu:4"),
        ("12-16,types=v100:a100 -C rack1", MIXED, "--nodes=2 --gres=gpu:v100:6"),
        ("4-16 -N2", MIXED, "--gpus=v100:4"),
        ("4-16 --nodes 2", {"a100": 4}, "--gpus=4"),
        ("2-8", {"a100": 4, "a100_1g.5gb": 56}, "--nodes=1 --gres=gpu:a100:2"),
    ],
)
def test_start_at_min(elastic, cluster, shape):
    command = planned(f"--elastic={elastic} job.sh", cluster=cluster)
    assert command[command.index(ADDED[-1]) + 1 : -1] == shape.split()


def test_a_partition_of_slices_is_refused():
    with pytest.raises(EsbatchError, match=r"slices of GPUs \(MIG: 1g.5gb\) and no whole ones"):
        planned("--elastic=2-8 job.sh", cluster={"1g.5gb": 56, "2g.10gb": 8})


def test_command_line_beats_environment_beats_script():
    script = "#!/bin/sh\n#SBATCH --elastic=3\n"
    assert "--comment=elastic:1" in planned("--elastic=1 x", script, SLURM_ELASTIC="2")
    assert "--comment=elastic:2" in planned("x", script, SLURM_ELASTIC="2")
    assert "--comment=elastic:3" in planned("x", script, SLURM_ELASTIC="")


def test_own_choices_are_respected():
    assert "--open-mode=append" not in planned("--elastic=2 --open-mode=truncate x")
    assert "--open-mode=append" not in planned("--elastic=2 x", SBATCH_OPEN_MODE="truncate")
    assert "--open-mode=append" not in planned("--elastic=2 x", "#SBATCH --open-mode=t\n")
    assert "--comment=elastic:2 mine" in planned("--elastic=2 --comment=mine x")
    script = "#SBATCH --elastic=2\n#SBATCH --comment='my own' # why\n"
    assert planned("x", script, MIXED)[0] == "--comment=elastic:2 my own"


@pytest.mark.parametrize(
    ("words", "script", "message"),
    [
        ("--elastic=2 --no-requeue x", "", "leave out --no-requeue"),
        ("x", "#SBATCH --elastic=2\n#SBATCH --elastic=3\n", "differs from --elastic=2 given"),
        ("--elastic=2 --comment=elastic:3 x", "", "given twice"),
        ("--elastic=2 --comment=" + "é" * 600 + " x", "", "186 bytes too long"),
        ("--elastic=2 -n1 x : -n2 y", "", "heterogeneous"),
        ("x", "#SBATCH --elastic=2\n#SBATCH hetjob\n", "heterogeneous"),
        ("x", "#SBATCH --elastic=2 'oops\n", "No closing quotation"),
    ],
)
def test_contradictions(words, script, message):
    with pytest.raises(EsbatchError, match=message):
        planned(words, script)


def test_faulty_directive():
    with pytest.raises(DirectiveError, match="nothing is given"):
        planned("--elastic")
    with pytest.raises(DirectiveError, match="write 2-16"):
        planned("x", "#SBATCH --elastic=16-2\n")


def test_script_lines_keep_their_numbers():
    script = (
        "#!/bin/bash\n\n#SBATCH --elastic=2-4\n#SBATCH -n2 --elastic 2-4 -c3 # why\r\n"
        "# --elastic=2\n#SBATCH --elastic='2-4'\n\x0c\x85\u2028echo\n#SBATCH --elastic=7\n\udcff"
    )
    assert without_elastic(script) == (
        "#!/bin/bash\n\n##SBATCH --elastic=2-4\n#SBATCH -n2 -c3 # why\r\n"
        "# --elastic=2\n##SBATCH --elastic='2-4'\n\x0c\x85\u2028echo\n#SBATCH --elastic=7\n\udcff"
    )


def test_read_sinfo():
    report = (
        "p gpu:a100:4(S:0-1)\np gpu:a100:8,nic:2\nq nic:1,gpu:v100:2\nq (null)\nq gpu:3\n"
        "q shard:9\n\n"
    )
    assert read_sinfo(report) == {"a100": 4, "v100": 2, "": 3}
    assert read_sinfo(report + "d* gpu:h100:8\n") == {"h100": 8}


@pytest.mark.parametrize(
    ("words", "script", "environment", "partition"),
    [
        ("x", "", {}, ""),
        ("-p a x", "", {"SBATCH_PARTITION": "b"}, "a"),
        ("--partition=a x", "#SBATCH -pb\n", {}, "a"),
        ("x", "#SBATCH -pb\n", {}, "b"),
        ("x", "", {"SBATCH_PARTITION": "b"}, "b"),
    ],
)
def test_the_jobs_own_partition_counts(words, script, environment, partition):
    partitions = []
    plan(
        ["--elastic=2", *words.split()],
        script,
        environment,
        lambda name: partitions.append(name) or {},
    )
    assert partitions == [partition]


class Login:
    """A login node with a fake Slurm."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.write(
            "sbatch",
            '#!/bin/sh\nprintf "[%s]" "$@"; echo\n'
            'for word; do case $word in *.sh) cat "$word"; ls -d "$word" >seen;; esac; done\n'
            "[ -t 0 ] || cat\nexit ${RC:-0}\n",
        )
        self.write("sinfo", "#!/bin/sh\necho 'p* gpu:a100:4'\n")

    def write(self, name: str, text: str) -> None:
        path = self.directory / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *words: str, stdin: str = "", rc: int = 0):
        path = f"{self.directory}:{os.environ['PATH']}"
        return subprocess.run(
            [sys.executable, ROOT / "wrappers" / "esbatch", *words],
            cwd=self.directory,
            env={"PATH": path, "RC": str(rc)},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def login(tmp_path):
    return Login(tmp_path)


COMMAND = "[--comment=elastic:2-4][--requeue][--open-mode=append][--nodes=1][--gres=gpu:2]"


def test_script_is_copied_without_the_line(login):
    login.write("train.sh", "#!/bin/sh\n#SBATCH --elastic=2-4\necho\n")
    process = login.run("./train.sh", "--epochs", "3", rc=7)
    first, *script = process.stdout.splitlines()
    assert first.startswith(f"{COMMAND}[/tmp/esbatch-")
    assert first.endswith("/train.sh][--epochs][3]")
    assert script == ["#!/bin/sh", "##SBATCH --elastic=2-4", "echo"]
    assert process.returncode == 7
    assert not Path((login.directory / "seen").read_text().strip()).exists()


def test_script_without_the_line_is_submitted_itself(login):
    login.write("train.sh", "#!/bin/sh\necho\n")
    assert login.run("--elastic=2-4", "train.sh").stdout.startswith(f"{COMMAND}[train.sh]\n")


def test_script_from_stdin(login):
    process = login.run(stdin="#!/bin/sh\n#SBATCH --elastic=2-4\necho\n")
    assert process.stdout == f"{COMMAND}\n#!/bin/sh\n##SBATCH --elastic=2-4\necho\n"


def test_plain_submission_and_questions(login):
    assert login.run("-N2", "missing", "x").stdout == "[-N2][missing][x]\n"
    assert login.run("-N2", stdin="#!/bin/sh\n").stdout == "[-N2]\n#!/bin/sh\n"
    assert login.run("--elastic=2-4", "--help").stdout == "[--elastic=2-4][--help]\n"


def test_errors_are_one_line(login):
    process = login.run("--elastic=16-2", "train.sh")
    assert process.returncode == 1
    assert process.stderr == (
        "esbatch: error: elastic: --elastic=16-2: MIN 16 is larger than MAX 2; write 2-16\n"
    )
    process = login.run("--elastic=2", "--wrap=x", rc=255)
    assert (process.returncode, process.stderr) == (255, "")
    (login.directory / "sbatch").unlink()
    process = login.run("--elastic=2", "--wrap=x")
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1


def test_sinfo_may_be_missing(login):
    (login.directory / "sinfo").unlink()
    assert login.run("--elastic=2-4", "--wrap=x").stdout.startswith("[--wrap=x]" + COMMAND)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("srun python train.py", "starts srun without esrun.*in the place of srun"),
        ("cd x; OMP_NUM_THREADS=1 torchrun t.py", "starts torchrun .*write esrun before torchrun"),
        ("ray start --head", "starts ray start without esrun.*; leave out --elastic"),
        ("srun -u --output l python -u -m submitit.core._submit x", "in the place of srun"),
        ("esrun torchrun t.py", None),
        ("# srun python t.py\nbash run.sh", None),
        ("echo srun", None),
    ],
)
def test_a_script_that_does_without_esrun_is_told(login, command, said):
    login.write("train.sh", f"#!/bin/bash\n#SBATCH --elastic=2-4\n{command}\n")
    process = login.run("train.sh")
    assert process.returncode == 0
    assert re.search(said, process.stderr) if said else not process.stderr
    assert process.stderr.count("\n") == (1 if said else 0)
    login.write("rigid.sh", f"#!/bin/bash\n{command}\n")
    assert not login.run("rigid.sh").stderr


def test_advice_changes_nothing_about_the_submission(login):
    login.write("train.sh", "#!/bin/sh\necho\n")
    process = login.run("--advise", "-N2", "train.sh", "--advise", rc=5)
    assert process.stdout.splitlines()[0] == "[-N2][train.sh][--advise]"
    assert process.stderr.startswith("esbatch: advice: no advice: ")
    assert process.stderr.count("\n") == 1
    assert process.returncode == 5
    assert login.run("--advise", "--elastic=2-4", "train.sh").stdout.startswith(
        f"{COMMAND}[train.sh]\n"
    )
