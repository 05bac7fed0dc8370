"""Jobs from accounting files, and workloads from jobs that take as long as the jobs did."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.application import JobClass
from slurm_elastic.simulator.truth import ground_truth
from slurm_elastic.simulator.workloads import accounting_trace, curve_jobs, scaling_curves
from slurm_elastic.simulator.workloads.accounting_trace import JobSelection
from slurm_elastic.simulator.workloads.workload import WorkloadError

WEEK = Path(__file__).parents[3] / "data" / "sacct-week.txt"
HEADER = accounting_trace.COLUMNS.replace(",", "|")


def _past(tmp_path, *rows, header=HEADER, **options):
    path = tmp_path / "sacct.txt"
    path.write_text("\n".join([header, *rows]) + "\n")
    return accounting_trace.read(path, **options)


def _row(job="1", *, submit="2026-10-05T08:00:00", start="2026-10-05T09:00:00", seconds="3600",
         state="COMPLETED", tres="cpu=8,gres/gpu:a100=4,gres/gpu=4", name="train"):  # fmt: skip
    return f"{job}|{name}|alice|{submit}|{start}|Unknown|{seconds}|{state}|{tres}|1"


def test_the_example_is_read_whole():
    past = accounting_trace.read(WEEK)
    assert len(past.jobs) == 78
    assert past.summary() == (
        "78 GPU jobs taken; left out: 3 never started, 5 shorter than 60 s, 16 without GPUs;"
        " 3 requeued (all their runs count), 15 that failed, timed out or were cancelled"
        " (as far as they came)"
    )
    assert {r.gpu_type for j in past.jobs for r in j.runs} == {"a100", "v100"}
    assert len(accounting_trace.read(WEEK, JobSelection(completed_only=True)).jobs) == 63


def test_a_requeued_job_has_one_life(tmp_path):
    past = _past(
        tmp_path,
        _row(state="PREEMPTED", seconds="1800"),
        _row(submit="2026-10-05T09:30:00", start="2026-10-05T10:00:00", seconds="600"),
    )
    (job,) = past.jobs
    assert job.seconds == 2400
    assert job.end - job.submit == 2 * 3600 + 600
    assert past.notes == {"requeued (all their runs count)": 1}


def test_array_tasks_are_jobs_and_steps_are_none(tmp_path):
    waiting = _row("7_[3-9]", start="None", seconds="0", tres="")
    past = _past(tmp_path, _row("7_1"), _row("7_1.batch"), _row("7_2"), waiting)
    assert [j.job_id for j in past.jobs] == ["7_1", "7_2"]
    assert past.left_out == {"never started": 1}


@pytest.mark.parametrize(
    ("tres", "expected"),
    [
        ("gres/gpu:a100=4,gres/gpu=4", ("a100", 4)),
        ("gres/gpu=3", ("", 3)),
        ("gres/gpu:a100=1,gres/gpu:v100=2,gres/gpu=3", ("v100", 3)),
        ("billing=2,gres/gpu:nvidia_a100_80gb=8", ("nvidia_a100_80gb", 8)),
    ],
)
def test_gpus_and_types_come_from_the_tres(tmp_path, tres, expected):
    run = _past(tmp_path, _row(tres=tres)).jobs[0].main
    assert (run.gpu_type, run.gpus) == expected


def test_a_name_may_hold_the_separator(tmp_path):
    (job,) = _past(tmp_path, _row(name="a|b|c")).jobs
    assert (job.name, job.user, job.seconds) == ("a|b|c", "alice", 3600)


def test_few_columns_suffice(tmp_path):
    past = _past(
        tmp_path,
        "3|2026-10-05T08:00:00|1-01:00:05|gres/gpu=2",
        header="JobID|Submit|Elapsed|AllocTRES",
    )
    assert past.jobs[0].seconds == 25 * 3600 + 5


@pytest.mark.parametrize(
    ("rows", "header", "words"),
    [
        ((), HEADER, "has no GPU job"),
        (("x",), "a|b", "sacct.txt:1: no header with JobID"),
        (("1|now",), "JobID|Submit|ElapsedRaw", "no column AllocTRES"),
        (("1|now|gres/gpu=1",), "JobID|Submit|AllocTRES", "no column ElapsedRaw"),
        (("1|5|gres/gpu=1",), "JobID|ElapsedRaw|AllocTRES", "no column Submit"),
        ((_row(seconds="an hour"),), HEADER, "sacct.txt:2: ElapsedRaw"),
        ((_row(submit="May"),), HEADER, "sacct.txt:2: .May. is invalid: expected a time"),
        ((_row(), "cut",), HEADER, "sacct.txt:3: .cut. is no job id"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_with_its_line(tmp_path, rows, header, words):
    with pytest.raises(accounting_trace.SacctError, match=words):
        _past(tmp_path, *rows, header=header)


def _json(tmp_path, *jobs):
    path = tmp_path / "sacct.json"
    path.write_text(json.dumps({"jobs": list(jobs)}))
    return accounting_trace.read(path)


def _entry(**change):
    entry = {
        "job_id": 12, "name": "train", "user": "alice",
        "array": {"job_id": 0, "task_id": {"set": False, "infinite": False, "number": 0}},
        "het": {"job_id": 0}, "allocation_nodes": 2, "state": {"current": ["COMPLETED"]},
        "time": {"elapsed": 7200, "submission": 1000, "start": 2000, "end": 9200},
        "tres": {"allocated": [
            {"type": "cpu", "name": "", "count": 8},
            {"type": "gres", "name": "gpu", "count": 8},
            {"type": "gres", "name": "gpu:a100", "count": 8},
        ]},
    }  # fmt: skip
    return entry | change


def test_json_says_the_same(tmp_path):
    past = _json(
        tmp_path,
        _entry(),
        _entry(job_id=14, array={"job_id": 13, "task_id": {"set": True, "number": 5}}),
        _entry(job_id=15, het={"job_id": 15}),
        _entry(job_id=16, tres={}),
        _entry(job_id=17, state="FAILED"),
        {"job_id": 18},
    )
    assert [j.job_id for j in past.jobs] == ["12", "13_5", "17"]
    assert past.jobs[0].main == accounting_trace.PastRun(2000, 7200, "a100", 8, 2)
    assert past.left_out == {"heterogeneous jobs": 1, "without GPUs": 1, "never started": 1}


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not JSON"), ('{"a": 1}', "no list"), ('{"jobs": [3]}', "job 1")]
)
def test_broken_json_is_refused(tmp_path, text, words):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(accounting_trace.SacctError, match=words):
        accounting_trace.read(path)


@pytest.mark.parametrize("text", ["linear", "amdahl:0.9", "1=1;2=1.5;4=2", "none"])
def test_at_its_own_size_a_job_takes_as_long_as_it_took(tmp_path, text):
    """Whatever is believed of its scaling: the curve only says what other sizes would give."""
    rules = scaling_curves.rules(text)
    past = accounting_trace.read(WEEK)
    jobs = curve_jobs.from_accounting(past, rules, speeds={"a100": 2.0, "v100": 1.0})
    work, tables = curve_jobs.build(
        "week", jobs, ("a100", "v100"), speeds={"a100": 2.0, "v100": 1.0}
    )
    was = {j.job_id: j for j in past.jobs}
    for job in work.jobs:
        truth = ground_truth.GroundTruth(tables[job.application])
        run = was[job.name].main
        micro, more = truth.fixed_batch(run.gpu_type, (job.gpus,), job.batch)
        assert more == 0
        rate = truth.goodput(run.gpu_type, (job.gpus,), micro, more, 0)
        if len(was[job.name].runs) == 1:
            assert truth.total / rate == pytest.approx(run.seconds, rel=2e-3)
        assert job.job_class is (JobClass.RIGID if text == "none" else JobClass.ADAPTIVE)
        bigger = truth.goodput(run.gpu_type, (2 * job.gpus,), max(1, micro // 2), 0, 0)
        ratio = rules.of("x").speed(2 * job.gpus) / rules.of("x").speed(job.gpus)
        assert bigger / rate == pytest.approx(ratio, rel=5e-3)


def test_a_workload_file_says_it_all(tmp_path):
    jobs = curve_jobs.from_accounting(
        accounting_trace.read(WEEK), scaling_curves.rules("amdahl:0.9")
    )
    path = tmp_path / "week.csv"
    with path.open("w") as stream:
        curve_jobs.write(jobs, stream)
    assert curve_jobs.has_curves(path)
    name, again = curve_jobs.read(path)
    assert name == "week"
    for a, b in zip(jobs, again, strict=True):
        assert b.work_s == pytest.approx(a.work_s, rel=1e-5)
        assert (a.scaling, a.gpu_type, a.submitted.gpus, a.submitted.most, a.submitted.user) == (
            b.scaling, b.gpu_type, b.submitted.gpus, b.submitted.most, b.submitted.user,
        )  # fmt: skip
    again_stream = io.StringIO()
    curve_jobs.write(again, again_stream)
    assert again_stream.getvalue() == path.read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("amdahl:0.9", "amdahl:9", "w.csv:2: .*from 0 to 1"),
        (",2.5,", ",-1,", "w.csv:2: work_h"),
        ("1,1024", "x,1024", "w.csv:2: num_replicas"),
    ],
)
def test_a_workload_file_with_errors_is_refused(tmp_path, old, new, words):
    text = ",".join(curve_jobs.HEADER) + "\n7,0,a,1,1024,adaptive,eve,v100,4,2.5,amdahl:0.9\n"
    path = tmp_path / "w.csv"
    path.write_text(text.replace(old, new))
    with pytest.raises(WorkloadError, match=words):
        curve_jobs.read(path)


def test_types_are_kept_unless_their_speeds_are_stated():
    jobs = curve_jobs.from_accounting(accounting_trace.read(WEEK), scaling_curves.rules("linear"))
    with pytest.raises(WorkloadError, match=r"ran on a100.*--cluster.*--speeds a100=1,v100=2"):
        curve_jobs.build("w", jobs, ("v100",))
    _, restricted = curve_jobs.build("w", jobs, ("v100", "a100"))
    assert {len(p.types) for p in restricted.values()} == {1}
    _, free = curve_jobs.build("w", jobs, ("v100", "a100"), speeds={"v100": 1, "a100": 3})
    assert {len(p.types) for p in free.values()} == {2}
    speeds = {"v100": 1.0, "a100": 3.0}
    _, plain = curve_jobs.build("w", jobs, ("v100", "a100"), speeds=speeds, keep_types=True)
    assert {len(p.types) for p in plain.values()} == {1}


def test_curves():
    c = scaling_curves.curve("1=1;2=1.5;4=2")
    assert [c.speed(n) for n in (1, 2, 3, 4, 64)] == [1, 1.5, 1.75, 2, 2]
    assert scaling_curves.curve("amdahl:0").speed(9) == pytest.approx(1)
    assert scaling_curves.curve("amdahl:1").speed(9) == pytest.approx(9)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "amdahl:", "amdahl:nan", "amdahl:1.1", "2=1", "1=1;2=x", "1=1;2=9", "1=1;1=1"],
)
def test_curves_that_cannot_be(text):
    with pytest.raises(scaling_curves.ScalingError):
        scaling_curves.curve(text)


def test_rules_of_a_file(tmp_path):
    path = tmp_path / "curves.csv"
    path.write_text("match,scaling\n# comment\ngpt*,linear\n*,none\n")
    rules = scaling_curves.rules(str(path))
    assert (rules.of("gpt-3").name, rules.of("bert").name) == ("linear", "none")
    path.write_text("match,scaling\ngpt*,linear\nx*,amdahl:7\n")
    with pytest.raises(scaling_curves.ScalingError, match=r"curves.csv:3: .*amdahl:0.95"):
        scaling_curves.rules(str(path))
    path.write_text("match,scaling\ngpt*,linear\n")
    with pytest.raises(scaling_curves.ScalingError, match="bert"):
        scaling_curves.rules(str(path)).of("bert")
    path.write_text("a,b\n")
    with pytest.raises(scaling_curves.ScalingError, match=r"curves\.csv:1"):
        scaling_curves.rules(str(path))


_ODD = st.sampled_from(
    ["", "|", "-1", "nan", "1e400", "99999999999999999999", "gres/gpu=0", "None", "Unknown", "[",
     "2026-02-30T00:00:00", "9999-12-31T23:59:59", "0001-01-01T00:00:00", "\x00", "é", "INVALID"]
)  # fmt: skip


@settings(max_examples=80)
@given(line=st.integers(0, 11), cell=st.integers(0, 9), odd=_ODD | st.text(max_size=12))
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path_factory, line, cell, odd):
    lines = WEEK.read_text().splitlines()[:12]
    cells = lines[line].split("|")
    lines[line] = "|".join([*cells[:cell], odd, *cells[cell + 1 :]])
    path = tmp_path_factory.mktemp("odd") / "x.txt"
    path.write_bytes("\n".join(lines).encode("utf-8", "replace"))
    message = ""
    try:
        past = accounting_trace.read(path)
        jobs = curve_jobs.from_accounting(past, scaling_curves.rules("amdahl:0.9"))
        curve_jobs.build("x", jobs, ("a100", "v100"))
    except (accounting_trace.SacctError, WorkloadError) as error:
        message = str(error)
    assert "\n" not in message


@settings(max_examples=80)
@given(
    key=st.sampled_from(["job_id", "name", "user", "array", "het", "allocation_nodes", "state",
                         "time", "tres"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["elapsed", "start", "allocated", "task_id", "current",
                                           "number", "set", "type", "count", "name"]), inner),
        max_leaves=6,
    ),
)  # fmt: skip
def test_odd_json_is_read_or_refused(tmp_path_factory, key, value):
    path = tmp_path_factory.mktemp("odd") / "x.json"
    path.write_text(json.dumps({"jobs": [_entry(), _entry(**{key: value})]}))
    with contextlib.suppress(accounting_trace.SacctError):
        accounting_trace.read(path)
