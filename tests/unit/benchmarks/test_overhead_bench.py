"""Arithmetic of benchmarks.overhead; its measurements are not tested."""

import doctest
import random

import pytest

from benchmarks import overhead


def test_the_modules_examples() -> None:
    assert doctest.testmod(overhead).failed == 0


@pytest.mark.parametrize("true", [0.9, 1.0, 1.2])
def test_the_interval_holds_the_ratio_however_busy_the_machine(true: float) -> None:
    draw = random.Random(3)
    busy = [draw.uniform(1.0, 3.0) for _ in range(30)]
    others = [b * draw.uniform(0.95, 1.05) for b in busy]
    ones = [true * b * draw.uniform(0.95, 1.05) for b in busy]
    value, low, high = overhead.ratio(ones, others)
    assert low <= value <= high
    assert low <= true <= high
    assert high - low < 0.06


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["overhead", "--models", "cnn,rnn"])
    with pytest.raises(SystemExit):
        overhead.main()
    assert "model rnn is unknown; known: cnn, mlp, mlp-accumulating" in capsys.readouterr().err
