"""--elastic through the real sbatch, salloc, srun and slurmctld: SPANK plugin, Lua, esbatch."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_elastic.core.directive import Directive, DirectiveError
from slurm_elastic.core.submission import Submission, parse_admin_comment
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until
from tests.support.directives import DIRECTIVES, octets

# Submits one held job per directive and tells what sbatch said.
SUBMIT_ALL = """
import json, subprocess, sys
said, jobs = [], []
for text in json.load(sys.stdin):
    option = b"--elastic=" + bytes.fromhex(text)
    done = subprocess.run(["sbatch", "-H", "--parsable", "-o/dev/null", option, "--wrap=true"],
                          capture_output=True)
    jobs += done.stdout.split()
    said.append([done.returncode, done.stderr.decode("utf-8", "backslashreplace")])
if jobs:
    subprocess.run(["scancel", *jobs])
print(json.dumps(said))
"""


def submit_all(cluster: SlurmCluster, texts: list[bytes]) -> list[tuple[int, list[str]]]:
    done = cluster.exec(
        ["python3", "-c", SUBMIT_ALL],
        user="bob",
        stdin=json.dumps([text.hex() for text in texts]),
        timeout=300,
    )
    return [(code, said.splitlines()) for code, said in json.loads(done.stdout)]


def job(cluster: SlurmCluster, number: int | str) -> dict[str, Any]:
    """Return a job as slurmctld shows it."""
    done = cluster.exec(["scontrol", "--json", "show", "job", str(number)])
    return json.loads(done.stdout)["jobs"][0]


def submission(cluster: SlurmCluster, number: int | str) -> Submission | None:
    return parse_admin_comment(job(cluster, number)["admin_comment"])


def directive(cluster: SlurmCluster, number: int | str) -> str:
    """Return the directive on record, "" for a rigid job."""
    recorded = submission(cluster, number)
    return str(recorded.directive) if recorded else ""


def refused(cluster: SlurmCluster, *options: str, script: str = "true") -> str:
    """Submit what must be refused; return the one line that says why."""
    done = cluster.exec(
        ["sbatch", "-H", "-o/dev/null", *options],
        user="alice",
        stdin=f"#!/bin/bash\n{script}\n",
        check=False,
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "elastic: " in line]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture
def held(cluster: SlurmCluster) -> Any:
    """Submit a held job and return its number."""

    def submit(*options: str, script: str = "true") -> int:
        return cluster.sbatch(script, "-H", "-o/dev/null", *options)

    return submit


@pytest.fixture
def directory(cluster: SlurmCluster) -> Iterator[str]:
    """Yield an empty folder of alice's on the shared volume."""
    path = f"/shared/home/alice/option-{time.monotonic_ns()}"
    cluster.exec(["mkdir", path], user="alice")
    yield path
    cluster.exec(["rm", "-rf", path], user="alice")


def passed_on(text: bytes) -> str:
    """Return the value that the SPANK plugin passes on: cut, and printable ASCII."""
    return re.sub(rb"[^\x20-\x7e]", b"?", text[:511]).decode("ascii")


def test_every_valid_example_passes(cluster: SlurmCluster) -> None:
    texts = [octets(row) for row in DIRECTIVES["valid"]]
    for text, (_, lines) in zip(texts, submit_all(cluster, texts), strict=True):
        # Slurm itself may find no such nodes; the directive is not what it complains about.
        assert not [line for line in lines if "elastic: --elastic" in line], text


def test_every_invalid_example_is_refused_with_pythons_words(cluster: SlurmCluster) -> None:
    texts = [text for row in DIRECTIVES["invalid"] if b"\0" not in (text := octets(row))]
    for text, (code, lines) in zip(texts, submit_all(cluster, texts), strict=True):
        with pytest.raises(DirectiveError) as caught:
            Directive.parse(passed_on(text))
        assert code == 1, (text, lines)
        assert lines[0] == f"sbatch: error: elastic: {caught.value}"


def test_help_says_what_it_is(cluster: SlurmCluster) -> None:
    for command in ("sbatch", "salloc", "srun"):
        text = cluster.exec([command, "--help"]).stdout
        assert "--elastic=MIN-MAX[,key=value...]" in text
        assert "[elastic]" in text


def test_the_directive_alone_suffices(cluster: SlurmCluster) -> None:
    done = cluster.exec(
        ["sbatch", "-H", "-o/dev/null"],
        user="alice",
        stdin="#!/bin/bash\n#SBATCH --elastic=2-16,types=a100:v100,freeze=off\ntrue\n",
    )
    number = int(done.stdout.split()[-1])
    cluster.jobs.append(number)
    assert done.stderr == (
        "sbatch: elastic: 2-16 GPUs, a100 before v100; starts at 2."
        " `selastic explain JOBID` shows what is done and why\n"
    )
    record = job(cluster, number)
    assert re.fullmatch(
        r'{"at":\d{10},"elastic":"2-16,types=a100:v100","shape":{},"v":1}', record["admin_comment"]
    )
    assert record["requeue"] is True
    assert record["tres_per_node"] == "gres/gpu:2"
    assert record["node_count"]["number"] == 1


@pytest.mark.parametrize(
    ("options", "form", "value", "shape"),
    [
        ("--gres=gpu:2", "tres_per_node", "gres/gpu:2", {"tres_per_node": "gres/gpu:2"}),
        ("--gpus=4", "tres_per_job", "gres/gpu:4", {"tres_per_job": "gres/gpu:4"}),
        ("--gpus=8", "tres_per_job", "gres/gpu:a100:8", {"tres_per_job": "gres/gpu:8"}),
        (
            "--gpus-per-node=v100:2 -N2",
            "tres_per_node",
            "gres/gpu:v100:2",
            {"tres_per_node": "gres/gpu:v100:2", "min_nodes": 2, "max_nodes": 2},
        ),
        (
            "--gpus-per-task=1 -n 4",
            "tres_per_task",
            "gres/gpu=1",
            {"tres_per_task": "gres/gpu=1", "num_tasks": 4, "tres_bind": "gres/gpu:per_task:1"},
        ),
        ("--ntasks-per-gpu=1 -n 4", "tres_per_job", "", {"ntasks_per_tres": 1, "num_tasks": 4}),
        (
            "--time=UNLIMITED --nice=7 --mem=0 -C a100|v100 --begin=now+1hour",
            "tres_per_node",
            "gres/gpu:2",
            {"time_limit": 4294967295, "nice": 7, "min_mem_per_node": 0, "features": "a100|v100"},
        ),
    ],
)
def test_submit_forms(cluster: SlurmCluster, held: Any, options, form, value, shape) -> None:
    number = held("--elastic=2-16", *options.split())
    assert job(cluster, number)[form] == value
    recorded = submission(cluster, number)
    assert recorded is not None
    assert recorded.directive == Directive(2, 16)
    given = dict(recorded.shape)
    if "begin" in options:
        assert isinstance(given.pop("begin_time"), int)
    assert given == shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--elastic=4-16 --gres=gpu:2", "asks for 2 GPUs to start with, outside 4-16"),
        ("--elastic=2-16,types=v100 --gpus=a100:4", "asks for 4 a100 to start with"),
        ("--elastic=2-16 --gres=gpu:a100:1,gpu:v100:1", "two types of GPUs"),
        ("--elastic=2-16 --gres=gpu:a100_1g.5gb:2", "a slice of a GPU (MIG)"),
        ("--elastic=2-16 --no-requeue", "leave out --no-requeue"),
        ("--elastic=2-16 -N4", "4 nodes need as many GPUs at least"),
        ("--comment=elastic:16-2", "MIN 16 is larger than MAX 2; write 2-16"),
        ("--reservation=selastic_1", "belongs to the elastic controller"),
    ],
)
def test_a_faulty_option_is_refused_at_the_terminal(
    cluster: SlurmCluster, options: str, message: str
) -> None:
    assert message in refused(cluster, *options.split())


def test_heterogeneous_jobs_are_refused(cluster: SlurmCluster) -> None:
    script = "#SBATCH --elastic=2-4\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n1\ntrue"
    assert "heterogeneous jobs cannot be resized" in refused(cluster, script=script)


def test_every_array_task_has_the_record(cluster: SlurmCluster) -> None:
    number = cluster.sbatch("sleep 60", "--elastic=1-2", "--array=1-2", "-o/dev/null")
    assert cluster.wait(number, "RUNNING\nRUNNING")
    for task in (f"{number}_1", f"{number}_2"):
        assert directive(cluster, task) == "1-2"


def test_command_line_beats_environment_beats_script(cluster: SlurmCluster, held: Any) -> None:
    script = "#SBATCH --elastic=3\ntrue"

    def chosen(*options: str, environment: str = "") -> str:
        words = " ".join(options)
        done = cluster.exec(
            f"{environment} sbatch --parsable -H -o/dev/null {words}",
            user="alice",
            stdin=f"#!/bin/bash\n{script}\n",
        )
        cluster.jobs.append(int(done.stdout))
        return directive(cluster, cluster.jobs[-1])

    assert chosen() == "3"
    assert chosen(environment="SLURM_ELASTIC=2") == "2"
    assert chosen("--elastic=1", environment="SLURM_ELASTIC=2") == "1"
    assert chosen("--elastic=3") == "3"
    twice = "#SBATCH --elastic=2\n#SBATCH --elastic=3\ntrue"
    line = refused(cluster, script=twice)
    assert line.endswith("elastic: --elastic=3: differs from --elastic=2 given before; keep one")


def test_faulty_environment_is_refused(cluster: SlurmCluster) -> None:
    done = cluster.exec(
        "SLURM_ELASTIC=$'4-2\\e[31m' sbatch -H --wrap=true", user="alice", check=False
    )
    assert done.returncode == 1
    assert "\x1b" not in done.stderr
    assert 'elastic: --elastic=4-2?[31m: "4-2?[31m" is neither a number' in done.stderr


@pytest.mark.parametrize(
    ("options", "line", "environment", "appends"),
    [
        ("", "--elastic=1", "", True),
        ("--elastic=1", "", "", True),
        ("--ela=1", "", "", True),
        ("", "", "SLURM_ELASTIC=1", True),
        ("", "", "", False),
        ("--elastic=1 --open-mode=truncate", "", "", False),
        ("--elastic=1", "", "SBATCH_OPEN_MODE=truncate", False),
    ],
)
def test_output_is_appended(
    cluster: SlurmCluster, directory: str, options: str, line: str, environment: str, appends: bool
) -> None:
    command = f"cd {directory}; echo old >out; {environment} sbatch -W -o out {options}"
    script = f"#!/bin/bash\n#SBATCH {line}\necho new ${{SBATCH_OPEN_MODE:-clean}}\n"
    cluster.exec(command, user="alice", stdin=script)
    text = cluster.exec(["cat", f"{directory}/out"]).stdout
    kept = "truncate" if "SBATCH" in environment else "clean"
    assert text == ("old\n" if appends else "") + f"new {kept}\n"


def test_job_starts_at_min_and_survives_a_requeue(cluster: SlurmCluster, directory: str) -> None:
    script = f"echo $SLURM_RESTART_COUNT $CUDA_VISIBLE_DEVICES >>{directory}/out; sleep 60"
    number = cluster.sbatch(script, "--elastic=2-4", "-o", f"{directory}/log")
    written = ["cat", f"{directory}/out"]
    until(lambda: cluster.exec(written, check=False).stdout == "0,1\n")
    cluster.exec(["scontrol", "requeue", "Incomplete", str(number)], user="alice")
    cluster.wait(number, "PENDING")
    assert directive(cluster, number) == "2-4"


def test_several_nodes_hold_one_type(cluster: SlurmCluster) -> None:
    types = {}
    for line in cluster.exec("sinfo -h -N -o '%N %G'").stdout.splitlines():
        name, gres = line.split()
        types[name] = gres.split(":")[1]
    v100 = next(name for name in types if types[name] == "v100")
    for options in (["-w", v100], ["-C", "v100"], ["--gpus=8", "-C", "v100"], ["-N2"]):
        number = cluster.sbatch("sleep 60", "--elastic=8-16", "-o/dev/null", *options)
        cluster.wait(number, "RUNNING")
        nodes = job(cluster, number)["job_resources"]["nodes"]["allocation"]
        kinds = {types[node["name"]] for node in nodes}
        assert len(nodes) == 2
        assert len(kinds) == 1, options
        assert "-N2" in options or kinds == {"v100"}
        cluster.cancel()


def test_jobs_of_an_elastic_job_are_not_elastic(cluster: SlurmCluster, directory: str) -> None:
    script = (
        "sbatch --parsable -H -o/dev/null --wrap=true >plain;"
        " sbatch --parsable -H -o/dev/null --elastic=3 --wrap=true >own"
    )
    number = cluster.sbatch(script, "--elastic=1-2", "-D", directory, "-o", f"{directory}/log")
    cluster.wait(number, "COMPLETED")
    plain, own = cluster.exec(["cat", f"{directory}/plain", f"{directory}/own"]).stdout.split()
    cluster.jobs += [int(plain), int(own)]
    assert directive(cluster, int(plain)) == ""
    assert directive(cluster, int(own)) == "3"


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_interactive_jobs_run_unmanaged(cluster: SlurmCluster, command: str) -> None:
    count = "scontrol --json show job $SLURM_JOB_ID"
    done = cluster.exec([command, "--elastic=2-4", "bash", "-c", count], user="alice")
    assert "elastic: only batch jobs can be resized: this one stays at 2" in done.stderr
    record = json.loads(done.stdout)["jobs"][0]
    assert record["admin_comment"] == ""
    assert record["tres_per_node"] == "gres/gpu:2"


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_interactive_jobs_with_a_faulty_directive_are_refused(
    cluster: SlurmCluster, command: str
) -> None:
    done = cluster.exec([command, "--elastic=4-2", "true"], user="alice", check=False)
    assert done.returncode == 1
    assert "elastic: --elastic=4-2: MIN 4 is larger than MAX 2; write 2-4" in done.stderr


def test_owner_cannot_touch_record_nor_enter_reservation(cluster: SlurmCluster, held: Any) -> None:
    number = held("--elastic=2-4", "--comment=mine")
    update = ["scontrol", "update", f"jobid={number}"]
    forged = '{"elastic":"1-999","shape":{},"v":1}'
    done = cluster.exec([*update, f"AdminComment={forged}"], user="alice", check=False)
    assert done.returncode == 1
    assert directive(cluster, number) == "2-4"
    name = "selastic_test_option"
    cluster.exec(
        f"scontrol create reservation ReservationName={name} Users=alice,selastic StartTime=now"
        " Duration=10 NodeCnt=1 Flags=IGNORE_JOBS,OVERLAP",
        user="selastic",
    )
    try:
        done = cluster.exec([*update, f"ReservationName={name}"], user="alice", check=False)
        assert done.returncode == 1
        assert "belongs to the elastic controller" in done.stderr
        cluster.exec([*update, f"ReservationName={name}"], user="selastic")
        cluster.exec([*update, "ReservationName="], user="alice")
        cluster.exec([*update, "Comment=other"], user="alice")
    finally:
        cluster.exec([*update, "ReservationName="], user="selastic", check=False)
        cluster.exec(["scontrol", "delete", f"ReservationName={name}"], user="selastic")


def test_portable_form(cluster: SlurmCluster, held: Any) -> None:
    number = held("--comment=elastic:2-4,notice=9 my words")
    assert directive(cluster, number) == "2-4,notice=9"
    assert job(cluster, number)["comment"] == "my words"
    assert job(cluster, held("--comment=elastic: a plan"))["admin_comment"] == ""


def test_esbatch(cluster: SlurmCluster, directory: str) -> None:
    script = "#!/bin/bash\n#SBATCH --elastic=2-4\n#SBATCH --comment=mine\necho $SLURM_JOB_NAME $@\n"
    cluster.exec(f"cat >{directory}/train.sh", user="alice", stdin=script)
    command = f"cd {directory}; esbatch --wait --parsable -o out -t 5 train.sh --lr 1"
    done = cluster.exec(command, user="alice")
    number = int(done.stdout)
    assert cluster.exec(["cat", f"{directory}/out"]).stdout == "train.sh --lr 1\n"
    recorded = submission(cluster, number)
    assert recorded is not None
    assert recorded.directive == Directive(2, 4)
    assert recorded.shape["time_limit"] == 5
    assert job(cluster, number)["comment"] == "mine"
    cluster.exec(f"echo exit 3 >>{directory}/train.sh", user="alice")
    assert cluster.exec(command, user="alice", check=False).returncode == 3
    done = cluster.exec(f"esbatch --elastic=4-2 {directory}/train.sh", user="alice", check=False)
    assert done.stderr.endswith("elastic: --elastic=4-2: MIN 4 is larger than MAX 2; write 2-4\n")
