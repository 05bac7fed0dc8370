"""Plots in every format, their contents, and their errors."""

import builtins

import pytest

from slurm_elastic.simulator import plots
from slurm_elastic.simulator.results import JobResult, Result, RoundResult, Segment
from tests.support.needs import require

require("python/matplotlib")


def _result(policy="sia", *, names=3, jobs=12, hours=1.0, workload="w"):
    made, segments = [], []
    for i in range(jobs):
        begin, end = 100.0 * i, 100.0 * i + hours * 3600
        made.append(
            JobResult(
                name=f"j{i}", application=f"app{i % names}", job_class="adaptive",
                submission_s=begin, start_s=begin + 60, completion_s=end, jct_s=end - begin,
                restarts=1, gpu_s=2 * (end - begin), lost_gpu_s=30.0, contention=3.0,
            )
        )  # fmt: skip
        segments.append(Segment(f"j{i}", begin + 60, end, "a100" if i % 2 else "v100", (2,)))
    rounds = tuple(RoundResult(60.0 * i, i % 5, (("a100", 2),)) for i in range(80))
    return Result(
        workload=workload, policy=policy, cluster="a100:2x8,v100:2x8",
        gpus=(("a100", 16), ("v100", 16)), jobs=tuple(made), rounds=rounds,
        segments=tuple(segments), policy_s=(0.001,), cpu_s=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("ending", plots.FORMATS)
def test_every_format(tmp_path, ending):
    path = tmp_path / f"x{ending}"
    plots.check(path)
    plots.draw_run([_result()], path)
    assert path.stat().st_size > 5000


def test_the_same_results_give_the_same_picture(tmp_path):
    files = []
    for name in ("a.png", "b.png"):
        plots.draw_run([_result(), _result(workload="v")], tmp_path / name)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def test_many_applications_share_the_last_colour(tmp_path):
    result = _result(names=12, jobs=30)
    names = plots._applications(result)
    assert len(names) == len(plots.COLOURS)
    assert names[-1] == "others"
    assert plots._colour(names, "something else") == plots._colour(names, "others")
    plots.draw_run([result], tmp_path / "x.svg")


def test_a_comparison(tmp_path):
    runs = [
        ("sia", 1.0, "sia"), ("gavel (a)", 2.5, "gavel"), ("gavel (b)", 2.0, "gavel"),
    ]  # fmt: skip
    first = _result().summary()
    drawn = []
    for name, hours, policy in runs:
        result = _result(policy, hours=hours)
        figures = result.summary()
        ratios = {key: figures[key] / first[key] for _, key in plots._BARS}
        drawn.append(
            plots.Drawn(
                name=name, policy=policy, results=[result],
                ratios={} if policy == "sia" else ratios,
            )
        )  # fmt: skip
    assert [plots._style(drawn, d) for d in drawn] == [(0, 0), (1, 0), (1, 1)]
    path = tmp_path / "x.svg"
    plots.draw_comparison(drawn, path, title="all of them")
    assert path.stat().st_size > 5000
    plots.draw_comparison(drawn[:1], path)


def test_bands_hold_what_the_jobs_held():
    edges = plots._edges(_result(), 100)
    part = plots._overlap(edges, 500.0, 1500.0)
    assert (part * (edges[1:] - edges[:-1])).sum() == pytest.approx(1000)


@pytest.mark.parametrize(
    ("name", "words"), [("x.gif", "no format"), ("no/x.png", "no such folder")]
)
def test_a_file_that_cannot_be_drawn_is_refused_in_one_line(tmp_path, name, words):
    with pytest.raises(plots.PlotError, match=words):
        plots.check(tmp_path / name)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(plots.PlotError, match=r"pip install 'slurm-elastic\[plot\]'"):
        plots.check(tmp_path / "x.png")
