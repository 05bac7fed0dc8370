"""Files of sacct as sites have them: separators, joined months, suspended jobs, broken rows."""

import bz2
import doctest
import gzip
import json
import os
import threading
from pathlib import Path

import pytest

from slurm_elastic.simulator.workloads import accounting_trace, input_lines, past_durations
from slurm_elastic.simulator.workloads.accounting_row import COLUMNS, SacctError
from slurm_elastic.simulator.workloads.accounting_trace import JobSelection

WEEK = Path(__file__).parents[3] / "data" / "sacct-week.txt"
HEADER = COLUMNS.replace(",", "|")


def row(job="1", *, name="train", submit="2026-10-05T08:00:00", start="2026-10-05T09:00:00",
        end="Unknown", seconds="3600", state="COMPLETED",
        tres="gres/gpu:a100=4,gres/gpu=4"):  # fmt: skip
    return f"{job}|{name}|alice|{submit}|{start}|{end}|{seconds}|{state}|{tres}|1"


def read(tmp_path, *rows, header=HEADER, selection=None):
    path = tmp_path / "sacct.txt"
    path.write_bytes("\n".join([header, *rows, ""]).encode())
    return accounting_trace.read(path, selection)


def refusal(tmp_path, *rows, header=HEADER):
    with pytest.raises(SacctError) as error:
        read(tmp_path, *rows, header=header)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        gzip.compress,
        lambda b: b"\xef\xbb\xbf" + b,
        lambda b: b.replace(b"\n", b"\r\n"),
        lambda b: b.decode().encode("utf-16"),
        lambda b: gzip.compress(b.replace(b"\n", b"\r\n").decode().encode("utf-16")),
        lambda b: b.replace(b"\n", b"|\n"),  # sacct -p
        lambda b: b.replace(b"|", b"\t"),
        lambda b: b.replace(b"|", b";"),
        lambda b: b.replace(b"JobID|", b"JobIDRaw|"),
        lambda b: b.replace(b"T08:", b" 08:").replace(b"T09:", b" 09:"),
        lambda b: b"\n\n" + b,
    ],
)
def test_forms_of_a_file_that_say_the_same(tmp_path, change):
    path = tmp_path / "week"
    path.write_bytes(change(WEEK.read_bytes()))
    assert accounting_trace.read(path) == accounting_trace.read(WEEK)


def test_a_pipe_is_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(WEEK.read_bytes(),))
    writer.start()
    try:
        assert accounting_trace.read(path) == accounting_trace.read(WEEK)
    finally:
        writer.join()


def test_damaged_and_other_archives_are_refused(tmp_path):
    path = tmp_path / "week.gz"
    path.write_bytes(gzip.compress(WEEK.read_bytes())[:-30])
    with pytest.raises(SacctError, match=r"week\.gz: is damaged .*; copy it again"):
        accounting_trace.read(path)
    path.write_bytes(bz2.compress(WEEK.read_bytes()))
    with pytest.raises(SacctError, match=r"week\.gz: is compressed; unpack it first: bunzip2"):
        accounting_trace.read(path)


def test_commas_between_columns_need_quotation_marks(tmp_path):
    header = "JobID,Submit,ElapsedRaw,AllocTRES"
    past = read(tmp_path, '1,2026-10-05T08:00:00,3600,"cpu=8,gres/gpu=4"', header=header)
    assert past.jobs[0].main.gpus == 4
    text = refusal(tmp_path, "1,2026-10-05T08:00:00,3600,cpu=8,gres/gpu=4", header=header)
    assert (
        "sacct.txt:2: 5 cells under 4 columns: AllocTRES holds commas; write the file with" in text
    )


def test_a_job_in_two_joined_months_counts_once(tmp_path):
    """`cat october.txt november.txt`: a job that ran over the turn stands in both."""
    as_of_october = row("1", seconds="1800", state="RUNNING")
    past = read(tmp_path, as_of_october, HEADER, row("1"), row("2"), row("2"))
    assert [(j.job_id, j.seconds, j.state) for j in past.jobs] == [
        ("1", 3600, "COMPLETED"),
        ("2", 3600, "COMPLETED"),
    ]
    assert past.notes == {"in the file more than once (counted once)": 2}


def test_jobs_of_two_clusters_with_one_id_are_left_out(tmp_path):
    other = row("1", start="2026-10-05T09:10:00", seconds="86400")
    past = read(tmp_path, row("1", seconds="7200"), other, row("2"))
    assert [j.job_id for j in past.jobs] == ["2"]
    assert past.left_out == {"whose runs overlap (jobs of several clusters with one id?)": 1}


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED", "REQUEUED"])
def test_a_job_that_is_suspended_or_waits_for_another_run_has_not_ended(tmp_path, state):
    past = read(tmp_path, row("1", state=state), row("2"))
    assert past.notes == {"that have not ended (as far as they came)": 1}
    assert len(past_durations.finished(past)) == 1


def test_a_job_that_was_suspended_ended_when_it_did(tmp_path):
    (job,) = read(tmp_path, row(end="2026-10-05T12:00:00")).jobs
    assert (job.end - job.submit, job.seconds) == (4 * 3600, 3600)


def test_requested_gpus_count_where_allocated_ones_are_not_shown(tmp_path):
    header = HEADER.replace("AllocTRES", "ReqTRES")
    assert read(tmp_path, row(), header=header).jobs[0].main.gpus == 4


def test_a_site_that_does_not_account_gpus_gets_the_remedy(tmp_path):
    text = refusal(tmp_path, row(tres="cpu=8,mem=4G"))
    assert "1 without GPUs); sacct shows GPUs if AccountingStorageTRES in slurm.conf has" in text


def test_a_cut_row_is_named(tmp_path):
    text = refusal(tmp_path, row("1"), row("2")[:40], row("3"))
    assert text == "sacct.txt:3: 5 cells under 10 columns; was the file cut or edited?"
    text = refusal(tmp_path, row("1"), row("2")[:40])
    assert text == "sacct.txt:3: 5 cells under 10 columns; was the file cut or edited?"


@pytest.mark.parametrize(
    "name", ["a\nb", "a\x0bb", "a\u2028b", "a\x85b", "a\n|\nb|c", "Ünïcødé 日本"]
)
def test_names_with_line_ends_and_separators(tmp_path, name):
    past = read(tmp_path, row("1", name=name), row("2"))
    assert [j.job_id for j in past.jobs] == ["1", "2"]
    assert past.jobs[0].name == name.replace("\n", " ")


def test_another_text_of_users_may_hold_the_separator(tmp_path):
    header = f"{HEADER}|SubmitLine|Partition"
    past = read(tmp_path, f'{row("1")}|sbatch --wrap="a | b"|gpu', header=header)
    assert [(j.name, j.partition, j.seconds) for j in past.jobs] == [("train", "gpu", 3600)]


def test_two_texts_of_users_may_hold_the_separator(tmp_path):
    """A name that is given on the command line stands in SubmitLine, too."""
    header = f"Comment|{HEADER}|SubmitLine|Partition"
    name = "a|b c|d"
    line = f'x|{row("1", name=name)}|sbatch -J "{name}" --wrap "ls | wc\n"|gpu'
    past = read(tmp_path, line, f"|{row('2')}|sbatch x|gpu", header=header)
    assert [(j.job_id, j.name, j.partition, j.seconds) for j in past.jobs] == [
        ("1", name, "gpu", 3600),
        ("2", "train", "gpu", 3600),
    ]
    text = refusal(tmp_path, f"{row('1')}|x", header=HEADER.replace("JobName", "QOS"))
    assert "sacct.txt:2: 11 cells under 10 columns; write the file without columns that" in text


def test_texts_with_separators_and_line_ends_in_any_column(tmp_path):
    """As of `sacct -o ALL`, where Comment stands before JobID, and WorkDir is the last column."""
    header = f"Comment|{HEADER}|SubmitLine|WorkDir"
    rows = [
        f"|{row('1')}|sbatch x|/home/a",
        f"|{row('1.batch')}||",
        f"a|b|{row('2')}|sbatch --wrap one\ntwo | cat|/home/a",
        f"|{row('3', name='c|d')}|sbatch -J c|d\nx|/home/b",
        f"|{row('4')}|sbatch x|/home/a",
    ]
    past = read(tmp_path, *rows, header=header)
    assert [(j.job_id, j.name) for j in past.jobs] == [
        ("1", "train"), ("2", "train"), ("3", "c|d"), ("4", "train"),
    ]  # fmt: skip
    past = read(tmp_path, f"{row('1')}|one\ntwo", f"{row('2')}|x", header=f"{HEADER}|SubmitLine")
    assert [j.job_id for j in past.jobs] == ["1", "2"]
    assert "sacct.txt:2: 71 cells" in refusal(tmp_path, row("1", name="|" * 61))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seconds": "4294967293"}, "with an impossible run time or number of GPUs"),
        ({"tres": "gres/gpu=99999999999"}, "with an impossible run time or number of GPUs"),
        ({"tres": "gres/gpu=" + "9" * 5000}, "with an impossible run time or number of GPUs"),
        ({"seconds": ""}, "without a run time"),
        ({"seconds": "0"}, "shorter than 60 s"),
        ({"start": "None", "seconds": "0"}, "never started"),
    ],
)
def test_impossible_values_are_left_out_and_counted(tmp_path, change, reason):
    past = read(tmp_path, row("1"), row("2", **change))
    assert (len(past.jobs), past.left_out) == (1, {reason: 1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": "-5"}, 'sacct.txt:2: ElapsedRaw "-5" is invalid: expected seconds'),
        ({"seconds": "٣"}, 'ElapsedRaw "٣" is invalid: expected seconds'),
        (
            {"submit": "12:33"},
            '"12:33" is invalid: expected a time; unset SLURM_TIME_FORMAT when sacct runs',
        ),
        ({"submit": "9999-12-31T23:59:59"}, "is invalid: expected a time"),
        ({"tres": "4"}, 'AllocTRES "4" is invalid'),
    ],
)
def test_other_values_are_refused(tmp_path, change, words):
    assert words in refusal(tmp_path, row("1", **change))


def test_times_with_a_zone(tmp_path):
    past = read(tmp_path, row(submit="2026-10-05T08:00:00+0200", start="2026-10-05T07:00:00Z"))
    (job,) = past.jobs
    assert (job.submit, job.runs[0].start) == (1791180000, 1791183600)


def test_a_selection_by_time_and_partition(tmp_path):
    header = f"{HEADER}|Partition"
    rows = [
        row("1", submit="2026-10-04T23:59:59") + "|gpu",
        row("1", submit="2026-10-05T10:00:00", start="2026-10-05T11:00:00") + "|gpu",
        row("2") + "|gpu",
        row("3", submit="2026-10-06T00:00:00", start="2026-10-06T00:00:00") + "|gpu",
        row("4") + "|debug",
    ]
    begin, end = (accounting_trace.read(_day(tmp_path, d)).jobs[0].submit for d in ("05", "06"))
    chosen = JobSelection(begin=begin, end=end, partition="gpu")
    past = read(tmp_path, *rows, header=header, selection=chosen)
    assert [j.job_id for j in past.jobs] == ["2"]
    assert past.left_out == {"of other partitions": 1, "submitted outside of the period": 2}


def _day(tmp_path, day):
    path = tmp_path / day
    midnight = f"2026-10-{day}T00:00:00"
    path.write_text(f"{HEADER}\n{row(submit=midnight, start=midnight)}\n")
    return path


def entry(**change):
    """A job as sacct 21.08 to 22.05 shows it; later releases write numbers as objects."""
    return {
        "job_id": 12, "name": "train", "user": "alice",
        "association": {"account": "a", "cluster": "c", "partition": None, "user": "bob"},
        "array": {"job_id": 0, "task_id": None}, "het": {"job_id": None, "job_offset": None},
        "allocation_nodes": 1, "state": {"current": "COMPLETED", "reason": "None"},
        "time": {"elapsed": 3600, "submission": 1000, "start": 2000, "end": 5600, "limit": 90},
        "tres": {"allocated": [{"type": "gres", "name": "gpu", "id": 1001, "count": 4}]},
    } | change  # fmt: skip


def test_json_of_several_releases(tmp_path):
    path = tmp_path / "sacct.json"
    new = entry(
        job_id=10000013, user="",
        array={"job_id": 10000000, "task_id": {"set": True, "infinite": False, "number": 12}},
        het={"job_id": 0, "job_offset": {"set": False, "infinite": False, "number": 0}},
        state={"current": ["TIMEOUT"], "reason": "None"},
        time={"elapsed": 3600, "submission": 1000, "start": 2000, "end": 5600,
              "limit": {"set": True, "infinite": False, "number": 90}},
    )  # fmt: skip
    path.write_bytes(gzip.compress(json.dumps({"jobs": [entry(), new]}).encode()))
    jobs = sorted(accounting_trace.read(path).jobs, key=lambda j: j.user)
    assert [(j.job_id, j.user, j.limit_s, j.state) for j in jobs] == [
        ("12", "alice", 5400, "COMPLETED"),
        ("10000000_12", "bob", 5400, "TIMEOUT"),
    ]


def test_an_elapsed_time_that_slurm_got_wrong(tmp_path):
    path = tmp_path / "sacct.json"
    wrong = entry(job_id=13, time={"elapsed": 4294967293, "submission": 1000, "start": 2000})
    path.write_text(json.dumps({"jobs": [entry(), wrong]}))
    past = accounting_trace.read(path)
    assert past.left_out == {"with an impossible run time or number of GPUs": 1}


def test_example_of_the_lines():
    assert doctest.testmod(input_lines).failed == 0


def test_progress_of_a_long_file(tmp_path):
    path = tmp_path / "long.txt.gz"
    path.write_bytes(gzip.compress("\n".join([HEADER, *[row()] * 25_000]).encode()))
    parts = []
    accounting_trace.read(path, progress=parts.append)
    assert len(parts) == 2
    assert parts == sorted(parts)
    assert 0 < parts[0] <= 1
