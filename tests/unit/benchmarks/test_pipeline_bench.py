"""Parts of benchmarks.pipeline: emulated layers, replayed schedules, options."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import require

require("python/torch")

import torch  # noqa: E402

from benchmarks.pipeline import emulated_layers, schedule_replay, slow_network  # noqa: E402
from slurm_elastic.core.layers import Layer, LayerProfile  # noqa: E402
from slurm_elastic.training.pipeline import StageLayout  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("module", [schedule_replay, slow_network])
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


@pytest.mark.parametrize("sizes", [(3, 5, 7), (9, 2, 4), (4, 4, 4), (1, 13, 1), (6, 1, 17)])
def test_emulated_layers_have_the_gradients_of_what_they_compute(sizes):
    inputs, weights, outputs = sizes
    x = torch.randn(2, inputs, dtype=torch.float64, requires_grad=True)
    layer = emulated_layers.Emulated(seconds=(0.0, 0.0), outputs=outputs, weights=weights).double()

    def called(x, weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(called, (x, layer.weight))


def test_an_emulated_layer_takes_its_time_and_carries_its_bytes():
    profile = emulated_layers.language_model(2)
    layers = emulated_layers.modules(profile, samples=4, shrink=64.0, slow=0.0)
    value = torch.randn(4, 8)
    for (_, module), layer in zip(layers, profile.layers, strict=True):
        value = module(value)
        for tensor, size in (
            (value, layer.activation_bytes),
            (module.weight, layer.parameter_bytes),
        ):
            assert tensor.numel() * 4 * 64 == pytest.approx(size, rel=1e-3, abs=4 * 4 * 64)


def test_branches_become_a_row_that_sends_what_they_send():
    layers = [
        Layer(name, 0.01, 0.02, size, 10.0)
        for name, size in (("in", 100.0), ("left", 20.0), ("right", 3.0), ("out", 7.0))
    ]
    edges = (("in", "left"), ("in", "right"), ("left", "out"), ("right", "out"))
    row = emulated_layers.chained(LayerProfile(tuple(layers), edges))
    assert [layer.activation_bytes for layer in row.layers] == [100.0, 120.0, 23.0, 7.0]
    assert row.compute_s == pytest.approx(0.12)


def test_small_layers_join_the_one_before():
    big, small = Layer("big", 1.0, 1.0, 9.0, 5.0), Layer("small", 0.001, 0.001, 2.0, 1.0)
    last = Layer("last", 1.0, 1.0, 1.0, 3.0)
    chain = LayerProfile((big, small, last), (("big", "small"), ("small", "last")))
    first, second = emulated_layers.chained(chain).layers
    assert (first.name, first.activation_bytes, first.parameter_bytes) == ("big", 2.0, 6.0)
    assert second.name == "last"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_even_stages_take_what_the_textbook_says(schedule):
    times = schedule_replay.Times([1.0] * 3, [2.0] * 3, [0.0] * 2, [0.0] * 3)
    assert schedule_replay.replay(StageLayout.of(1, 1, 1), schedule, 8, times) == 3.0 * (8 + 3 - 1)


def test_a_full_pipeline_goes_at_the_pace_of_its_slowest_stage():
    times = schedule_replay.Times([1.0, 2.0], [2.0, 4.0], [0.0], [0.0, 0.0])
    layout = StageLayout.of(1, 1)
    long, short = (schedule_replay.replay(layout, "pipedream", n, times) for n in (40, 20))
    assert long - short == pytest.approx(20 * 6.0)


def test_a_stage_with_replicas_reduces_once_a_round():
    times = schedule_replay.Times([1.0, 0.1], [2.0, 0.1], [0.0], [0.5, 0.0])
    layout = StageLayout.of(2, 1)
    long, short = (schedule_replay.replay(layout, "pipedream", n, times) for n in (40, 20))
    assert long - short == pytest.approx(10 * 3.5)


def test_a_machine_without_tc_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv("SELASTIC_SLOW_NETWORK", raising=False)
    for tool in ("unshare", "ip"):
        (tmp_path / tool).write_text("")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(slow_network.NoNetworkError, match="needs `tc`: install iproute2"):
        slow_network.enter("benchmarks.pipeline", [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nowhere"], "nowhere: No such file"),
        (["--rounds", "0"], "--rounds: give more than 0"),
    ],
)
def test_bad_input_is_one_line(words, said):
    command = [sys.executable, "-m", "benchmarks.pipeline", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
