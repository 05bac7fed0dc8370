"""Reading what the watching script prints."""

import json

import pytest

from contrib.demo.happenings import happenings
from contrib.demo.rows import racks, rows
from contrib.demo.view import View, parse
from contrib.demo.watch import decided


def entry(name="gpt", state=("RUNNING",), run=0, **more):
    return {
        "job_id": 5,
        "name": name,
        "user_name": "alice",
        "job_state": list(state),
        "restart_cnt": run,
        "nodes": "g[01-02]",
        "gres_detail": ["gpu:a100:4(IDX:0-3)", "gpu:a100:2(IDX:0,3)"],
        "admin_comment": '{"elastic":"4-8,types=a100"}',
        "state_reason": "None",
    } | more


def frame(time, *entries, step=0):
    jobs = json.dumps({"jobs": entries}, indent=1)
    log = f'gpt/losses.jsonl {{"step": {step}}}\n' if step else ""
    return f"#time {time}\n#jobs\n{jobs}\n\n#steps\n{log}#saves\ngpt/ckpt/a b.pt {time}\n"


def test_a_running_job():
    view = parse(frame(100.5, entry(), step=7), View())
    job = view.jobs["gpt"]
    assert (job.count, job.gpu_type, job.wants) == (6, "a100", "4-8,types=a100")
    assert job.gpus == {"g01": (0, 1, 2, 3), "g02": (0, 3)}
    assert (job.step, job.stepped, job.since) == (7, 7, 100.5)
    assert view.saves == {("gpt", 100.5)}


def test_steps_count_anew_in_each_run():
    view = parse(frame(1.0, entry(), step=7), View())
    view = parse(frame(2.0, entry(run=1, state=("PENDING",)), step=9), view)
    view = parse(frame(3.0, entry(run=1), step=12), view)
    job = view.jobs["gpt"]
    assert (job.step, job.stepped, job.since) == (12, 3, 3.0)
    assert len(view.saves) == 3


@pytest.mark.parametrize("broken", ["", "#time 1\n", "#time 1\n#jobs\nslurm_load_jobs error\n"])
def test_no_answer_is_no_view(broken):
    assert parse(broken, View()) is None


def test_a_line_that_is_still_being_written():
    text = frame(1.0, entry()).replace("#saves", 'gpt/losses.jsonl {"st\n#saves')
    assert parse(text, View()).jobs["gpt"].step == 0


def test_states():
    assert parse(frame(1, entry(state=("COMPLETED",))), View()).jobs["gpt"].over
    ending = parse(frame(1, entry(state=("RUNNING", "COMPLETING"))), View()).jobs["gpt"]
    assert ending.state == "ENDING"
    assert not ending.over
    assert not ending.gpus


def test_happenings():
    first = parse(frame(1, entry(), step=3), View())
    second = parse(frame(2, entry(run=1, state=("PENDING",)), step=5), first)
    third = parse(frame(3, entry(run=1), step=5), second)
    last = parse(frame(4, entry(run=1, state=("COMPLETED",)), step=5), third)
    told = [list(happenings(a, b)) for a, b in ((View(), first), (first, second), (second, third))]
    assert told == [
        ["gpt runs with 6 a100 on g[01-02]"],
        ["gpt has saved step 5 and left 6 a100 on g[01-02]"],
        ["gpt goes on with 6 a100 on g[01-02]"],
    ]
    assert list(happenings(third, last)) == ["gpt is over: completed"]


def test_the_controllers_words():
    line = "info: JobId=6 Action=move From=2 To='2 v100 on g03' Reason=\"so that bob's 8 finds 4\""
    assert decided(line) == (6, "moves to 2 v100 on g03: so that bob's 8 finds 4")
    assert decided("JobId=6 Transition=1 State=DONE Action=move Seconds=") is None


def test_racks_and_rows():
    of = racks(
        "g02 v100,rack1 gpu:v100:2\ng01 a100,rack1 gpu:a100:2(S:0)\ng03 a100,rack2 gpu:a100:2"
    )
    assert [rack.name for rack in of] == ["rack1", "rack2"]
    assert rows(of)["g03", 1] == 5
