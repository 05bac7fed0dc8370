"""The integer program in the answer to `plan`: all of it, the viewer's part, and as an LP file."""

import doctest
import json
from dataclasses import replace

import highspy
import numpy as np
import pytest

from slurm_elastic.cli.decisions import lp_format
from slurm_elastic.cli.decisions.lp_format import lp_text
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.dispatch import NoAnswerError, Viewer
from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, solve
from slurm_elastic.policies.milp.limit_rows import LimitRow
from slurm_elastic.policies.milp.round_program import RoundProgram
from slurm_elastic.rpc.requests import OPERATIONS
from tests.support.controller.typed_answers import mismatches
from tests.support.decisions import example_round as example

ALICES, BOBS = 4711, 4722
EVERYBODY = Viewer(uid=example.BOB, operator=False)
ONLY_BOBS = Viewer(uid=example.BOB, operator=False, private=True)


def stated(**changes):
    """Two types: 1, 2 or 4 of `a100-x`, 1 of `a100_x`; a job of alice and one of bob."""
    fields = {
        "cost": np.array([[0.9, 0.5, 0.3, 0.8], [1.0, 0.7, 0.6, 1.2]]),
        "valid": np.array([[True, True, True, True], [True, False, True, True]]),
        "config_type": np.array([0, 0, 0, 1]),
        "config_gpus": np.array([1, 2, 4, 1]),
        "capacity": np.array([5, 1]),
        "not_running": 1.1,
        "fixed": np.array([-1, -1]),
    }
    program = AssignmentProgram(**(fields | changes))
    return RoundProgram(
        program=program,
        job_ids=(ALICES, BOBS),
        types=("a100-x", "a100_x"),
        nodes=np.array([1, 1, 1, 1]),
        choice=solve(program).choice,
    )


def ask(viewer=EVERYBODY, program=None, **args):
    view = replace(example.VIEW, program=program or stated(), policy="sia")
    answer = dispatch.answer("plan", view, viewer, {"program": True, **args})
    assert mismatches(answer, OPERATIONS["plan"].answer_type(), "plan") == []
    return json.loads(json.dumps(answer))["program"]


def least_cost(text, tmp_path):
    """Return the objective that HiGHS finds for a text in the LP format."""
    path = tmp_path / "round.lp"
    path.write_text(text)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return highs.getInfo().objective_function_value


def test_examples_in_the_docs():
    assert doctest.testmod(lp_format).failed == 0


def test_the_whole_program_with_what_was_chosen():
    program = ask()
    assert program["partial"] is False
    assert program["capacity"] == {"a100-x": 5, "a100_x": 1}
    alices, bobs = program["jobs"]
    assert (alices["display_id"], alices["configurations"]) == ("4711", [0, 1, 2, 3])
    # What costs more than to wait, and what is not valid, is not part of it.
    assert (bobs["configurations"], bobs["costs"]) == ([0, 2], [1.0, 0.6])
    assert alices["fixed"] is None
    assert program["configurations"][alices["chosen"]] == {
        "gpu_type": "a100-x", "nodes": 1, "gpus": 4,
    }  # fmt: skip


def test_halves_of_gpus_are_named_so():
    whole = ask()
    assert whole["parts_per_gpu"] == 1
    halves = ask(program=replace(stated(), parts=2))
    text = lp_text(halves)
    assert "\\ GPUs are counted in halves.\n" in text
    assert " j4711_a100_x_n1_h4\n" in text
    older = {name: value for name, value in halves.items() if name != "parts_per_gpu"}
    assert lp_text(older) == lp_text(whole)


def test_it_is_asked_for():
    view = replace(example.VIEW, program=stated())
    assert dispatch.answer("plan", view, EVERYBODY, {})["program"] is None


def test_where_jobs_are_private_users_get_their_own_and_what_the_others_leave():
    program = ask(viewer=ONLY_BOBS)
    assert [j["job_id"] for j in program["jobs"]] == [BOBS]
    assert program["partial"] is True
    assert program["capacity"] == {"a100-x": 1, "a100_x": 1}
    text = lp_text(program)
    assert "4711" not in text
    assert "other users are left out" in text


def test_a_viewer_who_may_not_know_the_nodes_gets_none():
    viewer = replace(EVERYBODY, hidden=frozenset({"nodes"}))
    with pytest.raises(NoAnswerError, match="PrivateData hides the cluster's GPUs"):
        ask(viewer=viewer)


def test_a_policy_without_a_program_is_one_line():
    view = replace(example.VIEW, program=None, policy="fair")
    with pytest.raises(NoAnswerError, match="policy fair has solved no integer program"):
        dispatch.answer("plan", view, Viewer(), {"program": True})


@pytest.mark.parametrize("fixed", [[-1, -1], [3, -1], [0, 2], [2, 2]])
def test_the_lp_file_has_the_optimum_of_the_round(fixed, tmp_path):
    round_program = stated(fixed=np.array(fixed))
    text = lp_text(ask(program=round_program))
    expected = solve(round_program.program, gap=0.0).objective
    assert least_cost(text, tmp_path) == pytest.approx(expected, abs=1e-7)


def test_limits_are_part_of_it_less_what_hidden_jobs_got(tmp_path):
    limit = LimitRow(jobs=np.array([0, 1]), use=np.array([[1.0, 2.0, 4.0, 1.0]] * 2), left=3.0)
    round_program = stated(limits=(limit,))
    whole = ask(program=round_program)
    expected = solve(round_program.program, gap=0.0).objective
    assert least_cost(lp_text(whole), tmp_path) == pytest.approx(expected, abs=1e-7)
    assert expected > solve(stated().program, gap=0.0).objective
    own = ask(viewer=ONLY_BOBS, program=round_program)
    alices = whole["configurations"][whole["jobs"][0]["chosen"]]["gpus"]
    assert own["limits"] == [{"left": 3.0 - alices, "uses": [[1.0, 4.0]]}]


def test_negative_costs_and_types_of_nearly_one_name(tmp_path):
    round_program = stated(cost=-stated().program.cost, not_running=0.0)
    text = lp_text(ask(program=round_program))
    expected = solve(round_program.program, gap=0.0).objective
    assert least_cost(text, tmp_path) == pytest.approx(expected, abs=1e-7)
    assert " gpus_a100_x:" in text
    assert " gpus_a100_x_2:" in text
