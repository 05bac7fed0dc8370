"""Equal to what Sia's published artifact computes (data/sia/reference/unit_vectors.json)."""

import json

import pytest

from slurm_elastic.core.application import Application, Learned, Noise, Observation, TypeProfile
from slurm_elastic.models import goodput_tables, throughput
from slurm_elastic.models.efficiency import gain
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.models.throughput import ThroughputParameters
from tests.support import published_data

DATA = published_data.require("sia", "traces", "reference/unit_vectors.json")
TYPES = ("aws", "rtx", "dgx-ext")
#: Micro-batches per application: least, and most on each type.
LIMITS = {
    "cifar10": (32, (1024, 1024, 4096)),
    "imagenet": (20, (200, 200, 800)),
    "bert": (4, (12, 12, 48)),
    "deepspeech2": (10, (80, 57, 320)),
    "yolov3": (4, (16, 8, 32)),
}


@pytest.fixture(scope="module")
def vectors():
    return json.loads((DATA / "reference" / "unit_vectors.json").read_text())


def batches(name):
    files = (DATA / "traces" / name).glob("validation-*.csv")
    sizes = [int(f.stem.split("-")[1]) for f in files]
    return min(sizes), max(sizes)


def application(name, gpu_type):
    initial, largest = batches(name)
    least, most = LIMITS[name]
    return Application(
        name=name,
        initial_batch=initial,
        max_batch=largest,
        batch=initial,
        types=(TypeProfile(gpu_type, least, most[TYPES.index(gpu_type)]),),
    )


def observations(entry):
    return tuple(
        Observation(entry["type"], *key, step, accum)
        for key, step, accum in zip(entry["keys"], entry["step"], entry["accum"], strict=True)
    )


def test_gains(vectors):
    for entry in vectors["gain"]:
        initial, _ = batches(entry["app"])
        noise = Noise(entry["sqr"], entry["var"])
        found = gain(entry["batch"], initial_batch=initial, noise=noise)
        assert found == pytest.approx(entry["gain"], rel=1e-6)


@pytest.mark.parametrize("compat", [False, True])
def test_fits(vectors, compat):
    worse = []
    for entry in vectors["fit"]:
        seen = observations(entry)
        theirs = throughput.objective(ThroughputParameters(*entry["params"]), seen)
        ours = throughput.objective(throughput.fit(seen, compat=compat), seen)
        worse.append(ours - theirs > 1e-6)
    assert sum(worse) <= len(worse) - 44


def test_the_published_search_finds_the_published_parameters(vectors):
    close = 0
    for entry in vectors["fit"]:
        found = throughput.fit(observations(entry), compat=True)
        ours = [getattr(found, name) for name in ThroughputParameters.__slots__]
        close += ours == pytest.approx(entry["params"], rel=1e-5)
    assert close >= 40


def test_optimised_batches(vectors, monkeypatch):
    other_choice = []
    for entry in vectors["optimize"]:
        fitted = vectors["fit"][entry["fit"]]
        theirs = ThroughputParameters(*fitted["params"])
        monkeypatch.setattr(throughput, "fit", lambda *_, theirs=theirs, **__: theirs)
        goodput_tables.table.cache_clear()
        learned = Learned(
            application(entry["app"], entry["type"]),
            observations(fitted),
            Noise(entry["sqr"], entry["var"]),
        )
        model = GoodputModel.of(learned)
        goodput, micro_batch, accumulation = model.best(
            entry["type"], entry["nodes"], entry["replicas"]
        )
        assert goodput == pytest.approx(entry["goodput"], rel=1e-6)
        if (micro_batch, accumulation) != (entry["local_bsz"], entry["accum"]):
            other_choice.append(entry)
    assert not other_choice
    goodput_tables.table.cache_clear()
