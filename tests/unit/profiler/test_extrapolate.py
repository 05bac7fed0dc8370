"""Extrapolated stalls of models that were not profiled."""

import math
import random
from dataclasses import replace

import pytest

from benchmarks import extrapolation
from slurm_elastic.profiler.extrapolate import (
    ExtrapolationError,
    Fit,
    ObservedStall,
    fit,
    leave_one_out,
    rms_error,
)
from slurm_elastic.profiler.new_model import NewModel, estimates, from_subject
from slurm_elastic.profiler.profile_file import MeasuredTime, ProfiledConfiguration, StepProfile
from slurm_elastic.profiler.profile_merge import subjects
from slurm_elastic.profiler.recommendation import StepTimes

MODELS = {"a": (8, 2.4e8), "b": (107, 1.0e8), "c": (16, 5.5e8), "d": (311, 2.4e8), "e": (105, 1e7)}


def truth(layers, size):
    return 0.002 + 5e-5 * layers + size / 4e9


def known(**noise):
    return [
        ObservedStall(m, n, b, truth(n, b) * noise.get(m, 1), 0.2) for m, (n, b) in MODELS.items()
    ]


def test_stalls_of_the_formula_are_fitted_exactly():
    stall_fit = fit(known())
    assert (stall_fit.base_s, stall_fit.layer_s, 1 / stall_fit.byte_s) == pytest.approx(
        (0.002, 5e-5, 4e9)
    )
    assert rms_error(leave_one_out(known())) < 1e-9
    assert stall_fit.stall_s(layers=50, gradient_bytes=1e8) == pytest.approx(truth(50, 1e8))


def test_leave_one_out_compares_each_model_with_the_others():
    missed = leave_one_out(known(d=1.5))
    assert [m.observed.model for m in missed] == list(MODELS)
    by_model = {m.observed.model: m for m in missed}
    # The others still obey: they say what d would be without what was added to it.
    assert by_model["d"].predicted_s == pytest.approx(truth(*MODELS["d"]))
    assert by_model["d"].error == pytest.approx(1 / 3)
    errors = [m.error for m in missed]
    assert rms_error(missed) == pytest.approx(math.sqrt(sum(e * e for e in errors) / 5))


def test_coefficients_are_never_negative():
    # Fewer layers stall longer here: a plain least squares fit would make layers speed things up.
    odd = [ObservedStall(m, n, b, 0.5 - 1e-3 * n, 0.2) for m, (n, b) in MODELS.items()]
    stall_fit = fit(odd)
    assert min(stall_fit.base_s, stall_fit.layer_s, stall_fit.byte_s) == 0.0
    assert stall_fit.stall_s(layers=1000, gradient_bytes=0) >= 0


def test_stalls_far_below_the_computing_time_do_not_count():
    rows = [replace(k, stall_s=0.0) for k in known()]
    assert fit(rows).stall_s(layers=100, gradient_bytes=1e8) == 0.0
    tiny = [replace(k, stall_s=1e-7 * (i % 2)) for i, k in enumerate(known())]
    assert all(m.error < 1e-3 for m in leave_one_out(tiny))


def test_hidden_communication_is_fitted_where_models_support_it():
    place = "16 GPUs on 2 nodes"
    for way, hidden, bucket in (("overlapped", 0.5, 0.0), ("in buckets", 2 / 3, 25 * 2**20)):
        stalls = extrapolation.stalls(way, place, seed=1)
        stall_fit = fit(stalls)
        assert stall_fit.hidden == pytest.approx(hidden, abs=0.1)
        assert stall_fit.bucket_bytes == bucket
        plain = extrapolation.errors(leave_one_out(stalls, hide=False))["stall_median"]
        assert extrapolation.errors(leave_one_out(stalls))["stall_median"] < 0.06 < 0.3 < plain
        # Too few to tell.
        assert fit(stalls[:5]).hidden == 0.0
    assert fit(extrapolation.stalls("by layer", place, seed=1)).hidden == 0.0


def test_the_last_bucket_is_never_hidden():
    stall_fit = Fit(0.0, 0.0, 1e-9, hidden=0.5, bucket_bytes=25e6)
    times = {"layers": 1, "compute_s": 0.2}
    assert stall_fit.stall_s(gradient_bytes=3e8, **times) == pytest.approx(0.2)
    assert stall_fit.stall_s(gradient_bytes=5e7, **times) == pytest.approx(0.025)
    assert stall_fit.stall_s(gradient_bytes=1e7, **times) == pytest.approx(0.01)
    assert replace(stall_fit, bucket_bytes=0.0).stall_s(gradient_bytes=5e7, **times) == 0.0
    assert stall_fit.stall_s(gradient_bytes=0.0, **times) == 0.0


def test_too_few_or_too_similar_models_are_an_error():
    with pytest.raises(ExtrapolationError, match="2 models profiled, 3 are needed"):
        fit(known()[:2])
    assert leave_one_out(known()[:3]) == ()
    assert math.isnan(rms_error(()))
    alike = [ObservedStall(str(i), 10 * i, 1e7 * i, 0.1, 0.2) for i in range(1, 5)]
    with pytest.raises(ExtrapolationError, match="do not distinguish layers from gradient bytes"):
        fit(alike)


@pytest.mark.parametrize("place", extrapolation.PLACES)
def test_public_models_are_predicted_from_the_others(place):
    """Compare with stalls of another cost model than the formula, with 3 % noise."""
    for way in ("at once", "by layer"):
        stalls = extrapolation.stalls(way, place, seed=1)
        held_out = extrapolation.errors(leave_one_out(stalls))
        assert held_out["models"] == 14
        assert held_out["stall_median"] < 0.06
        assert held_out["step_worst"] < 0.12
        large = extrapolation.errors(extrapolation.large_from_small(stalls))
        assert large["models"] == 7
        assert large["stall_worst"] < 0.25


def profile(model, *, types=("a100",), noise=1.0):
    layers, size = MODELS[model]
    rows = []
    for gpu_type in types:
        for nodes, gpus in ((1, 1), (1, 4), (2, 8)):
            stall = noise * truth(layers, size) if gpus > 1 else 0.0
            rows.append(
                ProfiledConfiguration(
                    gpu_type=gpu_type, nodes=nodes, gpus=gpus, batch=64, repeats=3,
                    compute=MeasuredTime(0.2, 0.001),
                    interconnect=MeasuredTime(stall / nodes, 0.001),
                    network=MeasuredTime(stall - stall / nodes, 0.001),
                    prep=MeasuredTime(0.01, 0.0), fetch=MeasuredTime(0.03, 0.0),
                )
            )  # fmt: skip
    return StepProfile(
        application=model,
        model=model,
        layers=layers,
        gradient_bytes=size,
        configurations=tuple(rows),
    )


def others(*models, **options):
    return subjects([(m, profile(m, **options)) for m in models])


def unseen(**alone):
    times = {t: StepTimes(compute_s=s, spread_s=0.001) for t, s in alone.items()}
    return NewModel(name="new", layers=50, gradient_bytes=1e8, batch=64, single_gpu_steps=times)


def test_a_new_model_gets_estimates_on_the_configurations_of_others():
    result = estimates(unseen(a100=0.3), others(*MODELS, types=("a100", "v100")).values())
    assert [str(e.offer.configuration) for e in result.estimates] == [
        "1 a100 on 1 node", "4 a100 on 1 node", "8 a100 on 2 nodes",
    ]  # fmt: skip
    one, four, eight = (e.offer.times for e in result.estimates)
    assert (one.compute_s, one.interconnect_s, one.network_s) == (0.3, 0.0, 0.0)
    assert four.interconnect_s == pytest.approx(truth(50, 1e8))
    assert eight.network_s == pytest.approx(truth(50, 1e8))
    assert all(e.offer.estimated for e in result.estimates)
    assert result.left_out == (
        (
            "1 v100 on 1 node, 4 v100 on 1 node, 8 v100 on 2 nodes: the computing time of a step"
            " on one v100 is unknown"
        ),
    )


def test_the_spread_of_an_estimate_includes_its_error():
    shifted = others(*MODELS) | {"d": subjects([("d", profile("d", noise=1.5))])["d"]}
    four = estimates(unseen(a100=0.3), shifted.values()).estimates[1]
    assert four.error > 0.1
    stall = four.offer.times.interconnect_s
    assert four.offer.times.spread_s == pytest.approx(math.hypot(0.001, four.error * stall))
    three = estimates(unseen(a100=0.3), others("a", "b", "c").values()).estimates[1]
    assert math.isnan(three.offer.times.spread_s)


def test_configurations_without_an_estimate_are_listed():
    result = estimates(unseen(a100=0.3), others("a", "b").values())
    assert [e.offer.configuration.gpus for e in result.estimates] == [1]
    assert result.left_out == (
        (
            "4 a100 on 1 node, 8 a100 on 2 nodes: 2 models profiled, 3 are needed;"
            " profile another one there"
        ),
    )
    far = replace(unseen(a100=0.3), layers=1000)
    (note,) = estimates(far, others(*MODELS).values()).notes
    assert note.startswith("layers 1000 is outside of what was profiled, 8 to 311")
    nameless = {"x": replace(others("a")["a"], name="x", layers=None)}
    (note, nothing) = estimates(unseen(a100=0.3), nameless.values()).notes
    assert note == "x is not used: its layers or gradient bytes are unknown"
    assert nothing.startswith("nothing to extrapolate")


def test_a_model_profiled_on_one_gpu_is_extrapolated_from_the_others():
    everything = others(*MODELS)
    b = everything["b"]
    alone = replace(b, rows=tuple(r for r in b.rows if r.measured.gpus == 1))
    model = from_subject(alone, 64)
    result = estimates(model, everything.values(), but=[("a100", 1, 1)])
    assert [e.offer.configuration.gpus for e in result.estimates] == [4, 8]
    four = result.estimates[0]
    assert "b" not in [k.model for k in four.stalls]
    assert four.offer.times.interconnect_s == pytest.approx(truth(*MODELS["b"]))
    assert (four.offer.times.prep_s, four.offer.times.fetch_s) == (0.01, 0.03)
    with pytest.raises(ExtrapolationError, match="b: layers is missing in its profiles"):
        from_subject(replace(b, layers=None), 64)


def test_the_nearest_batch_is_used():
    everything = others(*MODELS)
    rng = random.Random(0)
    a = everything["a"]
    wrong = [
        replace(r, measured=replace(r.measured, batch=n, interconnect=MeasuredTime(9.0, 0.001)))
        for r in a.rows
        for n in (8, 512)
    ]
    rows = [*a.rows, *wrong]
    rng.shuffle(rows)
    mixed = everything | {"a": replace(a, rows=tuple(rows))}
    straight = estimates(unseen(a100=0.3), everything.values()).estimates
    assert estimates(unseen(a100=0.3), mixed.values()).estimates == straight
