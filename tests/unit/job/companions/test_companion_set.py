"""Companions from the controller's order to their end; commands of Slurm are stand-ins."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from slurm_elastic.core.member_orders import MemberOrders
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job.attempt_trial import AttemptTrial
from slurm_elastic.job.companions import companion_set, companion_submission
from slurm_elastic.job.companions.companion_set import CompanionSet
from slurm_elastic.job.esrun_options import parse
from slurm_elastic.job.launch import RankLaunch
from slurm_elastic.job.report_state import ReportState
from tests.support.job.companion_slurm import CompanionSlurm, eventually

#: A rank: prints its environment, and ends when a file of its companion tells it to.
PROGRAM = (
    "trap '' TERM;"
    ' echo "$SLURM_ELASTIC_JOIN $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT'
    ' ${SLURM_GPUS_PER_NODE-unset} $SLURM_ELASTIC_RUN_ID" >>"$HOME/ranks";'
    ' until [ -e "$HOME/exit-$SLURM_ELASTIC_JOIN" ]; do sleep 0.02; done;'
    ' [ ! -e "$HOME/last-words" ] || cat "$HOME/last-words" >&2;'
    ' exit "$(cat "$HOME/exit-$SLURM_ELASTIC_JOIN")"'
)


class Base:
    """A running job with its set of companions; the test is rank 0 and the controller."""

    def __init__(self, slurm: CompanionSlurm) -> None:
        self.slurm = slurm
        self.launch = RankLaunch(parse(["sh", "-c", PROGRAM]), slurm.env)
        self.launch.settle()
        # Tests run side by side, and a companion kills all processes with its mark.
        self.launch.mark = f"slurm-4711.0.1{slurm.folder}"
        self.launch.environment = slurm.env | {
            "SLURM_ELASTIC_RUN_ID": "slurm-4711",
            "GROUP_WORLD_SIZE": "1",
        }
        self.state = ReportState(Report(job_id=4711, run=0, phase="training", gpus=2))
        self.desired: list[dict[str, int] | None] = []
        self.seq = 0
        self.skipped_s = 0.0
        self.trial = AttemptTrial(
            self.state, run_id="slurm-7", run=0, has_controller=True, directories=[]
        )
        self.companions = CompanionSet(
            self.launch, self.state, self._send, trial=self.trial, clock=self._clock
        )

    def _clock(self) -> float:
        return time.monotonic() + self.skipped_s

    def pass_deadline(self) -> None:
        self.skipped_s += 1000.0

    def _send(self, companions: Mapping[str, int] | None) -> None:
        self.desired.append(companions if companions is None else dict(companions))

    @property
    def report(self) -> Report:
        return self.state.report()

    @property
    def states(self) -> dict[int, str]:
        return {job_id: state for job_id, _, state in self.report.companions}

    def order(self, change: int, *join: int, leave: tuple[int, ...] = (), **fields: object) -> None:
        self.seq += 1
        members = MemberOrders.from_wire(
            {"change": change, "join": join, "leave": leave, "deadline_s": 900.0, **fields}
        )
        orders = Orders(seq=self.seq, in_place=True, members=members)
        self.state.receive(orders, authoritative=True)

    def can_regroup(self) -> None:
        self.companions.on_group({"can": True, "port": 41234})
        eventually(lambda: self.report.in_place, "the report that members can change")

    def regrouped(self, generation: int, **companions: int) -> None:
        members = {job_id.removeprefix("j"): ranks for job_id, ranks in companions.items()}
        self.companions.on_group(
            {"generation": generation, "companions": members, "step": 9, "pause_s": 0.01}
        )

    def until(self, state: str) -> None:
        eventually(lambda: self.report.change_state == state, f"state {state}")

    def exit(self, job_id: int, code: int) -> None:
        """Let the ranks of a companion end."""
        path = self.slurm.folder / f"exit-{job_id}"
        path.with_suffix(".new").write_text(str(code))
        path.with_suffix(".new").rename(path)

    def ranks(self) -> list[list[str]]:
        path = self.slurm.folder / "ranks"
        return sorted(line.split() for line in path.read_text().splitlines())


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompanionSlurm]:
    slurm = CompanionSlurm(tmp_path)
    for name in ("PATH", "HOME"):
        monkeypatch.setenv(name, slurm.env[name])
    yield slurm
    slurm.close()


@pytest.fixture
def base(slurm: CompanionSlurm) -> Iterator[Base]:
    base = Base(slurm)
    base.companions.start()
    base.state.receive(Orders(in_place=True), authoritative=True)
    base.can_regroup()
    yield base
    base.companions.end_attempt(failed=True)


def grown(base: Base, change: int = 1, gpus: int = 2) -> int:
    """Grow by one companion, and return its job id."""
    known = set(base.slurm.submitted())
    base.order(change, gpus)
    base.until("submitted")
    (job_id,) = set(base.slurm.submitted()) - known
    base.slurm.run(job_id, gpus=gpus)
    eventually(lambda: base.states[job_id] == "starting", "the start")
    base.regrouped(change, **{f"j{i}": 2 for i, s in base.states.items() if s != "ended"})
    base.until("done")
    assert base.states[job_id] == "joined"
    return job_id


def test_a_job_grows_and_shrinks(base: Base, slurm: CompanionSlurm) -> None:
    eventually(lambda: base.desired == [{}], "the first message to rank 0")
    base.order(1, 2, 1)
    base.until("submitted")
    assert base.report.companions == ((5001, 2, "submitted"), (5002, 1, "submitted"))
    assert base.report.change == 1
    slurm.run(5001, gpus=2)
    base.until("joining")
    eventually(lambda: base.desired[-1] == {"5001": 2}, "the order to rank 0")
    base.regrouped(1, j5001=2)
    eventually(lambda: base.states[5001] == "joined")
    assert base.report.gpus == 4
    slurm.run(5002, gpus=1)
    eventually(lambda: base.desired[-1] == {"5001": 2, "5002": 1})
    base.regrouped(2, j5001=2, j5002=1)
    base.until("done")
    report = base.report
    assert (report.gpus, report.generation, report.pause_s, report.nodes) == (5, 2, 0.01, 1)
    eventually(lambda: len(base.ranks()) == 3, "three ranks")
    same = ["localhost", "41234", "unset", "slurm-4711"]
    assert base.ranks() == [
        ["5001", "2", "4", "0", *same],
        ["5001", "3", "4", "1", *same],
        ["5002", "4", "5", "0", *same],
    ]
    base.order(2, leave=(5001,))
    base.until("leaving")
    eventually(lambda: base.desired[-1] == {"5002": 1})
    assert slurm.running[5001].poll() is None
    base.regrouped(3, j5002=1)
    base.exit(5001, 0)
    base.until("done")
    assert slurm.ended(5001) == 0
    assert base.states == {5001: "ended", 5002: "joined"}
    assert (base.report.gpus, base.report.change_reason) == (3, None)
    assert not slurm.cancelled()


def test_the_same_order_is_carried_out_once(base: Base, slurm: CompanionSlurm) -> None:
    base.order(3, 1)
    base.until("submitted")
    base.order(3, 1)
    base.order(2, 1, 1, 1)
    base.order(3, 1, leave=(99,))
    base.order(3, 1, cancel=True)
    base.until("failed")
    assert slurm.submitted() == [5001]
    assert slurm.cancelled() == ["--quiet --name=train+1 5001"]
    assert base.report.change == 3
    assert base.report.change_reason == Reason("companion-cancelled", job="5001")


def test_a_program_that_cannot_regroup(slurm: CompanionSlurm) -> None:
    base = Base(slurm)
    base.companions.start()
    base.order(1, 2)
    base.until("failed")
    assert base.report.change_reason == Reason("members-fixed")
    base.companions.on_group({"can": False, "why": "stages"})
    eventually(lambda: base.report.not_in_place == "stages")
    assert base.report.in_place is False
    assert not slurm.submitted()
    base.companions.end_attempt(failed=False)
    assert base.report.in_place is None


def test_a_refusal_takes_the_others_back(base: Base, slurm: CompanionSlurm) -> None:
    slurm.refuse("none", "sbatch: error: Batch job submission failed: Access/permission denied")
    job_id = grown(base)
    slurm.refuse("none", "sbatch: error: Batch job submission failed: Access/permission denied")
    base.order(2, 1, 1, leave=(job_id,))
    base.until("failed")
    assert base.report.change_reason == Reason("sbatch-failed", error="Access/permission denied")
    assert slurm.cancelled() == ["--quiet --name=train+1 5002"]
    assert base.states == {job_id: "joined"}, "nothing has changed"


def test_those_that_are_late_are_given_up(base: Base, slurm: CompanionSlurm) -> None:
    base.order(1, 1, 1)
    base.until("submitted")
    slurm.run(5001)
    eventually(lambda: base.states[5001] == "starting")
    base.regrouped(1, j5001=1)
    eventually(lambda: base.states[5001] == "joined")
    base.pass_deadline()
    base.until("done")
    assert base.states == {5001: "joined", 5002: "ended"}
    assert base.report.change_reason == Reason("companion-late", job="5002")
    assert slurm.cancelled() == ["--quiet --name=train+1 5002"]


def test_newcomers_that_never_join_are_ended(base: Base, slurm: CompanionSlurm) -> None:
    base.order(1, 2)
    base.until("submitted")
    slurm.run(5001, gpus=2)
    eventually(lambda: base.desired[-1] == {"5001": 2})
    base.pass_deadline()
    base.until("failed")
    eventually(lambda: base.desired[-1] == {})
    assert slurm.ended(5001) == 0
    assert base.states == {5001: "ended"}


def test_newcomers_that_die_before_they_join(base: Base, slurm: CompanionSlurm) -> None:
    base.order(1, 2)
    base.until("submitted")
    base.exit(5001, 3)
    slurm.run(5001, gpus=2)
    base.until("failed")
    assert base.report.change_reason == Reason("companion-exited", job="5001", exit_code=3)
    assert slurm.ended(5001) == 0
    eventually(lambda: base.desired[-1] == {})


def test_newcomers_that_run_out_of_memory(base: Base, slurm: CompanionSlurm) -> None:
    (slurm.folder / "last-words").write_text("MemoryError\n")
    base.order(1, 2)
    base.until("submitted")
    base.exit(5001, 1)
    slurm.run(5001, gpus=2)
    base.until("failed")
    lack = Reason("companion-out-of-memory", job="5001", gpus=4, nodes=1)
    assert base.report.change_reason == lack


def test_members_that_run_out_of_memory(base: Base, slurm: CompanionSlurm) -> None:
    (slurm.folder / "last-words").write_text("MemoryError\n")
    first, second = grown(base, 1), grown(base, 2)
    base.order(3, leave=(second,))
    base.regrouped(3, **{f"j{first}": 2})
    eventually(lambda: base.report.gpus == 4)
    assert not base.companions.lacked_memory
    base.exit(first, 1)
    lack = Reason("companion-out-of-memory", job=str(first), gpus=4, nodes=1)
    eventually(lambda: base.report.change_reason == lack)
    assert base.companions.lacked_memory
    base.regrouped(4)
    eventually(lambda: base.report.gpus == 2)
    assert not base.companions.lacked_memory, "the others train without it"
    assert base.report.change_reason == lack
    base.exit(second, 0)


def test_a_companion_of_another_size_does_not_join(base: Base, slurm: CompanionSlurm) -> None:
    base.order(1, 2)
    base.until("submitted")
    slurm.run(5001, gpus=1)
    base.until("failed")
    assert base.report.change_reason == Reason(
        "companion-size-differs", job="5001", gpus=1, ordered=2
    )
    assert slurm.ended(5001) == 0


def test_ranks_that_die_leave_the_job_smaller(base: Base, slurm: CompanionSlurm) -> None:
    job_id = grown(base)
    base.exit(job_id, 1)
    eventually(lambda: base.states[job_id] == "ended")
    assert slurm.ended(job_id) == 0
    eventually(lambda: base.desired[-1] == {})
    base.regrouped(2)
    eventually(lambda: base.report.gpus == 2)
    assert base.report.change_state == "done", "the change itself had succeeded"


def test_a_member_that_rank_0_lost_is_ended(base: Base, slurm: CompanionSlurm) -> None:
    job_id = grown(base)
    base.regrouped(2)
    eventually(lambda: base.states[job_id] == "ended")
    assert slurm.ended(job_id) == 0
    eventually(lambda: base.report.gpus == 2)


def test_a_script_that_dies_takes_its_companion_along(base: Base, slurm: CompanionSlurm) -> None:
    job_id = grown(base)
    slurm.running[job_id].kill()
    eventually(lambda: base.states[job_id] == "ended")
    eventually(lambda: base.desired[-1] == {})
    eventually(lambda: f"--quiet --name=train+1 {job_id}" in slurm.cancelled())
    assert f"--quiet --name=train+1 --signal=KILL {job_id}.0" in slurm.cancelled()
    base.exit(job_id, 0)  # of a real Slurm's KILL


def test_a_companion_that_slurm_ends_leaves_first(base: Base, slurm: CompanionSlurm) -> None:
    job_id = grown(base)
    slurm.running[job_id].send_signal(signal.SIGTERM)
    eventually(lambda: base.states[job_id] == "leaving")
    eventually(lambda: base.desired[-1] == {})
    base.exit(job_id, 0)
    assert slurm.ended(job_id) == 0


def test_leavers_that_stay_are_ended_at_the_deadline(base: Base, slurm: CompanionSlurm) -> None:
    job_id = grown(base)
    base.order(2, leave=(job_id,))
    base.until("leaving")
    base.pass_deadline()
    base.until("done")
    assert slurm.ended(job_id) == 0
    eventually(lambda: base.states[job_id] == "ended")


def test_leaves_may_be_added_to_a_change(base: Base, slurm: CompanionSlurm) -> None:
    first = grown(base, 1)
    second = grown(base, 2)
    base.order(3, leave=(first,))
    base.until("leaving")
    base.order(3, leave=(first, second))
    eventually(lambda: base.desired[-1] == {})
    for job_id in (first, second):
        base.exit(job_id, 0)
        assert slurm.ended(job_id) == 0
    base.until("done")


def test_companions_end_with_the_program(base: Base, slurm: CompanionSlurm) -> None:
    joined = grown(base)
    base.order(2, 1)
    base.until("submitted")
    base.companions.end_attempt(failed=True)
    assert slurm.ended(joined) == 0
    assert slurm.cancelled() == ["--quiet --name=train+1 5002"]
    report = base.report
    assert (report.change_state, report.gpus, report.in_place) == ("failed", 2, None)
    assert base.desired[-1] == {}
    base.can_regroup()
    grown(base, 3)


def test_ranks_of_companions_may_finish_with_those_of_the_base(
    base: Base, slurm: CompanionSlurm
) -> None:
    job_id = grown(base)
    base.exit(job_id, 0)
    base.companions.end_attempt(failed=False)
    assert slurm.ended(job_id) == 0


def test_a_script_that_does_not_end_is_cancelled(
    base: Base, slurm: CompanionSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = grown(base)
    monkeypatch.setattr(companion_set, "_GONE_S", 0.2)
    os.kill(slurm.running[job_id].pid, signal.SIGSTOP)
    base.order(2, leave=(job_id,), deadline_s=0.1)
    eventually(lambda: f"--quiet --name=train+1 {job_id}" in slurm.cancelled(), "scancel")
    os.kill(slurm.running[job_id].pid, signal.SIGCONT)
    slurm.ended(job_id)
    base.exit(job_id, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"can": "yes"}, {"can": True, "port": "x"}, {"generation": -1, "companions": {"x": 2}},
        {"dropped": 3, "why": "a\nb"}, {"companions": {"99": 1}}, {"mood": 1},
        {"generation": "x", "companions": {"5001": "two"}, "pause_s": [], "step": {}},
    ],
)  # fmt: skip
def test_lines_that_rank_0_does_not_send(base: Base, fields: dict[str, object]) -> None:
    base.companions.on_group(fields)
    base.can_regroup()
    grown(base)
    assert base.report.gpus == 4


def test_an_sbatch_that_hangs_fails_the_change(
    base: Base, slurm: CompanionSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companion_submission, "_TIMEOUT_S", 0.2)
    (slurm.folder / "hang").touch()
    base.order(1, 1)
    base.until("failed")
    assert base.report.change_reason == Reason("sbatch-unanswered", waited_s=0.2)


def test_a_controller_that_changes_no_members(slurm: CompanionSlurm) -> None:
    base = Base(slurm)
    base.companions.start()
    assert base.desired == [{}], "the program may begin before the controller answers"
    base.state.receive(Orders(seq=1, in_place=False), authoritative=True)
    assert base.desired == [{}, None]
    base.state.receive(Orders(seq=2, in_place=True), authoritative=True)
    assert base.desired == [{}, None, {}]
    base.companions.end_attempt(failed=True)


def test_a_growth_puts_the_program_on_trial_and_a_loss_blames_no_size(base: Base) -> None:
    own = sum(base.launch.tasks)
    assert base.trial.failed_gpus is None
    job_id = grown(base)
    assert base.trial.failed_gpus == own + 2
    base.companions.on_group({"generation": 2, "companions": {}, "step": 12, "lost": [str(job_id)]})
    eventually(lambda: base.trial.failed_gpus == own, "the trial after the loss")
    base.state.update({"checkpoint_step": 13})
    assert base.trial.failed_gpus is None
