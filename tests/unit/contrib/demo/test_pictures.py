"""The live display and the timeline."""

import io

import pytest
from rich.console import Console

from contrib.demo import sacct, scenario, timeline
from contrib.demo.cluster_view import ClusterView, VisibleJob
from contrib.demo.colours import colours
from contrib.demo.gpu_blocks import adjacent, blocks, waits
from contrib.demo.gpu_rows import racks, rows
from contrib.demo.screen import Screen
from tests.support.sacct_rows import ROWS

RACKS = racks(
    "\n".join(
        f"g0{i} {kind},rack{1 + (i > 3)} gpu:{kind}:4"
        for i, kind in enumerate(("a100", "a100", "v100", "a100", "v100", "v100"), start=1)
    )
)
VIEW = ClusterView(
    time=83.0,
    jobs={
        "train": VisibleJob(
            job_id=9, name="train", user="bob", state="RUNNING", gpu_type="a100",
            gpus={"g01": (0, 1, 2, 3)},
        ),
        "gpt": VisibleJob(
            job_id=5, name="gpt", user="alice", state="RUNNING", gpu_type="a100",
            gpus={"g02": (0, 1, 3)}, directive="3-8", step=40, run=1,
        ),
        "old": VisibleJob(job_id=1, name="old", user="bob", state="COMPLETED"),
    },
)  # fmt: skip


def shown(*, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    screen = Screen(
        racks=RACKS,
        colours=colours(["gpt"], ["train", "old"]),
        steps={"gpt": 192},
        start=0.0,
        console=console,
    )
    with screen:
        screen.announce("bob's train wants a node", VIEW)
        screen.show(VIEW)
        screen.show(VIEW)
    return file.getvalue()


def test_plain_lines():
    lines = shown(terminal=False).splitlines()
    assert " ".join(lines[0].split()) == "JOBID NAME USER DIRECTIVE STATE WHERE STEP RUNS"
    assert " ".join(lines[1].split()) == "5 gpt alice 3-8 running 3 a100 on g02 40/192 2"
    assert not any("old" in line for line in lines)
    assert " 1:23  » bob's train wants a node" in lines
    assert lines[-1].strip().startswith("rack1  g01 tttt  g02 GG.G  g03 ....  rack2  g04")
    assert len([line for line in lines if "rack1" in line]) == 1
    assert "\x1b" not in "".join(lines)


def test_a_terminal_is_redrawn():
    text = shown(terminal=True)
    assert "\x1b[" in text
    assert "g g · g" in text
    assert "3 a100 on g02" in text


def test_blocks_take_the_rows_that_were_seen():
    found = blocks(sacct.parse(ROWS), rows(RACKS), {("gpt", 0): {"g01": (0, 1, 2, 3)}})
    gpt = [b for b in found if b.name == "gpt"]
    assert [(b.top, b.bottom, b.gpus) for b in gpt] == [(0, 3, 4), (0, 7, 8), (4, 7, 4), (4, 7, 4)]
    assert gpt[0].start == 2


def test_blocks_that_were_not_seen_do_not_overlap():
    text = ROWS.replace(
        "6|vit|alice|REQUEUED|0:0|100|102|140|", "6|vit|alice|REQUEUED|0:0|100|141|143|"
    )
    two = "".join(
        f"{i}|j{i}|bob|COMPLETED|0:0|100|110|120|gres/gpu:v100=2,gres/gpu=2|g06|00:00:00\n"
        for i in (20, 21)
    )
    found = [b for b in blocks(sacct.parse(text + two), rows(RACKS), {}) if b.name[0] == "j"]
    assert [(b.top, b.bottom) for b in found] == [(20, 21), (22, 23)]


def test_waits_are_before_and_between_runs():
    found = [(w.start, w.end, w.between_runs) for w in waits(sacct.parse(ROWS)) if w.name == "gpt"]
    assert found == [(0, 2, False), (35, 39, True), (60, 64, True), (80, 97, True)]


def test_adjacent_rows():
    assert adjacent([3, 1, 2, 7]) == [(1, 3), (7, 7)]


@pytest.mark.parametrize("rows_", [ROWS, ROWS.splitlines()[2] + "\n"])
def test_a_picture_is_drawn(tmp_path, rows_):
    attempts = sacct.parse(rows_)
    play = timeline.Timeline(
        title="test",
        racks=RACKS,
        attempts=attempts,
        changes=sacct.changes(attempts),
        placements={},
        saves=[("gpt", 120.0), ("nobody", 130.0)],
        colours=colours(["gpt", "vit", "never"], ["train", "urgent"]),
        elastic=("gpt", "vit"),
    )
    timeline.draw(play, [tmp_path / "t.png", tmp_path / "t.svg"])
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "t.svg").read_text()


def test_every_act_ends_and_cancels_jobs_that_were_submitted():
    for play in (scenario.full(), scenario.short(), scenario.short(kill=True)):
        names = set()
        for phase in play.phases:
            assert {*phase.end, *phase.cancel} <= names
            names |= {job.name for job in phase.submit}
        rigid = names - set(play.trainings)
        assert {name for phase in play.phases for name in phase.end} == rigid
