"""Exact output of the commands for answers of the example round."""

from dataclasses import replace

import pytest

from slurm_elastic.cli import formatting, status, usage
from slurm_elastic.cli.decisions import change_history, explain, planned_changes
from slurm_elastic.cli.exit_codes import CliError
from slurm_elastic.cli.tables import TableLayout
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.dispatch import Particulars, Viewer
from slurm_elastic.controller.state.reported.layer_profiles import StoredProfile
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.plan_gains import PlanSpeed
from slurm_elastic.core.plan import Action, JobRecord
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders
from slurm_elastic.core.submission import Submission
from slurm_elastic.placement.starts.start_estimates import StartEstimate
from tests.support.decisions import example_round as example


def ask(op, view=example.VIEW, **args):
    return dispatch.answer(
        op, view, Viewer(), args, history=example.HISTORY, segments=example.SEGMENTS
    )


def text(lines):
    return "\n".join(lines) + "\n"


def explained(job_id, view=example.PLANNED):
    return text(explain.explained(ask("explain", view, job_ids=(job_id,))))


def test_status():
    assert text(status.lines(ask("status"), TableLayout())) == (
        "PARTITION gpu   24 GPUs (12 a100, 12 v100)   21 in use: 13 elastic, 8 rigid   3 idle   1 job waiting\n"  # noqa: E501
        "  JOBID  NAME       USER   GPUS  WANTS  TYPE  WHERE                              SPEED     PROGRESS  RESIZES\n"  # noqa: E501
        "   4711  gpt-small  alice     8  2-16   a100  rack1:g[01-02] -> 4 a100 (saving)  1.9 it/s       34%        3\n"  # noqa: E501
        "   4713  resnet     alice     4  1-8    v100  rack2:g06                          5.1 it/s       71%        1\n"  # noqa: E501
        "   4720  vit        alice     1  1-4    a100  rack1:g03                          0.8 it/s        2%        0\n"  # noqa: E501
        "   4722  bert-ft    bob       -  4      any   waiting for 4 GPUs: 4711 gives them in about 4 s\n"  # noqa: E501
    )


def test_a_waiting_job_shows_when_it_will_probably_start():
    now = example.VIEW.snapshot.time
    starts = {4722: StartEstimate(median=now + 600, p90=now + 7200)}
    jobs = tuple(
        replace(j, submission=Submission(Directive.parse("4-8"))) if j.job_id == 4722 else j
        for j in example.SNAPSHOT.jobs
    )
    snapshot = replace(example.SNAPSHOT, jobs=jobs)
    view = replace(example.VIEW, plan=None, snapshot=snapshot, starts=starts)
    (shown,) = [line for line in status.lines(ask("status", view), TableLayout()) if "4722" in line]
    median, latest = (formatting.clock(now + s, now) for s in (600, 7200))
    assert shown.endswith(f"; probably starts at {formatting.clock(now + 600)}")
    assert (
        f"  Start:          probably at {median}, with 90% probability by {latest}, "
        in explained(4722, view)
    )
    # A claim says more: its GPUs are about to be free.
    assert "probably" not in explained(4722, replace(example.VIEW, starts=starts))
    assert ask("status", view)["jobs"][-1]["waiting"]["starts"] == {
        "median": now + 600,
        "p90": now + 7200,
    }


def test_explain_a_job_that_is_going_to_shrink():
    assert explained(4711) == (
        "4711 gpt-small holds 8 a100 on g01, g02 (rack1) since 14:02:10.\n"
        "  Why not more:   bob's 4722 needs 4 GPUs and freed ones are kept for it.\n"
        "  Why not fewer:  each of its last 4 GPUs adds 0.21 it/s, and no other job would gain more from it.\n"  # noqa: E501
        "  Why here:       across 2 racks it runs at 0.62 of its speed in one, which had no room or was not worth the move.\n"  # noqa: E501
        "  Next:           shrinks to 4 at about 14:05:30 (checkpoint 2.1 s, restart 7.4 s, expected loss 19 GPU s).\n"  # noqa: E501
        "  Because:        gives 4 GPUs so that bob's 4722 (rigid, waiting 2 min) can start.\n"
        "  Last resize:    4 → 8 at 14:02:01, 9.1 s from notice to first step, paid back after 41 s.\n"  # noqa: E501
    )


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        (16, "since it runs on 8 of 16 GPUs"),
        (8, "for the time that it had fewer than its 8 GPUs"),
    ],
)
def test_a_longer_time_limit_is_shown_with_its_reason(gpus, why):
    snapshot = example.PLANNED.snapshot
    shaped = Submission(snapshot.job[4711].directive, {"tres_per_job": f"gres/gpu:{gpus}"})
    jobs = tuple(replace(j, submission=shaped) if j.job_id == 4711 else j for j in snapshot.jobs)
    record = replace(example.RECORDS[4711], extended_s=3600)
    view = replace(
        example.PLANNED,
        snapshot=replace(snapshot, jobs=jobs),
        records={**example.RECORDS, 4711: record},
    )
    line = f"  Time limit:     12:00:00, extended by 01:00:00 {why}.\n"
    assert line in explained(4711, view)
    shown = text(status.details(ask("show", view, job_ids=(4711,))))
    assert "TimeLimit=12:00:00 ExtendedBy=01:00:00" in shown


def test_explain_a_job_under_way():
    assert "  Next:           on its way to 4 a100, saving for 0.5 s.\n" in explained(
        4711, example.VIEW
    )


def test_explain_in_a_mode_that_does_not_act():
    observing = replace(example.PLANNED, mode="advise")
    assert "would shrink to 4, but mode is advise (" in explained(4711, observing)


def test_explain_jobs_that_wait_or_are_rigid():
    assert explained(4722) == (
        "4722 bert-ft waits for 4 GPUs since 14:00:00: 4711 is to give them."
        " Kept for it until 14:06:24.\n"
    )
    assert explained(4700) == (
        "4700 rigid holds 8 v100 on g04, g05 (rack2)."
        " It is not elastic: it keeps them until it ends.\n"
    )


def test_explain_shows_what_prevents_resizes():
    unproven = replace(
        example.PLANNED, records={4711: JobRecord(job_id=4711, held=True)}, plan=None
    )
    text = explained(4711, unproven)
    assert "Not yet:        it is resized once it has written a checkpoint" in text
    assert "Silent:         it has not reported in this run." in text
    assert "Remedy:         if its batch script starts the program with srun, torchrun" in text
    assert "write esrun" in text
    assert "Held:           nothing changes until `selastic release 4711`." in text


def test_explain_says_what_the_rehearsal_showed_and_the_remedy():
    why = Reason("resume-refuted", directory="/home/alice/kept")
    refuted = replace(
        example.PLANNED, records={4711: JobRecord(job_id=4711, unproven=why)}, plan=None
    )
    shown = explained(4711, refuted)
    assert "give the script its option to resume" in " ".join(shown.split())
    assert "/home/alice/kept" in shown
    answer = ask("explain", job_ids=(4711,))
    answer["last"] = {**answer["last"], "action": "rehearsal", "outcome": "refuted"}
    lines = text(explain.explained(answer))
    assert "  Rehearsal:" in lines
    assert ", refuted: " in lines


def test_explain_shows_the_reason_why_a_script_is_not_proven_once():
    why = Reason("rehearsal-refused", problem="no-room", gigabytes=2.0, directory="/data")
    records = {4711: JobRecord(job_id=4711, unproven=why)}
    plan = example.PLANNED.plan
    kept = [
        replace(d, action=Action.KEEP, target=d.current, reason=why, waiting_for=why)
        if d.job_id == 4711
        else d
        for d in plan.decisions
    ]
    view = replace(example.PLANNED, records=records, plan=replace(plan, decisions=tuple(kept)))
    shown = " ".join(explained(4711, view).split())
    assert shown.count("free 2 GB in /data") == 1
    assert "Not yet: it is resized once it has written a checkpoint and read it back; no" in shown


def test_explain_says_once_that_a_job_is_not_proven():
    records, plan = {4711: JobRecord(job_id=4711)}, example.PLANNED.plan
    kept = [
        replace(d, action=Action.KEEP, target=d.current, waiting_for=Reason("not-proven"))
        if d.job_id == 4711
        else d
        for d in plan.decisions
    ]
    view = replace(example.PLANNED, records=records, plan=replace(plan, decisions=tuple(kept)))
    shown = explained(4711, view)
    assert "Not yet:        it is resized once it has written a checkpoint" in shown
    assert "Held back" not in shown


def test_explain_does_not_deny_restarts_without_a_requeue():
    """A script is started again in the same run of its job: no more is to be said."""
    for why, is_shown in (("restarted", False), ("launcher", False), ("standard-input", True)):
        record = JobRecord(
            job_id=4711, proven=True, not_in_place=Reason("in-place-unsupported", why=why)
        )
        view = replace(example.PLANNED, records={4711: record})
        assert ("cannot be changed in place" in explained(4711, view)) == is_shown


def test_explain_a_change_of_a_job_that_holds_nothing():
    answer = ask("explain", job_ids=(4711,))
    answer["job"] = {**answer["job"], "where": "", "gpus": 0}
    held = {"code": "held-in-slurm", "parameters": {}}
    answer["last"] = {
        **answer["last"],
        "action": "preempt",
        "outcome": "undone",
        "from": "",
        "to": "",
        "reason": held,
    }
    shown = text(explain.explained(answer))
    assert "- → -" not in shown
    assert shown.startswith("4711 gpt-small holds no GPU.\n")
    assert "  Last change:    preempt at " in shown
    assert ", undone: its owner or an administrator holds the job" in shown


def test_explain_without_a_first_step():
    answer = ask("explain", job_ids=(4711,))
    answer["last"] = {**answer["last"], "seconds": {"slurm": 3.0}, "total_s": 3.0}
    assert ", 3 s from notice to start, paid back" in text(explain.explained(answer))


def test_planned_changes_with_costs_and_gains():
    assert text(planned_changes.planned(ask("plan"))) == (
        "2 changes would be made now, nothing was done:\n"
        "  4711  8 → 4 a100  gives 4 GPUs so that bob's 4722 (rigid, waiting 2 min) can start  costs 19 GPU s\n"  # noqa: E501
        "  4720  1 → 2 a100  its fair share is 2 of at most 8                                  gains 0.7 it/s, pays back in 35 s\n"  # noqa: E501
        "  4713  stays       moving would gain 4%, less in 20 min than the 60 s it costs\n"
        "  kept for 4722 until 14:06:24: 4 on g02\n"
    )


def test_plan_before_the_first_round():
    assert planned_changes.planned(ask("plan", replace(example.VIEW, plan=None))) == [
        "no round yet; repeat in a moment"
    ]


def test_history():
    assert text(change_history.past(ask("history"), TableLayout())) == (
        "TIME      JOBID  ACTION  FROM  TO  OUTCOME   TOOK  REASON\n"
        "14:02:01   4711  grow    4     8   done     9.1 s  idle GPUs bring it to its MAX of 8\n"
    )


def test_usage_counts_every_shape():
    assert text(usage.used(ask("usage"), TableLayout(), by_user=False)) == (
        "JOBID  USER   TYPE  GPUHOURS   ELAPSED  SHAPES\n"
        " 4640  bob    v100     0.500  00:15:00       1\n"
        " 4711  alice  a100     12.00  02:00:00       2\n"
    )
    assert text(usage.used(ask("usage"), TableLayout(), by_user=True)) == (
        "USER   GPUHOURS  TYPES\nalice     12.00  a100=12.00\nbob       0.500  v100=0.500\n"
    )


def test_show():
    assert text(status.details(ask("show", job_ids=(4711,)))) == (
        "JobId=4711 JobName=gpt-small\n"
        "   User=alice Account=- QOS=-\n"
        "   State=RUNNING Partition=gpu Restarts=0\n"
        "   Elastic=2-16,types=a100:v100 Submitted=2-16,types=a100:v100\n"
        "   GPUs=8 Type=a100 Where=rack1:g[01-02]\n"
        "   SubmitTime=14:00:00 StartTime=14:02:10 EndTime=- TimeLimit=12:00:00\n"
        "   Speed=1.9it/s Step=340 Progress=34% GlobalBatch=-\n"
        "   Proven=yes Reporting=yes Checkpoint=2.1s Restart=7.4s LastCheckpointStep=-\n"
        "   Held=no Resizes=3 Unmanaged=-\n"
        "   Measured=486samples/s GPUs=8 Type=a100 Nodes=2\n"
    )


def test_explain_and_show_the_exchange_of_gradients():
    report = replace(example.REPORTS[4711], exchange="buckets-1MiB", exposed=0.184)
    view = replace(example.PLANNED, reports={4711: report})
    assert (
        "  Exchange:       gradients are sent by schedule buckets-1MiB, which lengthens a step by"
        " 18% of the time that the exchange takes alone.\n"
    ) in explained(4711, view)
    shown = text(status.details(ask("show", view, job_ids=(4711,))))
    assert "   Exchange=buckets-1MiB Exposed=18%\n" in shown
    report = replace(report, exposed=None)
    view = replace(view, reports={4711: report})
    assert "  Exchange:       gradients are sent by schedule buckets-1MiB.\n" in explained(
        4711, view
    )
    view = replace(view, reports={4711: replace(report, exchange="")})
    assert "Exchange" not in explained(4711, view)


def test_explain_the_plans_that_were_tried():
    job = example.PLANNED.snapshot.job[4711]
    auto = replace(job, override=Directive.parse("2-16,plan=auto"))
    record = replace(
        example.PLANNED.records[4711],
        ordered_plan="4x1+tensor=2",
        plan_speeds=(
            PlanSpeed("a100", 8, 2, "", 480.0),
            PlanSpeed("a100", 8, 2, "4x1+tensor=2", 612.0),
            PlanSpeed("a100", 4, 1, "", 250.0),
        ),
    )
    jobs = tuple(auto if j.job_id == 4711 else j for j in example.PLANNED.snapshot.jobs)
    view = replace(
        example.PLANNED,
        snapshot=replace(example.PLANNED.snapshot, jobs=jobs),
        records={**example.PLANNED.records, 4711: record},
    )
    shown = " ".join(explained(4711, view).split())
    measured = "samples measured here: 4x1+tensor=2 612/s, own choice 480/s."
    assert f"Plans: 4x1+tensor=2 is ordered; {measured}" in shown
    assert "Plans" not in explained(4711)


@pytest.mark.parametrize(
    ("layout", "plan", "line"),
    [
        ("2x1s4", "", "2 spatial groups of 4 GPUs (2x1s4)"),
        ("4x2", "", "a pipeline of 2 stages (4x2)"),
        ("4x1", "4x1+shard=full+recompute", "4 replicas (4x1+shard=full+recompute)"),
        ("8x1", "", ""),
    ],
)
def test_explain_of_a_layout(layout, plan, line):
    report = replace(example.REPORTS[4711], layout=layout, plan=plan)
    view = replace(example.PLANNED, reports={4711: report})
    shown = f"  Layout:         {line}.\n"
    assert (shown in explained(4711, view)) if line else ("Layout" not in explained(4711, view))


def test_show_of_a_running_attempt():
    report = replace(
        example.REPORTS[4711], layout="4x2", layers=12, frozen=3, penalty=0.0012, certified=5,
        certified_penalty=0.004, data_s=0.0005, forward_s=0.1234, backward_s=1.25, sync_s=0.0,
        optimizer_s=0.002, peak_memory_bytes=31_400_000_000, global_batch=256,
    )  # fmt: skip
    view = replace(example.VIEW, reports={4711: report})
    more = Particulars(
        layout="2x4", orders=Orders(batch=512), profile=StoredProfile((("a", 1, 1, 1, 1),), 8)
    )
    answer = dispatch.answer("show", view, Viewer(), {"job_ids": (4711,)}, particulars=more)
    assert answer["profile"] is None
    printed = text(status.details(answer))
    assert (
        "   Layout=4x2 Ordered=2x4\n"
        "   Batch=256 Ordered=512\n"
        "   Layers=12 Frozen=3 Penalty=0.12% Certified=5 CertifiedPenalty=0.4% Ordered=-\n"
        "   Data=0.5ms Forward=123ms Backward=1.25s Sync=0ms Optimizer=2ms\n"
        "   PeakMemory=31.4GB ProfiledLayers=1 ProfileBatch=8\n"
    ) in printed


def test_show_of_a_pipeline():
    report = replace(example.REPORTS[4711], layout="4x2", micro_batches=8)
    answer = ask("show", replace(example.VIEW, reports={4711: report}), job_ids=(4711,))
    assert "   Layout=4x2 MicroBatches=8 Ordered=-\n" in text(status.details(answer))


def test_show_of_an_attempt_that_has_ended():
    report = replace(example.REPORTS[4711], run=3, layout="4x2", forward_s=0.1)
    answer = ask("show", replace(example.VIEW, reports={4711: report}), job_ids=(4711,))
    assert answer["running"] is None
    assert "Layout=" not in text(status.details(answer))


def test_chosen_columns_parsable_and_without_header():
    parsable = TableLayout(columns="jobid,name,gpus", parsable=True, header=False)
    assert status.lines(ask("status"), parsable)[0] == "4711|gpt-small|8"
    narrow = TableLayout(columns="name%5,user%-7,gpus", header=False)
    assert status.lines(ask("status"), narrow)[0] == "gpt-+  alice    8"


def test_an_unknown_column_is_a_usage_error_that_names_the_known():
    with pytest.raises(CliError, match='"nmae" is unknown; known: jobid, name') as caught:
        status.lines(ask("status"), TableLayout(columns="jobid,nmae"))
    assert caught.value.exit_code == 2


def test_terminal_escapes_in_names_are_replaced():
    evil = example.job(1, "\x1b[2J\x1b]0;pwned\x07\nroot|x", "al\x9bice", "1-2",
                     allocation=example.JOBS[0].allocation)  # fmt: skip
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, jobs=(evil,)), plan=None)
    for op, show in (
        ("status", lambda a: status.lines(a, TableLayout(columns="jobid,name,user"))),
        ("explain", explain.explained),
        ("show", status.details),
    ):
        printed = text(show(ask(op, view, job_ids=(1,))))
        assert all(c.isprintable() or c == "\n" for c in printed)
    (line,) = status.lines(ask("status", view), TableLayout(parsable=True, header=False))
    assert line.count("|") == 9


FINISHED = {
    "state": "COMPLETED", "exit_code": 0, "time": example.ago(14, 0), "gpus": 8, "gpu_type": "a100",
    "where": [{"switch": "rack1", "nodes": ["g01", "g02"]}], "runs": 3, "changes": 2,
    "reported": True, "stopped": None,
}  # fmt: skip


def text_of_end(*, proven=True, **fields):
    answer = ask("explain", job_ids=(4711,)) | {"proven": proven, "ended": FINISHED | fields}
    answer["job"] = answer["job"] | {"state": "ENDED", "gpus": 0, "where": []}
    return text(explain.explained(answer))


def test_explain_a_job_that_completed():
    assert text_of_end().startswith(
        "4711 gpt-small completed at 14:00:00.\n"
        "  Last on:        8 a100 on g01, g02 (rack1), in the last of 3 runs.\n"
        "  Changes:        2 in its life.\n"
        "  Last resize:    "
    )


def test_explain_the_last_change_of_a_job_by_its_name():
    last = {"action": "rehearsal", "from": "1 a100 on g01", "to": "1 a100 on g01"}
    answer = ask("explain", job_ids=(4711,)) | {"ended": FINISHED}
    answer["last"] = answer["last"] | last
    assert "  Rehearsal:      1 a100 on g01 → 1 a100 on g01" in text(explain.explained(answer))
    answer["last"] = answer["last"] | {"action": "hold", "from": "", "to": ""}
    answer["ended"] = None
    assert "  Last change:    held at 14:02:01.\n" in text(explain.explained(answer)) + "\n"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"state": "FAILED", "exit_code": 1},
            "4711 gpt-small failed with exit code 1 at 14:00:00.",
        ),
        (
            {"state": "FAILED", "exit_code": 137},
            "failed with exit code 137 (signal 9, SIGKILL) at 14:00:00.",
        ),
        ({"state": "FAILED", "exit_code": 255}, "failed with exit code 255 at 14:00:00."),
        ({"state": "TIMEOUT"}, "was ended at its time limit at 14:00:00."),
        ({"state": "CANCELLED"}, "was cancelled at 14:00:00."),
        ({"state": "NODE_FAIL"}, "ended because a node failed at 14:00:00."),
        ({"state": "OUT_OF_MEMORY"}, "ran out of memory at 14:00:00."),
        ({"state": "LAUNCH_FAILED"}, "ended as LAUNCH_FAILED at 14:00:00."),
        ({"state": ""}, "4711 gpt-small ended before 14:00:00; how was not seen."),
        ({"state": "", "time": None}, "4711 gpt-small ended; how was not seen."),
        (
            {"gpus": 0, "where": [], "runs": 0, "changes": 0},
            "Never ran:      no run of it is recor",
        ),
        (
            {
                "stopped": {
                    "code": "no-progress",
                    "parameters": {"attempts": 3, "step": 40, "exit_code": 1},
                }
            },
            "  Stopped:        ",
        ),
        ({"changes": 0}, "Changes:        none: it kept its GPUs in every run."),
        ({"reported": False, "changes": 0}, "Never reported: no report of it arrived, so it could"),
        ({"proven": False, "changes": 0}, "Never proven:   it had not written a checkpoint and"),
    ],
)
def test_explain_how_a_job_ended(fields, line):
    assert line in text_of_end(**fields)


def test_explain_a_rigid_job_that_ended():
    answer = ask("explain", job_ids=(4700,))
    answer["ended"] = FINISHED | {
        "gpus": 0,
        "where": [],
        "runs": 1,
        "changes": 0,
        "reported": False,
    }
    assert text(explain.explained(answer)) == (
        "4700 rigid completed at 14:00:00.\n  Not elastic:    it was submitted without --elastic.\n"
    )


def test_explain_an_ended_job_says_nothing_of_what_comes_next():
    shown = text_of_end(reported=False, proven=False)
    for word in ("Next", "Not yet", "Silent", "Why not", "holds", "`selastic release"):
        assert word not in shown


def test_explain_answers_of_an_older_controller():
    answer = ask("explain", job_ids=(4711,))
    del answer["ended"]
    assert "holds" in text(explain.explained(answer))


def test_explain_a_job_on_trial_and_what_is_barred():
    crash = Reason("program-failed", exit_code=1)
    record = JobRecord(
        job_id=4711,
        proven=True,
        on_trial=example.SNAPSHOT.time - 60,
        barred=(("a100", 4, crash), ("v100", 8, Reason("no-newer-checkpoint", waited_s=600.0))),
        half_barred=crash,
    )
    shown = explained(4711, replace(example.PLANNED, records={4711: record}))
    assert "On trial:       the change at 14:04:24 is done once the job has written a" in shown
    assert (
        "Barred:         4 a100 (exit code 1 before its first checkpoint there), 8 v100 (no newer"
        " checkpoint within 10 min), half of 1 GPU (exit code 1 before its first checkpoint there);"
        " `selastic release 4711` allows them again.\n" in shown
    )
    back = Reason("change-failed", gpus=4, gpu_type="a100", reason=crash)
    record = JobRecord(job_id=4711, proven=True, failed=back)
    shown = explained(4711, replace(example.PLANNED, records={4711: record}))
    assert "Going back:     it failed on 4 a100: exit code 1 before its first checkpoint" in shown
    back = Reason("change-failed", gpus=1, gpu_type="a100", gpu_part=0.5, reason=crash)
    shown = explained(4711, replace(example.PLANNED, records={4711: replace(record, failed=back)}))
    assert "Going back:     it failed on half of 1 a100: exit code 1" in shown


def test_explain_a_job_whose_record_others_have_replaced():
    jobs = tuple(replace(j, record_replaced=j.job_id == 4711) for j in example.SNAPSHOT.jobs)
    view = replace(example.PLANNED, snapshot=replace(example.SNAPSHOT, jobs=jobs))
    assert "  Record:         its AdminComment has another text than job_submit.lua wrote; the" in (
        explained(4711, view)
    )
    answer = ask("explain", view, job_ids=(4711,))
    del answer["record_replaced"]  # of an older controller
    assert "Record:" not in text(explain.explained(answer))


def test_nodes_with_several_gpu_types_are_shown_as_not_used():
    nodes = tuple(replace(n, unmanaged_gpus=4 * (n.name == "g03")) for n in example.SNAPSHOT.nodes)
    view = replace(example.VIEW, snapshot=replace(example.SNAPSHOT, nodes=nodes))
    assert (
        "Not used:       g03: no job grows onto nodes with several GPU types or slices (MIG)."
        in explained(4711, view)
    )
    (partition, *_) = status.lines(ask("status", view), TableLayout())
    assert "   4 more on nodes with several types or slices   " in partition
    answer = ask("explain", view, job_ids=(4711,))
    del answer["unmanaged_nodes"]  # of an older controller
    assert "Not used:" not in text(explain.explained(answer))


@pytest.mark.parametrize(("outcome", "shown"), [("trial", " on trial "), ("failed", " failed ")])
def test_history_of_a_change_that_is_not_done(outcome, shown):
    answer = ask("history")
    answer["changes"][0]["outcome"] = outcome
    assert shown in change_history.past(answer, TableLayout())[1]
