"""Reading the logs of training jobs."""

import json

from contrib.demo import training_logs
from contrib.demo.scenario import Training

TRAINING = Training(samples=4, epochs=1, rate=1)


def write(out, lines, losses):
    out.mkdir()
    for rank, entries in lines.items():
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (out / f"samples-rank{rank}.jsonl").write_text(text)
    (out / "losses.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in losses))
    return out


def line(step, **more):
    return {"step": step, "epoch": 0, "world": 2, "run": 0} | more


def test_a_good_log(tmp_path):
    out = write(
        tmp_path / "gpt",
        {0: [line(1, indices=[0, 1]), line(2, indices=[2])], 1: [line(2, indices=[3])]},
        [line(1, loss=2.0), line(2, loss=1.0, run=1, world=1)],
    )
    log = training_logs.read(out, TRAINING)
    assert log == training_logs.TrainingLog(
        losses={1: 2.0, 2: 1.0}, worlds={0: frozenset({2}), 1: frozenset({1})}
    )


def test_a_lost_sample(tmp_path):
    out = write(tmp_path / "gpt", {0: [line(1, indices=[0, 1, 1])]}, [line(1, loss=2.0)])
    assert training_logs.read(out, TRAINING).faults == (
        "epoch 0: 2 samples never seen, 1 more than once",
    )


def test_a_step_computed_twice(tmp_path):
    twice = [line(1, indices=[0, 1]), line(1, indices=[2, 3])]
    out = write(tmp_path / "gpt", {0: twice}, [line(1, loss=2.0)])
    assert training_logs.read(out, TRAINING).faults == (
        "step 1 was computed 2 times by samples-rank0.jsonl",
    )


def test_scripts_are_only_asked_for_losses(tmp_path):
    out = write(tmp_path / "plain", {}, [{"step": 1, "loss": 2.0, "world": 2}])
    script = Training(samples=4, epochs=1, rate=1, library=False)
    assert training_logs.read(out, script) == training_logs.TrainingLog(losses={1: 2.0})


def test_a_log_that_was_never_written(tmp_path):
    assert training_logs.read(tmp_path / "gpt", TRAINING).faults == (
        "losses.jsonl was never written",
    )


def test_a_torn_line(tmp_path):
    out = write(tmp_path / "gpt", {}, [line(1, loss=2.0)])
    with (out / "losses.jsonl").open("a") as file:
        file.write('{"step": 2')
    assert "a line of its log is broken" in training_logs.read(out, TRAINING).faults[0]
