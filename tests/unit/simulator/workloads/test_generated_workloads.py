"""Generated workloads and the built-in profiles: as described, repeatable, runnable."""

import io
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.simulator.truth import ground_truth
from slurm_elastic.simulator.workloads import (
    application_profiles,
    builtin_profiles,
    generate,
    workload,
)


def _text(lines):
    stream = io.StringIO()
    generate.write(lines, stream)
    return stream.getvalue()


@settings(max_examples=30)
@given(
    jobs=st.integers(1, 60),
    hours=st.floats(0.1, 100),
    arrivals=st.sampled_from(sorted(generate.ARRIVALS)),
    seed=st.integers(0, 5),
)
def test_a_workload_is_what_was_asked_for(tmp_path_factory, jobs, hours, arrivals, seed):
    def draw():
        return generate.generate(
            builtin_profiles.request_patterns(),
            jobs=jobs,
            hours=hours,
            arrivals=arrivals,
            seed=seed,
        )

    lines = draw()
    assert len(lines) == jobs
    assert all(0 <= line.time <= hours * 3600 for line in lines)
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    assert _text(lines) == _text(draw())
    path = tmp_path_factory.mktemp("w") / "w.csv"
    path.write_text(_text(lines))
    read = workload.read(path, applications=builtin_profiles.request_patterns())
    assert len(read.jobs) == jobs
    for job in read.jobs:
        first, last = builtin_profiles.family(job.application).batches
        assert first <= job.batch <= last


def test_another_seed_gives_other_jobs():
    a, b = (
        generate.generate(builtin_profiles.request_patterns(), jobs=20, hours=8, seed=s)
        for s in (0, 1)
    )
    assert a != b


def test_a_burst_is_one_users_sweep():
    lines = generate.generate(
        builtin_profiles.request_patterns(), jobs=200, hours=100, arrivals="bursts"
    )
    near = [(a, b) for a, b in itertools.pairwise(lines) if b.time - a.time < 60]
    assert len(near) > 80
    same = sum((a.application, a.gpus) == (b.application, b.gpus) for a, b in near)
    assert same > 0.9 * len(near)


def test_most_diurnal_arrivals_are_around_14_o_clock():
    lines = generate.generate(
        builtin_profiles.request_patterns(), jobs=2000, hours=24, arrivals="diurnal"
    )
    clock = [(line.time / 3600 + 8) % 24 for line in lines]
    day = sum(8 <= hour < 20 for hour in clock)
    assert 0.7 < day / len(lines) < 0.82  # 1/2 + 0.8/pi = 0.755


def test_classes_and_sizes_follow_their_weights():
    asks = {"one": generate.RequestPattern(batches=(8, 64), sizes=((2, 1.0), (3, 0.0)))}
    lines = generate.generate(asks, jobs=300, hours=1, classes={"rigid": 1, "adaptive": 3})
    assert {line.gpus for line in lines} == {2}
    assert 0.15 < sum(line.category == "rigid" for line in lines) / 300 < 0.35


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"arrivals": "never"}, "never"),
        ({"jobs": 0}, "at least one job"),
        ({"hours": float("nan")}, "more than 0 hours"),
        ({"classes": {"soft": 1}}, "soft"),
        ({"classes": {"rigid": 0}}, "weights"),
    ],
)
def test_what_cannot_be_is_refused(change, word):
    with pytest.raises(generate.GenerateError, match=word):
        generate.generate(
            builtin_profiles.request_patterns(), **({"jobs": 5, "hours": 1.0} | change)
        )


@pytest.fixture(scope="module")
def builtins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    builtin_profiles.write(folder)
    names = [f.name for f in builtin_profiles.FAMILIES]
    return application_profiles.read(folder, names, [g.name for g in builtin_profiles.GPUS])


def test_the_built_in_profiles_read_back_as_their_formulas(builtins):
    for model in builtin_profiles.FAMILIES:
        truth = ground_truth.GroundTruth(builtins[model.name])
        assert truth.profile.restart_s == model.restart_s
        assert truth.total == pytest.approx(model.samples * model.epochs / model.batches[0])
        for gpu in builtin_profiles.GPUS:
            for micro in builtin_profiles.micro_batches(model, gpu)[:3]:
                for shape in ((1,), (4,), (4, 4), (8, 8)):
                    expected = builtin_profiles.step(
                        model, gpu, nodes=len(shape), gpus=sum(shape), micro=micro
                    )
                    times = truth.step(gpu.name, shape, micro)
                    assert times == pytest.approx(expected, rel=1e-5)
        noise = builtin_profiles.noise(model, 0)
        scale = truth.largest / truth.initial
        assert truth.gain(truth.largest, 0) == pytest.approx(
            builtin_profiles.gain(scale, noise), rel=1e-4
        )


def test_the_built_in_types_differ_and_batches_stop_to_help():
    for model in builtin_profiles.FAMILIES:
        rates = []
        for gpu in builtin_profiles.GPUS:
            micro = builtin_profiles.micro_batches(model, gpu)[-1]
            rates.append(
                micro / sum(builtin_profiles.step(model, gpu, nodes=1, gpus=1, micro=micro))
            )
        assert rates == sorted(rates)
        assert builtin_profiles.gain(1, 5) == 1
        assert builtin_profiles.gain(64, 5) < 6
