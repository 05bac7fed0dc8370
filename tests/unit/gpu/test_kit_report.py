"""The report of the GPU kit: states, JSON, Markdown."""

import json
from pathlib import Path

import pytest

from tests.gpu.kit_report import (
    FAILED,
    PASSED,
    KitReport,
    PartResult,
    part_state,
    to_json,
    to_markdown,
    write,
)
from tests.gpu.report_rows import MEASURED, NOT_RUN, OK, WRONG, ReportRow, RowWriter, read_rows

MACHINE = {
    "host": "node7",
    "torch": "2.13.0",
    "driver": None,
    "gpus": [{"name": "H100", "memory_bytes": 80 * 2**30, "capability": "9.0"}] * 2,
    "topology": "GPU0 X NV18",
    "variables": {"NCCL_DEBUG": "INFO"},
}
GOOD = ReportRow("loss", OK, 1.25e-7, expected="at most 1e-05")
BAD = ReportRow("a | b", WRONG, float("nan"), "s", "at most 2")
FIGURE = ReportRow("step", MEASURED, 12.3456, "ms")
ABSENT = ReportRow("FSDP2", NOT_RUN, "needs 2 GPUs")


def report(*parts: PartResult, device: str = "cuda") -> KitReport:
    return KitReport("2026-11-23T17:00:00+00:00", device, 2, MACHINE, parts)


@pytest.fixture
def rows(tmp_path: Path) -> RowWriter:
    return RowWriter(tmp_path / "rows", checks_times=True)


@pytest.mark.parametrize(
    ("rows", "reason", "state", "shown"),
    [
        ((GOOD, FIGURE), "", PASSED, ""),
        ((GOOD, BAD, ABSENT), "", FAILED, "1 of 3 rows: a | b"),
        ((GOOD,), "was ended after 3 s", FAILED, "was ended after 3 s"),
        ((ABSENT, ABSENT), "", NOT_RUN, "needs 2 GPUs"),
        ((), "", NOT_RUN, "it had nothing to do"),
    ],
)
def test_the_state_of_a_part_follows_from_its_rows(rows, reason, state, shown) -> None:
    assert part_state(rows, reason) == (state, shown)


def test_json_holds_everything_in_a_form_that_any_reader_takes() -> None:
    text = to_json(report(PartResult("layouts", "Walk", FAILED, 1.5, "x", (GOOD, BAD), ("line",))))
    body = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (body["gpu_kit"], body["ranks"], body["machine"]["host"]) == (1, 2, "node7")
    (part,) = body["parts"]
    assert [row["value"] for row in part["rows"]] == [1.25e-7, "nan"]
    assert part["log"] == ["line"]


def test_markdown_shows_machine_parts_and_rows() -> None:
    failed = PartResult("layouts", "Walk", FAILED, 61.2, "1 row", (GOOD, BAD, FIGURE), ("```",))
    lines = to_markdown(report(failed, PartResult("own_loop", "Loop", PASSED, 2.0))).splitlines()
    assert lines[0] == "# GPU kit on node7: 2 x H100"
    for line in (
        "| GPU 1 | H100, 80 GiB, compute capability 9.0 |",
        "| NCCL_DEBUG | INFO |",
        "| [layouts](#layouts) | FAILED | 61 | 1 row |",
        "| [own_loop](#own_loop) | passed | 2 | Loop |",
        "| loss | 1.25e-07 | at most 1e-05 | ok |",
        "| a \\| b | nan s | at most 2 | WRONG |",
        "| step | 12.35 ms |  |  |",
        "GPU0 X NV18",
    ):
        assert line in lines
    assert not [line for line in lines if line.startswith("| driver")]
    assert lines.count("```") == 4


def test_a_report_of_the_cpu_says_that_it_tries_only_the_kit() -> None:
    assert "not the GPU paths" in to_markdown(report(device="cpu")).splitlines()[0]


@pytest.mark.parametrize("name", ["gpu", "gpu.json", "gpu.md"])
def test_both_forms_are_written_beside_each_other(tmp_path: Path, name: str) -> None:
    paths = write(report(), tmp_path / "new" / name)
    assert paths == (tmp_path / "new" / "gpu.json", tmp_path / "new" / "gpu.md")
    assert paths[1].read_text() == to_markdown(report())


def test_a_path_with_another_dot_keeps_it(tmp_path: Path) -> None:
    assert write(report(), tmp_path / "node7.cluster")[0].name == "node7.cluster.json"


def test_rows_are_read_as_written_also_those_of_a_killed_part(
    rows: RowWriter, tmp_path: Path
) -> None:
    rows.measured("step", 3.0, "ms")
    rows.at_most("loss", 2.0, 1.0)
    rows.at_most("loss", float("nan"), 1.0)
    rows.timed("ratio", 1.0, 0.5, 1.5, note="2 ms")
    rows.not_run("FSDP2", "needs 2 GPUs")
    with (tmp_path / "rows").open("a") as file:
        file.write('{"what": "unfin')
    found = read_rows(tmp_path / "rows")
    assert [row.state for row in found] == [MEASURED, WRONG, WRONG, OK, NOT_RUN]
    assert found[3].expected == "0.5 to 1.5 (2 ms)"
    assert read_rows(tmp_path / "none") == ()


def test_times_of_a_cpu_are_recorded_and_not_checked(tmp_path: Path) -> None:
    RowWriter(tmp_path / "rows", checks_times=False).timed("ratio", 9.0, 0.5, 1.5)
    assert [row.state for row in read_rows(tmp_path / "rows")] == [MEASURED]


def test_a_trial_that_fails_becomes_a_row_with_the_error(rows: RowWriter, tmp_path: Path) -> None:
    with rows.trial("FSDP2"):
        raise SystemExit("a rank failed:\nstart\nRuntimeError: no room\nbye")
    with rows.trial("DDP"):
        raise ValueError
    values = [(row.what, row.state, row.value) for row in read_rows(tmp_path / "rows")]
    assert values == [
        ("FSDP2", WRONG, "RuntimeError: no room"),
        ("DDP", WRONG, "ValueError()"),
    ]
