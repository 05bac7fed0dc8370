"""Time and exactness of the partitioner, on PipeDream's profiles and on random models.

    python -m benchmarks.pipeline.partition [--data DIR] [--repeat 3] [--json]

With PipeDream's `oracle.json` (docs/data.md), a list of runs of its published optimiser
(model, all_num_machines, network_bandwidths, activation_compression_ratio,
pipeline_time_s, replication_by_level): CPU seconds of all runs together, reading
included, the largest relative difference of the objective, and how many replications
differ (at ties). Then larger questions than the original answers in minutes; a chain of
100 layers; and a model shaped like Inception-v3 (11 blocks of four branches), which is
beyond the limit of states: `over` is its time over the bound that no plan beats. For
models that can be searched, `approximation` is the worst ratio of the approximate to the
exact answer.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_elastic.core.layers import Layer, LayerProfile, chain
from slurm_elastic.models.pipedream import profile_reader
from slurm_elastic.models.pipedream.partitioner import Level, PipelinePartition, partition
from tests.support import published_data

FLAT = [Level(16, 1.25e9)]
NODES = [Level(4, 1e10), Level(4, 1.25e9)]
WIDE_NODES = [Level(8, 1e10), Level(2, 1.25e9)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline.partition",
        description=__doc__.split("\n", maxsplit=1)[0],
    )
    published_data.add_option(parser)
    parser.add_argument("--repeat", type=int, default=3, help="the least CPU of so many runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    data = published_data.locate_optional(
        parser, options, "pipedream", "profiles", without="published models are left out"
    )
    if data:
        if published_data.locate_optional(
            parser, options, "pipedream", "oracle.json", without="published runs are left out"
        ):
            figures["oracle"] = published(data, options.repeat)
        large = profile_reader.read(data / "profiles" / "gnmt_large.txt")
        for name, levels in (("16", FLAT), ("4x4", NODES), ("8x2", WIDE_NODES)):
            figures[f"gnmt_large {name}"] = asked(large, levels, options.repeat)
        figures["gnmt_large 4x4, 16 GB"] = asked(large, NODES, options.repeat, memory=16e9)
        figures["approximation"] = approximation(data)
    for name, levels in (("16", FLAT), ("4x4", NODES)):
        figures[f"100 layers {name}"] = asked(layers(100), levels, options.repeat)
        figures[f"inception-like {name}"] = asked(inception(11), levels, options.repeat)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, row in figures.items():
        print(f"{name:24}", "  ".join(f"{k} {_text(v)}" for k, v in row.items()))


def published(data: Path, repeat: int) -> dict[str, Any]:
    """Repeat all runs of the published optimiser."""
    cases = json.loads((data / "oracle.json").read_text())
    times, worst, others = [], 0.0, 0
    for _ in range(repeat):
        begun, worst, others = time.process_time(), 0.0, 0
        for case in cases:
            profile = profile_reader.read(data / "profiles" / f"{case['model']}.txt")
            shape = zip(case["all_num_machines"], case["network_bandwidths"], strict=True)
            ratio = case["activation_compression_ratio"]
            answer = partition(profile, [Level(*level) for level in shape], compression=ratio)
            goal = case["pipeline_time_s"]
            worst = max(worst, abs(answer.pipeline_time_s - goal) / goal)
            theirs = case["replication_by_level"]
            ours = {str(i): list(r) for i, r in enumerate(answer.replication_by_level, start=1)}
            others += ours != theirs
        times.append(time.process_time() - begun)
    return {
        "cases": len(cases),
        "cpu_s": min(times),
        "relative_difference": worst,
        "replication_differs": others,
    }


def asked(
    profile: LayerProfile, levels: Sequence[Level], repeat: int, *, memory: float | None = None
) -> dict[str, Any]:
    """Answer one question; return CPU seconds and the answer."""
    times: list[float] = []
    answer: PipelinePartition | None = None
    for _ in range(repeat):
        begun = time.process_time()
        answer = partition(profile, levels, compression=1.0, memory=memory)
        times.append(time.process_time() - begun)
    assert answer is not None
    return {
        "states": answer.states,
        "exact": answer.exact,
        "cpu_s": min(times),
        "pipeline_time_s": answer.pipeline_time_s,
        "over": answer.pipeline_time_s / answer.bound_s,
        "faster_than_data_parallel": answer.data_parallel_time_s / answer.pipeline_time_s,
    }


def approximation(data: Path) -> dict[str, Any]:
    """Return how far the approximation is from the exact answer, where both can be computed."""
    ratios: dict[str, Any] = {}
    shapes = ([Level(4, 1e9)], [Level(8, 1.25e9)], [Level(16, 3.125e9)], NODES)
    for model in ("resnet18", "resnet50", "squeezenet1_0"):
        profile = profile_reader.read(data / "profiles" / f"{model}.txt")
        worst = 1.0
        for levels in shapes:
            for ratio in (None, 1.0):
                exact = partition(profile, levels, compression=ratio)
                near = partition(profile, levels, compression=ratio, limit=exact.states - 1)
                worst = max(worst, near.pipeline_time_s / exact.pipeline_time_s)
        ratios[model] = worst
    return ratios


def layers(count: int) -> LayerProfile:
    """Return a chain of random layers."""
    rng = random.Random(0)
    return chain(
        Layer(
            f"layer{i}",
            forward_s=rng.uniform(0, 0.01),
            backward_s=rng.uniform(0, 0.02),
            activation_bytes=rng.uniform(0, 1e7),
            parameter_bytes=rng.uniform(0, 1e8),
        )
        for i in range(count)
    )


def inception(blocks: int) -> LayerProfile:
    """Return blocks of four branches of 3, 6, 9 and 4 layers, every third one a convolution."""
    rng = random.Random(0)
    made: list[Layer] = []
    edges: list[tuple[str, str]] = []

    def add(*after: str) -> str:
        name, heavy = f"layer{len(made)}", len(made) % 3 == 0
        seconds = rng.uniform(0.3e-3, 6e-3 if heavy else 2e-3)
        output = rng.uniform(0.3e7, 3e7) * 1.02 ** -len(made)
        weights = rng.uniform(1e5, 3e6) if heavy else 0.0
        made.append(Layer(name, seconds, 2 * seconds, output, weights))
        edges.extend((source, name) for source in after)
        return name

    last = add()
    for _ in range(blocks):
        ends = []
        for length in (3, 6, 9, 4):
            end = last
            for _ in range(length):
                end = add(end)
            ends.append(end)
        last = add(*ends)
    return LayerProfile(tuple(made), tuple(edges))


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
