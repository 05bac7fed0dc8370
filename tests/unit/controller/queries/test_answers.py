"""What the answers say; how they are printed is tested with the command line."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.cli.reason_text import text
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.dispatch import NoAnswerError, View, Viewer
from slurm_elastic.controller.state.job_ending import EndedJob
from slurm_elastic.core.cluster import Allocation, JobState
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.core.reason import Reason
from slurm_elastic.rpc.decision_answers import ExplainAnswer
from slurm_elastic.rpc.requests import OPERATIONS
from tests.support.controller.typed_answers import mismatches
from tests.support.decisions import example_round as example

EVERYBODY = Viewer(uid=example.BOB, operator=False)
ONLY_BOBS = Viewer(uid=example.BOB, operator=False, private=True)


def ask(op, view=example.VIEW, viewer=EVERYBODY, **args):
    found = dispatch.answer(
        op, view, viewer, args, history=example.HISTORY, segments=example.SEGMENTS
    )
    return json.loads(json.dumps(found))  # what a script gets


def test_every_answer_is_json_with_the_same_fields_whatever_is_known():
    """Scripts rely on fields being there: an empty controller gives the same ones."""
    bare = View(snapshot=example.SNAPSHOT)
    for op, args in (("status", {}), ("explain", {"job_ids": (4711,)}),
                     ("show", {"job_ids": (4711,)}), ("plan", {}), ("usage", {}),
                     ("topology", {})):  # fmt: skip
        assert ask(op, **args).keys() == ask(op, view=bare, **args).keys()
    rows = [ask("status", view=v)["jobs"][0] for v in (example.VIEW, bare)]
    assert rows[0].keys() == rows[1].keys()


def test_fields_of_a_status_row_do_not_change():
    (row, *_) = ask("status")["jobs"]
    assert sorted(row) == [
        "display_id", "elastic", "gpu_type", "gpus", "half", "held", "job_id", "kind", "name",
        "partition", "progress", "resizes", "samples_per_s", "state", "steps_per_s", "stopped",
        "transition", "unmanaged_reason", "user", "waiting", "wants", "where",
    ]  # fmt: skip


def test_partition_counts_add_up():
    (row,) = ask("status")["partitions"]
    assert row["gpus"] == row["elastic"] + row["rigid"] + row["idle"] + row["unavailable"] == 24
    assert (row["elastic"], row["rigid"], row["idle"], row["waiting"]) == (13, 8, 3, 1)


def test_idle_gpus_of_a_drained_node_are_unavailable_not_idle():
    nodes = tuple(
        replace(n, available=False) if n.name == "g03" else n for n in example.SNAPSHOT.nodes
    )
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, nodes=nodes))
    (row,) = ask("status", view)["partitions"]
    assert (row["idle"], row["unavailable"]) == (0, 3)
    assert row["gpus"] == row["elastic"] + row["rigid"] + row["idle"] + row["unavailable"]


def test_gpus_of_nodes_with_several_types_are_counted_apart():
    nodes = tuple(
        replace(n, gpus=0, gpu_type="", unmanaged_gpus=n.gpus) if n.name == "g03" else n
        for n in example.SNAPSHOT.nodes
    )
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, nodes=nodes))
    (row,) = ask("status", view)["partitions"]
    assert (row["gpus"], row["unmanaged"], row["idle"]) == (20, 4, 0)
    assert row["gpus"] == row["elastic"] + row["rigid"] + row["idle"] + row["unavailable"]
    assert ask("explain", view, job_ids=(4711,))["unmanaged_nodes"] == ["g03"]


def test_rigid_jobs_are_listed_when_asked_for():
    ids = [j["job_id"] for j in ask("status")["jobs"]]
    assert ids == [4711, 4713, 4720, 4722]
    assert 4700 in [j["job_id"] for j in ask("status", all=True)["jobs"]]


def test_private_data_hides_other_peoples_jobs_everywhere():
    assert [j["job_id"] for j in ask("status", viewer=ONLY_BOBS)["jobs"]] == [4722]
    assert ask("plan", viewer=ONLY_BOBS)["changes"] == []
    assert ask("history", viewer=ONLY_BOBS)["changes"] == []
    assert [u["user"] for u in ask("usage", viewer=ONLY_BOBS, user="")["users"]] == []
    with pytest.raises(NoAnswerError, match="4711 is neither running nor waiting"):
        ask("explain", viewer=ONLY_BOBS, job_ids=(4711,))
    assert ask("explain", viewer=ONLY_BOBS, job_ids=(4722,))["job"]["waiting"]["givers"] == []


def test_private_data_hides_other_peoples_jobs_in_reasons_too():
    alice = Viewer(uid=example.ALICE, operator=False, private=True)
    said = ask("explain", viewer=alice, job_ids=(4711,))["decision"]
    hidden = {"gpus": 4, "job": None, "user": None}
    assert said["why_not_more"] == {"code": "freed-gpus-kept", "parameters": hidden}
    assert said["reason"] == {
        "code": "gives-gpus",
        "parameters": {**hidden, "elastic": False, "waited_s": 120.0},
    }
    everything = json.dumps(ask("status", viewer=alice)) + json.dumps(ask("plan", viewer=alice))
    assert "4722" not in everything
    assert "bob" not in everything


def test_private_data_hides_in_reasons_jobs_that_are_long_gone():
    """After MinJobAge only the history knows them."""
    past = [
        Reason("gives-to-job", gpus=4, job="4600_7", running=False),
        Reason("lease-kept-by-shrink", jobs=["4600", "4711", "4601"]),
        Reason("waits-for-nodes", nodes=["n1"], reason=Reason("job-came-first", job="4600")),
        Reason.from_json("gives way to dom\\bob@site's 4600_7, as job 4601 did"),
    ]
    rows = [{**example.HISTORY[0], "reason": reason} for reason in past]
    alice = Viewer(uid=example.ALICE, operator=False, private=True)
    found = dispatch.answer("history", example.VIEW, alice, {}, history=rows)["changes"]
    assert [c["reason"]["parameters"] for c in found] == [
        {"gpus": 4, "job": None, "running": False},
        {"jobs": [None, "4711", None]},
        {"nodes": ["n1"], "reason": {"code": "job-came-first", "parameters": {"job": None}}},
        {"text": None},
    ]


def test_numbers_that_are_no_job_ids_stay_whoever_has_such_an_id():
    """Strangers' jobs 8 and 15: growing to 8 would gain less than the 15 s it costs."""
    strangers = [
        replace(example.JOBS[0], job_id=i, display_id=str(i), user="bob", uid=example.BOB)
        for i in (8, 15)
    ]
    snapshot = replace(example.SNAPSHOT, jobs=(*example.SNAPSHOT.jobs, *strangers))
    why = Reason(
        "change-not-paid-back",
        change="grow",
        gpus=8,
        gpu_type="a100",
        gain=0.08,
        window_s=120.0,
        cost_s=15.0,
    )
    decision = replace(example.PLAN.decision[4711], why_not_more=why)
    plan = replace(example.PLAN, decisions=(decision,))
    view = replace(example.VIEW, snapshot=snapshot, plan=plan)
    alice = Viewer(uid=example.ALICE, operator=False, private=True)
    said = ask("explain", view, viewer=alice, job_ids=(4711,))["decision"]["why_not_more"]
    assert said == why.to_json()
    assert "growing to 8 would gain 8%, less in 2 min than the 15 s it costs" in text(said)


def test_usage_nodes_and_partitions_may_be_private_too():
    def bob(*hidden):
        return Viewer(uid=example.BOB, operator=False, hidden=frozenset(hidden))

    def used(viewer):
        return {u["user"] for u in ask("usage", viewer=viewer, user="")["users"]}

    assert "alice" in used(bob())
    assert "alice" not in used(bob("usage"))
    assert "alice" in used(Viewer(uid=0, hidden=frozenset({"usage"})))
    with pytest.raises(NoAnswerError, match="nodes are private here"):
        ask("topology", viewer=bob("nodes"))
    assert ask("status", viewer=bob("nodes"))["partitions"] == []
    assert ask("status", viewer=bob("partitions"))["partitions"] == []
    assert ask("status", viewer=bob("usage"))["partitions"] != []


def test_operators_see_everything_in_spite_of_private_data():
    operator = Viewer(uid=0, operator=True, private=True)
    assert len(ask("status", viewer=operator)["jobs"]) == 4


def test_what_gives_gpus_and_when():
    waiting = ask("explain", job_ids=(4722,))["job"]["waiting"]
    (giver,) = waiting["givers"]
    assert (giver["job_id"], giver["under_way"]) == (4711, True)
    assert giver["in_s"] == pytest.approx(2.1 + 2.0 - 0.5)
    (planned,) = ask("explain", example.PLANNED, job_ids=(4722,))["job"]["waiting"]["givers"]
    assert (planned["in_s"], planned["under_way"]) == (None, False)


def test_payback_is_the_time_at_the_new_speed_that_makes_up_for_the_loss():
    (grow,) = [c for c in ask("plan")["changes"] if c["job_id"] == 4720]
    assert grow["payback_s"] == pytest.approx(30.6 / 1 / 0.875)
    (shrink,) = [c for c in ask("plan")["changes"] if c["job_id"] == 4711]
    assert shrink["payback_s"] is None  # it gives way: nothing comes back


def test_usage_cuts_segments_at_the_ends():
    now = example.NOW
    cut = ask("usage", start=now - 1800, end=now - 600)
    assert cut["jobs"] == [
        {"job_id": 4640, "display_id": "4640", "user": "bob", "gpu_type": "v100",
         "gpu_seconds": 1800.0, "seconds": 900.0, "shapes": 1},
        {"job_id": 4711, "display_id": "4711", "user": "alice", "gpu_type": "a100",
         "gpu_seconds": 9600.0, "seconds": 1200.0, "shapes": 1},
    ]  # fmt: skip


@given(st.floats(0, 7200), st.floats(0, 7200))
def test_usage_of_two_halves_is_the_usage_of_the_whole(one, other):
    now = example.NOW
    low, high = sorted((now - one, now - other))
    middle = (low + high) / 2

    def spent(start, end):
        users = ask("usage", start=start, end=end)["users"]
        return sum(u["gpu_seconds"] for u in users)

    assert spent(low, middle) + spent(middle, high) == pytest.approx(spent(low, high), abs=1e-3)


def test_find_understands_what_people_type():
    tasks = tuple(
        replace(example.JOBS[0], job_id=5000 + i, display_id=f"5000_{i}") for i in range(3)
    )
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, jobs=(*example.JOBS, *tasks)))
    assert dispatch.find(view, "4711") == (4711,)
    assert dispatch.find(view, "5000_2") == (5002,)
    assert dispatch.find(view, "5000") == (5000, 5001, 5002)
    assert dispatch.find(view, "5001") == (5001,)  # Slurm's raw id
    assert (
        dispatch.find(view, "99") == dispatch.find(view, "5000_9") == dispatch.find(view, "x") == ()
    )
    with pytest.raises(NoAnswerError, match=r"name one task, e\.g\. 5000_0, 5000_1, 5000_2"):
        ask("explain", view, job_ids=(5000, 5001, 5002))


def test_resizes_are_those_of_the_whole_life():
    view = replace(example.VIEW, resizes={4711: 12})
    assert ask("status", view)["jobs"][0]["resizes"] == 12


def test_an_override_is_what_the_job_wants():
    directive = example.job(1, "x", "alice", "3-5").directive
    jobs = tuple(replace(j, override=directive) if j.job_id == 4711 else j for j in example.JOBS)
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, jobs=jobs))
    assert ask("status", view)["jobs"][0]["wants"] == "3-5"
    shown = ask("show", view, job_ids=(4711,))
    assert (shown["override"], shown["directive"]) == ("3-5", "2-16,types=a100:v100")


def test_ended_jobs_are_not_shown():
    jobs = tuple(replace(j, state=JobState.ENDED) for j in example.JOBS)
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, jobs=jobs))
    assert ask("status", view, all=True)["jobs"] == []


def test_ten_thousand_jobs_are_answered_within_a_second():
    """The answer is made on the thread that takes reports: it must not keep them waiting."""
    jobs = tuple(replace(example.JOBS[0], job_id=i, display_id=str(i)) for i in range(10_000))
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, jobs=jobs))
    begin = time.process_time()
    ask("status", view)
    assert time.process_time() - begin < 2.0


def test_a_record_that_cannot_be_read_is_said_though_the_job_is_not_elastic():
    why = Reason("directive-invalid", error="AdminComment: is not JSON: Expecting value")
    jobs = tuple(
        replace(j, submission=None, managed=False, unmanaged_reason=why) if j.job_id == 4711 else j
        for j in example.SNAPSHOT.jobs
    )
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, jobs=jobs))
    job = ask("explain", view=view, job_ids=(4711,))["job"]
    assert (job["elastic"], job["unmanaged_reason"]) == (False, why.to_json())


@pytest.mark.parametrize("viewer", [EVERYBODY, ONLY_BOBS, Viewer()])
@pytest.mark.parametrize("view", [example.VIEW, example.PLANNED, View(snapshot=example.SNAPSHOT)])
def test_answers_have_the_fields_and_types_of_their_schema(view, viewer):
    requests = [("status", {"all": True}), ("plan", {}), ("history", {}), ("topology", {})]
    requests += [("usage", {"runs": True})]
    shown = [j.job_id for j in example.JOBS if viewer.sees(j.uid)]
    requests += [(op, {"job_ids": (i,)}) for i in shown for op in ("explain", "show")]
    for op, args in requests:
        answer = ask(op, view, viewer, **args)
        assert mismatches(answer, OPERATIONS[op].answer_type(), op) == []


ENDED = example.job(
    4711, "gpt-small", "alice", "2-16,types=a100:v100",
    state=JobState.ENDED, start_time=example.ago(13, 0), end_time=example.ago(14, 0),
    run=2, end_state="FAILED", exit_code=137,
)  # fmt: skip
RECORDED = EndedJob(
    job=ENDED,
    record=JobRecord(job_id=4711, proven=True, resizes=3),
    reported=True,
    held=Allocation.of("a100", {"g01": 4, "g02": 4}),
    runs=3,
)


def explained_end(*jobs, ended=None, viewer=EVERYBODY, job_id=4711):
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, jobs=jobs), records={})
    args = {"job_ids": (job_id,)}
    answer = dispatch.answer("explain", view, viewer, args, history=[], ended=ended)
    assert mismatches(json.loads(json.dumps(answer)), ExplainAnswer) == []
    return answer


@pytest.mark.parametrize("jobs", [(ENDED,), ()], ids=["slurm knows it", "slurm forgot it"])
def test_explain_tells_how_a_job_ended(jobs):
    answer = explained_end(*jobs, ended=RECORDED)
    assert answer["ended"] == {
        "state": "FAILED", "exit_code": 137, "time": example.ago(14, 0), "gpus": 8,
        "gpu_type": "a100", "where": [{"switch": "rack1", "nodes": ["g01", "g02"]}], "runs": 3,
        "changes": 3, "reported": True, "stopped": None,
    }  # fmt: skip
    assert answer["proven"]
    assert answer["job"]["state"] == "ENDED"
    assert answer["decision"] is answer["model"] is answer["batch"] is None


def test_a_job_that_has_not_ended_has_no_end():
    assert ask("explain", job_ids=(4711,))["ended"] is None
    running = example.SNAPSHOT.job[4711]  # an id used again is the present job
    assert explained_end(running, ended=RECORDED)["ended"] is None


def test_an_ended_job_of_which_nothing_is_recorded():
    answer = explained_end(ENDED)
    assert (answer["ended"]["state"], answer["ended"]["gpus"]) == ("FAILED", 0)
    assert not answer["ended"]["reported"]
    assert answer["ended"]["runs"] == 3  # by Slurm's times and restart count
    waited = replace(ENDED, start_time=ENDED.end_time, run=0)
    assert explained_end(waited)["ended"]["runs"] == 0
    with pytest.raises(NoAnswerError, match="selastic history 4711"):
        explained_end()


@pytest.mark.parametrize("jobs", [(ENDED,), ()])
def test_ended_jobs_of_others_are_private(jobs):
    with pytest.raises(NoAnswerError, match="neither running nor waiting"):
        explained_end(*jobs, ended=RECORDED, viewer=ONLY_BOBS)
    owner = Viewer(uid=example.ALICE, operator=False, private=True)
    assert explained_end(*jobs, ended=RECORDED, viewer=owner)["ended"]["state"] == "FAILED"
