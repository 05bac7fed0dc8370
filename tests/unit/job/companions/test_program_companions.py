"""Programs that are started again on a base and its companions; commands of Slurm are stand-ins."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_elastic.core.member_orders import MemberOrders
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job.companions.program_companions import ProgramCompanions
from slurm_elastic.job.esrun_options import parse
from slurm_elastic.job.launch import RankLaunch
from slurm_elastic.job.report_state import ReportState
from tests.support.job.companion_slurm import CompanionSlurm, eventually
from tests.support.patience import PATIENCE_S


class Program:
    """A job whose program the test starts and ends; the test is the controller, too."""

    def __init__(
        self, slurm: CompanionSlurm, *options: str, may_repeat: Callable[[], bool] = lambda: True
    ) -> None:
        self.slurm = slurm
        self.launch = RankLaunch(parse([*(options or ("--checkpoint=x",)), "train.sh"]), slurm.env)
        self.launch.settle()
        self.launch.mark = f"slurm-4711.0.1{slurm.folder}"
        self.state = ReportState(Report(job_id=4711, run=0, phase="training", gpus=2))
        self.ended = threading.Event()
        self.seq = 0
        #: Change whose notice is over, at each end.
        self.served: list[int | None] = []
        self.companions = ProgramCompanions(
            self.launch,
            self.state,
            lambda _: None,
            end_ranks=self.ended.set,
            may_repeat=may_repeat,
        )

    @property
    def report(self) -> Report:
        return self.state.report()

    @property
    def parts(self) -> list[int]:
        """Companions with which the program was started last."""
        return [part.job_id for part in self.launch.parts]

    def order(self, change: int, *join: int, leave: tuple[int, ...] = (), **fields: object) -> None:
        self.seq += 1
        text = {"change": change, "join": join, "leave": leave, "deadline_s": 900.0}
        members = MemberOrders.from_wire({**text, "restart": "prepare", **fields})
        orders = Orders(seq=self.seq, in_place=True, members=members)
        self.state.receive(orders, authoritative=True)

    def until(self, state: str) -> None:
        eventually(lambda: self.report.change_state == state, f"state {state}")

    def start(self) -> None:
        """Start the program, as the supervisor does."""
        self.launch.parts = self.companions.begin_start()
        self.companions.started()

    def ends(
        self, code: int = 137, *, failed_in: int | None = None, on_trial: bool = False
    ) -> bool:
        """End the program; return whether it is started again."""
        self.ended.clear()
        self.companions.end_start(failed=code != 0)
        again = self.companions.restarts(code, failed_in, on_trial=on_trial)
        self.served.append(self.companions.due_change)
        if again:
            self.start()
        return again

    def grows(self, change: int, *gpus: int, leave: tuple[int, ...] = ()) -> list[int]:
        """Grow by companions, and return them."""
        known = set(self.slurm.submitted())
        self.order(change, *gpus)
        self.until("submitted")
        new = sorted(set(self.slurm.submitted()) - known)
        for job_id, count in zip(new, gpus, strict=True):
            self.slurm.run(job_id, gpus=count)
        rows = self.report.companions
        eventually(lambda: {r[2] for r in self.report.companions if r[0] in new} == {"running"})
        assert not self.ended.is_set(), f"the program trains meanwhile: {rows}"
        self.order(change, *gpus, leave=leave, restart="now")
        assert self.ended.wait(PATIENCE_S)
        assert self.ends()
        self.until("done")
        return new


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    slurm = CompanionSlurm(tmp_path)
    for name in ("PATH", "HOME"):
        monkeypatch.setenv(name, slurm.env[name])
    program = Program(slurm)
    program.companions.start()
    program.state.receive(Orders(in_place=True), authoritative=True)
    eventually(lambda: program.report.restarts, "the report that its ranks can be started again")
    program.start()
    yield program
    program.companions.end_attempt(failed=True)
    slurm.close()


def states(program: Program) -> dict[int, str]:
    return {job_id: state for job_id, _, state in program.report.companions}


def test_a_program_is_started_again_on_more_and_fewer_gpus(program: Program) -> None:
    first, second = program.grows(1, 2, 1)
    assert program.parts == [first, second]
    assert (program.report.gpus, program.report.in_place) == (5, False)
    program.order(2)
    program.order(2, leave=(first,), restart="now")
    assert program.ended.wait(PATIENCE_S)
    assert program.ends()
    program.until("done")
    assert program.parts == [second]
    assert program.report.gpus == 3
    assert program.slurm.ended(first) == 0
    (third,) = program.grows(3, 4, leave=(second,))
    assert program.parts == [third]


def test_a_program_that_ends_by_itself_keeps_its_companions_until_it_is_over(
    program: Program,
) -> None:
    (part,) = program.grows(1, 2)
    assert not program.ends(1)
    assert not program.ends(0)
    assert states(program) == {part: "joined"}, "it may be on trial, and started again"
    program.companions.end_attempt(failed=True)
    assert states(program) == {part: "ended"}


def test_a_change_that_is_cancelled_leaves_the_program_alone(program: Program) -> None:
    program.order(1, 2)
    program.until("submitted")
    (part,) = program.slurm.submitted()
    program.slurm.run(part, gpus=2)
    program.until("joining")
    program.order(1, 2, cancel=True)
    program.until("failed")
    assert not program.ended.is_set()
    assert program.slurm.ended(part) == 0


def test_a_lost_companion_is_left_out(program: Program) -> None:
    first, second = program.grows(1, 1, 1)
    program.ended.clear()
    program.slurm.running[first].kill()
    assert program.ended.wait(PATIENCE_S)
    assert program.ends()
    assert program.parts == [second]
    assert program.report.gpus == 3
    assert program.served == [1, None]


def test_a_loss_while_a_change_is_prepared_does_not_carry_it_out(program: Program) -> None:
    """The notice of the change is still to be answered by the ranks of the next start."""
    (part,) = program.grows(1, 1)
    program.order(2, 2)
    program.until("submitted")
    program.ended.clear()
    program.slurm.running[part].kill()
    assert program.ended.wait(PATIENCE_S)
    assert program.ends()
    assert program.served == [1, None]
    assert program.parts == []


def test_ranks_that_were_killed_are_a_loss_once_the_shape_has_worked(program: Program) -> None:
    (part,) = program.grows(1, 2)
    assert not program.ends(137, failed_in=part, on_trial=True)
    assert not program.ends(3, failed_in=part)
    assert program.ends(137, failed_in=part)
    assert program.parts == []


def test_options_for_srun_forbid_it(tmp_path: Path) -> None:
    slurm = CompanionSlurm(tmp_path)
    program = Program(slurm, "--checkpoint=x", "--srun-args=-w g01")
    program.companions.start()
    assert not program.report.restarts
    slurm.close()


def test_arguments_that_may_name_an_old_checkpoint_forbid_it(tmp_path: Path) -> None:
    slurm = CompanionSlurm(tmp_path)
    program = Program(slurm, may_repeat=lambda: False)
    program.companions.start()
    assert not program.report.restarts
    slurm.close()


def test_a_training_of_the_library_says_first_whether_it_can_regroup(tmp_path: Path) -> None:
    slurm = CompanionSlurm(tmp_path)
    program = Program(slurm, "--gpus=all")
    program.companions.start()
    assert not program.report.restarts
    program.companions.on_group({"can": False, "why": "stages"})
    eventually(lambda: program.report.restarts, "the report")
    assert program.report.not_in_place == "stages"
    slurm.close()
