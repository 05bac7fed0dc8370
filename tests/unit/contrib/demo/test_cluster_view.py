"""Views of the cluster from frames of the watching script, and events between them."""

import json

import pytest

from contrib.demo.cluster_view import ClusterView, parse
from contrib.demo.cluster_watch import parse_decision
from contrib.demo.events import events
from contrib.demo.gpu_rows import racks, rows


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
    view = parse(frame(100.5, entry(), step=7), ClusterView())
    job = view.jobs["gpt"]
    assert (job.gpu_count, job.gpu_type, job.directive) == (6, "a100", "4-8,types=a100")
    assert job.gpus == {"g01": (0, 1, 2, 3), "g02": (0, 3)}
    assert (job.step, job.steps_in_run, job.since) == (7, 7, 100.5)
    assert view.saves == {("gpt", 100.5)}


def test_steps_count_anew_in_each_run():
    view = parse(frame(1.0, entry(), step=7), ClusterView())
    view = parse(frame(2.0, entry(run=1, state=("PENDING",)), step=9), view)
    view = parse(frame(3.0, entry(run=1), step=12), view)
    job = view.jobs["gpt"]
    assert (job.step, job.steps_in_run, job.since) == (12, 3, 3.0)
    assert len(view.saves) == 3


def test_a_job_has_the_gpus_of_its_companions():
    companion = entry(name="gpt+1", nodes="g02", gres_detail=["gpu:a100:2(IDX:1-2)"])
    other = entry(name="gpt+1", nodes="g04", gres_detail=["gpu:a100:1(IDX:0)"])
    base = entry(nodes="g[01-02]")
    log = 'gpt/losses.jsonl {{"step": {}, "world": {}, "run": 0}}\n#saves'
    view = parse(frame(1.0, base).replace("#saves", log.format(7, 6)), ClusterView())
    view = parse(frame(2.0, base, companion, other).replace("#saves", log.format(8, 6)), view)
    assert list(view.jobs) == ["gpt"]
    job = view.jobs["gpt"]
    assert job.gpus == {"g01": (0, 1, 2, 3), "g02": (0, 1, 2, 3), "g04": (0,)}
    assert (job.ranks, job.steps_in_run) == (6, 8)
    old, view = view, parse(frame(3.0, base).replace("#saves", log.format(20, 9)), view)
    assert view.jobs["gpt"].steps_in_run == 0
    assert list(events(old, view)) == ["gpt has 9 ranks without a stop, at step 20"]


@pytest.mark.parametrize("broken", ["", "#time 1\n", "#time 1\n#jobs\nslurm_load_jobs error\n"])
def test_no_answer_is_no_view(broken):
    assert parse(broken, ClusterView()) is None


def test_a_line_that_is_still_being_written():
    text = frame(1.0, entry()).replace("#saves", 'gpt/losses.jsonl {"st\n#saves')
    assert parse(text, ClusterView()).jobs["gpt"].step == 0


def test_a_job_that_is_completing_counts_as_ending_and_holds_nothing():
    assert parse(frame(1, entry(state=("COMPLETED",))), ClusterView()).jobs["gpt"].ended
    ending = parse(frame(1, entry(state=("RUNNING", "COMPLETING"))), ClusterView()).jobs["gpt"]
    assert ending.state == "ENDING"
    assert not ending.ended
    assert not ending.gpus


def test_events():
    first = parse(frame(1, entry(), step=3), ClusterView())
    second = parse(frame(2, entry(run=1, state=("PENDING",)), step=5), first)
    third = parse(frame(3, entry(run=1), step=5), second)
    last = parse(frame(4, entry(run=1, state=("COMPLETED",)), step=5), third)
    lines = [
        list(events(a, b)) for a, b in ((ClusterView(), first), (first, second), (second, third))
    ]
    assert lines == [
        ["gpt runs with 6 a100 on g[01-02]"],
        ["gpt has saved step 5 and left 6 a100 on g[01-02]"],
        ["gpt goes on with 6 a100 on g[01-02]"],
    ]
    assert list(events(third, last)) == ["gpt is over: completed"]


def test_lines_of_the_controllers_log():
    line = "info: JobId=6 Action=move From=2 To='2 v100 on g03' Reason=job-came-first job=8"
    assert parse_decision(line) == (6, "moves to 2 v100 on g03: job 8 came first")
    old = "info: JobId=6 Action=move From=2 To='2 v100 on g03' Reason=of-tomorrow job=8"
    assert parse_decision(old) == (6, "moves to 2 v100 on g03: of-tomorrow job=8")
    line = "info: JobId=6 Action=grow From=4 To='8 a100 on g[01-02]' Reason=holds-max gpus=8"
    assert parse_decision(line) == (6, "grows from 4 to 8 a100 on g[01-02]: 8 is its MAX")
    assert parse_decision("JobId=6 Transition=1 State=DONE Action=move Seconds=") is None


def test_racks_and_rows():
    of = racks(
        "g02 v100,rack1 gpu:v100:2\ng01 a100,rack1 gpu:a100:2(S:0)\ng03 a100,rack2 gpu:a100:2"
    )
    assert [rack.name for rack in of] == ["rack1", "rack2"]
    assert rows(of)["g03", 1] == 5
