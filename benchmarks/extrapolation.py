"""Error of extrapolated stalls of models that were not profiled (profiler/extrapolate.py).

    python -m benchmarks.extrapolation [--data DIR] [--seed 0] [--json]

Fourteen public models: parameters as torchvision and BERT's paper state them, layers with
parameters counted (convolutions, linear layers, norms, embeddings). Their stalls are *computed*,
not measured: by `models.communication.ClosedForm` on three places, with 3 % noise, in four ways
(our invention):

    at once     one all-reduce of all gradients
    by layer    one all-reduce per layer, so that latency counts once for each
    overlapped  as by layer, but half of the computing time hides what it can
    in buckets  one all-reduce per 25 MB, each begun when the backward pass (two thirds of the
                computing time) has made its gradients and the one before is through

What is held out: each model once, with a fit to the other thirteen (`plain`: one that looks for no
hidden communication); and the seven largest, with a fit to the seven smallest. Without that one
would not know what happens outside of what was profiled.

With Dally's `reference/slowdown.csv` (docs/data.md; ASTRA-sim's stalls of six models over
placements): of each placement each model once, with a fit to the other five. Nothing there obeys
our formula.

`recommended`: what that means for the advice. Each held-out model is offered one GPU, measured, and
the three places, extrapolated; asked for are the fastest, and the cheapest within a tenth more than
each configuration truly takes. `same`: the answer is that of the true stalls; `late`: it is not
done in time, or nothing is said to be; `dearer`: the worst excess of true cost (or time, for the
fastest) of the others.

Errors: of the stall, relative to it (or to 2 % of the computing time if that is more), and of
the whole step. The worst names the model.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurm_elastic.models.communication import ClosedForm, GangLink, Span
from slurm_elastic.profiler.extrapolate import (
    ObservedStall,
    PredictedStall,
    fit,
    leave_one_out,
    predict,
)
from slurm_elastic.profiler.recommendation import (
    Configuration,
    ConfigurationCost,
    NoConfigurationError,
    Recommendation,
    StepTimes,
    Work,
    cheapest,
    evaluate,
    fastest,
)
from tests.support import published_data

NOISE = 0.03


class Model(NamedTuple):
    """Layers with parameters, all parameters, and 1e9 multiply-adds of a forward step."""

    layers: int
    parameters: float
    work: float


#: Batch 64 of 224 x 224 images; BERT-large 8 sequences of 384.
MODELS = {
    "SqueezeNet1_0": Model(26, 1_248_424, 64 * 0.82),
    "ShuffleNetV2_x0.5": Model(113, 1_366_792, 64 * 0.04),
    "MobileNetV2": Model(105, 3_504_872, 64 * 0.30),
    "ResNet18": Model(41, 11_689_512, 64 * 1.81),
    "ResNet34": Model(73, 21_797_672, 64 * 3.66),
    "ResNet50": Model(107, 25_557_032, 64 * 4.09),
    "ResNet101": Model(209, 44_549_160, 64 * 7.80),
    "ResNet152": Model(311, 60_192_808, 64 * 11.51),
    "AlexNet": Model(8, 61_100_840, 64 * 0.71),
    "VGG11": Model(11, 132_863_336, 64 * 7.61),
    "VGG13": Model(13, 133_047_848, 64 * 11.31),
    "VGG16": Model(16, 138_357_544, 64 * 15.47),
    "VGG19": Model(19, 143_667_240, 64 * 19.63),
    "BERT-large": Model(197, 335_141_888, 8 * 129.0),
}
#: Of a forward and backward pass, three times the forward one; two operations each.
_FLOPS = 8e12
PLACES: dict[str, tuple[int, Span]] = {
    "8 GPUs on 1 node": (8, (1, 1, 1)),
    "16 GPUs on 2 nodes": (16, (1, 2, 2)),
    "32 GPUs on 4 nodes, 2 racks": (32, (2, 4, 4)),
}
WAYS = ("at once", "by layer", "overlapped", "in buckets")
_BUCKET = 25e6
#: Layers of Dally's models, counted in the same way.
DALLY = {
    "AlexNet": MODELS["AlexNet"],
    "BERT": MODELS["BERT-large"],
    "MobileNetV3": Model(112, 5_483_032, 0),
    "ResNet18": MODELS["ResNet18"],
    "ResNet50": MODELS["ResNet50"],
    "VGG": MODELS["VGG11"],
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.extrapolation", description=__doc__.split("\n", maxsplit=1)[0]
    )
    published_data.add_option(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    for way in WAYS:
        for place in PLACES:
            known = stalls(way, place, options.seed)
            results[f"{way}, {place}"] = {
                "one of 14": errors(leave_one_out(known)),
                "one of 14, plain": errors(leave_one_out(known, hide=False)),
                "large from small": errors(large_from_small(known)),
            }
    for way in WAYS:
        results[way] = {"recommended": recommended(way, options.seed)}
    slowdowns = "reference/slowdown.csv"
    data = published_data.locate_optional(
        parser, options, "dally", slowdowns, without="ASTRA-sim's stalls are left out"
    )
    if data:
        results["ASTRA-sim"] = {"one of 6": dally(data / slowdowns)}
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for name, held in results.items():
        for kind, row in held.items():
            print(f"{name:40} {kind:17}", "  ".join(f"{k} {_text(v)}" for k, v in row.items()))


def stalls(way: str, place: str, seed: int) -> list[ObservedStall]:
    """Return the computed stalls of all models, ascending in parameters."""
    gpus, span = PLACES[place]
    noise = random.Random(f"{seed} {way} {place}")
    form = ClosedForm(
        compute_s={}, gradient_bytes={},
        domain=GangLink(bytes_s=12e9, latency_s=1e-5),
        node=GangLink(bytes_s=12e9, latency_s=1e-5),
        rack=GangLink(bytes_s=3e9, latency_s=3e-5),
        spine=GangLink(bytes_s=1.25e9, latency_s=5e-5),
        method="ring",
    )  # fmt: skip
    known = []
    for name, model in MODELS.items():
        compute = model.work * 1e9 * 6 / _FLOPS
        size = 4 * model.parameters
        if way == "at once":
            stall = form.seconds(size, gpus, span)
        elif way == "in buckets":
            stall = _in_buckets(compute * 2 / 3, size, lambda part: form.seconds(part, gpus, span))
        else:
            stall = model.layers * form.seconds(size / model.layers, gpus, span)
        if way == "overlapped":
            stall = max(0.0, stall - 0.5 * compute)
        stall *= noise.gauss(1, NOISE)
        known.append(ObservedStall(name, model.layers, size, max(0.0, stall), compute))
    return known


def recommended(way: str, seed: int) -> dict[str, Any]:
    """Return how often the advice is the same with extrapolated stalls."""
    known = {place: stalls(way, place, seed) for place in PLACES}
    missed = {place: leave_one_out(rows) for place, rows in known.items()}
    same, late, asked, dearer = 0, 0, 0, 0.0
    for i, one in enumerate(next(iter(known.values()))):
        true = _choices(one.compute_s, {p: rows[i].stall_s for p, rows in known.items()})
        guess = _choices(one.compute_s, {p: rows[i].predicted_s for p, rows in missed.items()})
        truth = {c.offer.configuration: c for c in true}
        best, advised = fastest(true), truth[fastest(guess).offer.configuration]
        asked, same = asked + 1, same + (best is advised)
        dearer = max(dearer, advised.time_s / best.time_s - 1)
        for limit in (c.time_s / 3600 * 1.1 for c in true):
            asked += 1
            best = cheapest(true, deadline=limit)
            try:
                advised = truth[cheapest(guess, deadline=limit).offer.configuration]
            except NoConfigurationError:
                late += 1
                continue
            same += best is advised
            if advised.time_s > limit * 3600:
                late += 1
            else:
                dearer = max(dearer, advised.cost / best.cost - 1)
    return {"asked": asked, "same": same, "late": late, "dearer": dearer}


def _choices(compute: float, waits: Mapping[str, float]) -> list[Recommendation]:
    offers = [ConfigurationCost(Configuration("", 1, 1, 64), StepTimes(compute_s=compute))]
    for place, stall in waits.items():
        gpus, span = PLACES[place]
        step = StepTimes(compute_s=compute, network_s=stall)
        offers.append(ConfigurationCost(Configuration("", span[1], gpus, 64), step))
    return evaluate(offers, Work(samples=1_281_167))


def _in_buckets(backward: float, size: float, seconds: Callable[[float], float]) -> float:
    """Return how much later than the backward pass the last bucket arrives."""
    count = max(1, round(size / _BUCKET))
    through = 0.0
    for i in range(count):
        through = max(through, backward * (i + 1) / count) + seconds(size / count)
    return through - backward


def large_from_small(known: Sequence[ObservedStall]) -> list[PredictedStall]:
    """Compare the larger half of the models with a fit to the smaller half."""
    small, large = known[: len(known) // 2], known[len(known) // 2 :]
    fitted = fit(small)
    return [predict(fitted, k) for k in large]


def dally(path: Path) -> dict[str, Any]:
    """Compare six models on each placement of several GPUs."""
    places: dict[tuple[str, ...], list[ObservedStall]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            model = DALLY[row["model"]]
            place = tuple(row[key] for key in ("gpus", "racks", "machines", "slots"))
            if row["gpus"] != "1":
                stall, compute = float(row["exposed_comm_us"]), float(row["compute_us"])
                places.setdefault(place, []).append(
                    ObservedStall(row["model"], model.layers, 4 * model.parameters, stall, compute)
                )
    missed = [m for known in places.values() for m in leave_one_out(known)]
    by_model = {
        name: statistics.median(m.error for m in missed if m.observed.model == name)
        for name in DALLY
    }
    return {"placements": len(places), **errors(missed), **_named(by_model)}


def errors(missed: Iterable[PredictedStall]) -> dict[str, Any]:
    """Return median and largest of both errors."""
    missed = list(missed)
    worst = max(missed, key=lambda m: m.error)
    return {
        "models": len({m.observed.model for m in missed}),
        "stall_median": statistics.median(m.error for m in missed),
        "stall_worst": worst.error,
        "worst": worst.observed.model,
        "step_median": statistics.median(m.step_error for m in missed),
        "step_worst": max(m.step_error for m in missed),
    }


def _named(by_model: Mapping[str, float]) -> dict[str, float]:
    return {f"stall_median {name}": value for name, value in by_model.items()}


def _text(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
