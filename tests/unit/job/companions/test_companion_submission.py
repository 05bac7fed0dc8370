"""How companions are submitted."""

import time
from pathlib import Path

import pytest

from slurm_elastic.core.reason import Reason
from slurm_elastic.job.companions import companion_submission
from slurm_elastic.job.companions.companion_submission import (
    CompanionRefusedError,
    CompanionShape,
    CompanionSubmission,
    minutes_left,
    own_hosts,
    refusal,
)
from tests.support.job.companion_slurm import CompanionSlurm

FAILED = "Batch job submission failed:"
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.fixture
def slurm(tmp_path: Path) -> CompanionSlurm:
    return CompanionSlurm(tmp_path)


def submission(slurm: CompanionSlurm, **env: str) -> CompanionSubmission:
    return CompanionSubmission(
        slurm.env | env,
        job_id=4711,
        run=2,
        shape=CompanionShape.of_base(slurm.env | env, (4,), (2,)),
        port=4000,
        secret="s3cret",
    )


def test_every_option_is_on_the_command_line(slurm: CompanionSlurm) -> None:
    env = {
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_ACCOUNT": "research",
        "SLURM_JOB_QOS": "normal",
        "SLURM_JOB_RESERVATION": "course",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 3540),
        "SLURM_MEM_PER_CPU": "500",
    }
    assert submission(slurm, **env).submit(7, 3, "a100") == 5001
    assert slurm.options(5001) == [
        *("--hold", "--parsable", "--no-requeue", "--nodes=1", "--output=/dev/null"),
        *("--job-name=train+1", "--comment=selastic:companion:4711:2:7", "--gres=gpu:a100:3"),
        *("--ntasks=3", "--ntasks-per-node=3", "--cpus-per-task=2", "--mem-per-cpu=500M"),
        *("--partition=gpu", "--account=research", "--qos=normal", "--reservation=course"),
        "--time=59",
    ]


def test_the_base_and_the_users_profile_change_nothing(slurm: CompanionSlurm) -> None:
    env = {
        "SBATCH_GPUS": "3",
        "SLURM_ELASTIC_RUN_ID": "x-4711",
        "SLURM_SPANK_ELASTIC": "2-8",
        "_SLURM_SPANK_OPTION_elastic_elastic": "2-8",
        "SLURM_ARRAY_TASK_ID": "4",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "TRAINING_SECRET": "x",
    }
    submission(slurm, **env).submit(7, 1, "")
    received = slurm.environment(5001)
    ours = {name for name in received if name not in ("PWD", "SHLVL", "_", "OLDPWD")}
    assert ours == {
        *("PATH", "HOME", "SLURM_CONF"),
        *("ESRUN_COMPANION_HOSTS", "ESRUN_COMPANION_PORT", "ESRUN_COMPANION_SECRET"),
    }
    assert "--gres=gpu:1" in slurm.options(5001)
    script = (slurm.folder / "5001" / "script").read_text()
    assert "s3cret" not in script, "others may read the script of a job"
    assert "s3cret" not in " ".join(slurm.options(5001))


@pytest.mark.parametrize(
    ("env", "option"),
    [
        ({}, None),
        ({"SLURM_MEM_PER_NODE": "4000"}, "--mem=6000M"),
        ({"SLURM_MEM_PER_GPU": "700"}, "--mem-per-gpu=700M"),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_NODE": "lots"}, None),
    ],
)
def test_memory_is_that_of_the_base_per_gpu(env: dict[str, str], option: str | None) -> None:
    shape = CompanionShape.of_base(env, (8, 2), (2, 1))
    assert shape.cpus == 2
    found = [word for word in shape.options(3) if word.startswith("--mem")]
    assert found == ([option] if option else [])


def test_reservations_of_the_controller_are_not_named(slurm: CompanionSlurm) -> None:
    words = submission(slurm, SLURM_JOB_RESERVATION="selastic_12").command(1, 1, "")
    assert not [word for word in words if word.startswith("--reservation")]


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (
            "sbatch: error: Batch job submission failed: Access/permission denied",
            "Access/permission denied",
        ),
        (
            f"sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: {FAILED} {POLICY}",
            f"AssocMaxSubmitJobLimit: {POLICY}",
        ),
        ("", "it failed without a message"),
    ],
)
def test_a_refusal_is_one_line(errors: str, reason: str) -> None:
    assert refusal(errors) == reason
    assert "\n" not in refusal(errors + "\x1b[2J" + "x" * 1000)
    assert len(refusal("x" * 1000)) <= 200


def test_what_sbatch_says_is_raised(slurm: CompanionSlurm) -> None:
    slurm.refuse("sbatch: error: Batch job submission failed: Access/permission denied")
    with pytest.raises(CompanionRefusedError) as refused:
        submission(slurm).submit(7, 1, "")
    assert refused.value.reason == Reason("sbatch-failed", error="Access/permission denied")


def test_an_sbatch_that_hangs_is_ended(
    slurm: CompanionSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companion_submission, "_TIMEOUT_S", 0.2)
    (slurm.folder / "hang").touch()
    with pytest.raises(CompanionRefusedError, match=r"\(sbatch-unanswered waited_s=0.2\)"):
        submission(slurm).submit(7, 1, "")


def test_without_sbatch(slurm: CompanionSlurm) -> None:
    (slurm.folder / "bin" / "sbatch").unlink()
    with pytest.raises(CompanionRefusedError, match=r"sbatch-failed error=.No such file"):
        submission(slurm).submit(7, 1, "")


def test_the_time_that_is_left() -> None:
    assert minutes_left({}) is None
    assert minutes_left({"SLURM_JOB_END_TIME": "Unknown"}) is None
    assert minutes_left({"SLURM_JOB_END_TIME": "1000"}) == 1


def test_the_hosts_to_try() -> None:
    assert own_hosts({"SLURMD_NODENAME": "g01"})[0] == "g01"
    assert len(own_hosts({})) == 1


@pytest.mark.parametrize("name", ["train", "a b", "x,y", "*", "--all", 'it\'s "quoted" $HOME'])
def test_a_companion_is_cancelled_by_id_and_name(slurm: CompanionSlurm, name: str) -> None:
    companions = submission(slurm, SLURM_JOB_NAME=name)
    companions.submit(7, 1, "")
    companions.cancel(5001, 7)
    companions.cancel(5001, 7, kill_ranks=True)
    assert slurm.cancelled() == [
        f"--quiet --name={name}+1 5001",
        f"--quiet --name={name}+1 --signal=KILL 5001.0",
        f"--quiet --name={name}+1 5001",
    ]


def test_a_companion_that_its_owner_has_renamed_is_cancelled(slurm: CompanionSlurm) -> None:
    companions = submission(slurm)
    companions.submit(7, 1, "")
    options = slurm.folder / "5001" / "options"
    options.write_text(options.read_text().replace("train+1", "other"))
    companions.cancel(5001, 7)
    assert slurm.cancelled() == ["--quiet --name=other 5001"]


@pytest.mark.parametrize(
    "comment",
    [
        "",
        "selastic:companion:4711:2:70",
        "selastic:companion:4711:2:6",
        "selastic:companion:4711:3:7",
        "selastic:companion:4712:2:7",
        "x selastic:companion:4711:2:7",
    ],
)
def test_another_job_that_has_got_the_id_is_let_alone(slurm: CompanionSlurm, comment: str) -> None:
    companions = submission(slurm)
    companions.submit(7, 1, "")
    (slurm.folder / "5001" / "options").write_text(f"--comment={comment}\n--job-name=train+1\n")
    companions.cancel(5001, 7, kill_ranks=True)
    companions.cancel(5002, 7)  # Slurm has no job of that id
    assert slurm.cancelled() == []


def test_without_an_answer_nothing_is_cancelled(
    slurm: CompanionSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companion_submission, "_TIMEOUT_S", 0.2)
    companions = submission(slurm)
    (slurm.folder / "bin" / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    companions.cancel(5001, 7)
    (slurm.folder / "bin" / "squeue").unlink()
    companions.cancel(5001, 7)
    assert slurm.cancelled() == []
