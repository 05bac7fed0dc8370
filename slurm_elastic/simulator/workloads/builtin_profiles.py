"""Computed profiles of four model families on three GPU types, which need no file.

**Nothing here was measured.** Step times come from operations, bytes and the constants of the
tables below; gradient noise grows from one number to another. The set serves to try the simulator,
and shows the effects that matter (heterogeneous types, links that saturate, batches beyond which
speed does not grow). It does not describe real hardware.

Our definitions, for `m` samples per GPU, `g` GPUs per node on `n` nodes:

- computing: `5 ms + F (m + h) / (u P)`; `F` operations per sample (forward and backward),
  `P` the type's peak, `u` the part of it that the family reaches, `h` samples of latency;
- all-reduce of `G` = 4 bytes per parameter: `2 (g-1)/g G / L` in a node and
  `2 (n-1)/n G / W` between nodes (ring; Patarasuk and Yuan 2009), and a latency for each;
- half of the backward pass (two thirds of computing) hides it; what is left is `sync_time`;
- noise scale (variance over squared norm, at the initial batch):
  `r0 (r1/r0)^(e/E)` in epoch `e` of `E` (that it grows: McCandlish et al. 2018);
- memory: 16 bytes per parameter, 1 GB for the framework, the rest for activations.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from slurm_elastic.simulator.workloads.generate import RequestPattern

#: A cluster that suits the set; `selastic simulate` without --cluster.
CLUSTER = "t4:6x4,v100:4x4,a100:2x8"

_OVERHEAD_S = 0.005
_HIDDEN = 0.5
_FRAMEWORK_GB = 1.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU type: peak (operations/s), memory (GB), links in and between nodes (bytes/s)."""

    name: str
    peak: float
    memory_gb: float
    link: float
    network: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Model and its training.

    Attributes:
        parameters: their number.
        operations: of one sample, forward and backward.
        utilisation: part of the peak that is reached.
        latency: samples that take as long as what does not depend on the batch, on a V100.
        sample_gb: activations of one sample.
        samples: of one epoch.
        epochs: of a job.
        batches: initial and largest global batch.
        noise: noise scale at the begin and at the end, in initial batches.
        restart_s: seconds from the end of one run to the first step of the next.
        weight: its part in a generated workload.
        sizes: GPUs that users ask for, with weights.
    """

    name: str
    parameters: float
    operations: float
    utilisation: float
    latency: float
    sample_gb: float
    samples: float
    epochs: int
    batches: tuple[int, int]
    noise: tuple[float, float]
    restart_s: float
    weight: float
    sizes: tuple[tuple[int, float], ...]


GPUS = (
    Gpu("t4", 65e12, 16, 6e9, 3e9),
    Gpu("v100", 125e12, 32, 40e9, 12e9),
    Gpu("a100", 312e12, 40, 200e9, 25e9),
)

FAMILIES = (
    # A ResNet-18 on 32 x 32 images.
    Family(
        name="resnet18", parameters=11.2e6, operations=1.67e9, utilisation=0.10, latency=48,
        sample_gb=0.006, samples=50e3, epochs=60, batches=(128, 4096), noise=(3, 40),
        restart_s=25, weight=0.5, sizes=((1, 0.5), (2, 0.3), (4, 0.2)),
    ),
    # A BERT-base fine-tuned on texts of 384 tokens.
    Family(
        name="bertbase", parameters=110e6, operations=0.2e12, utilisation=0.30, latency=2,
        sample_gb=0.12, samples=88e3, epochs=3, batches=(16, 512), noise=(4, 30),
        restart_s=45, weight=0.25, sizes=((1, 0.4), (2, 0.3), (4, 0.2), (8, 0.1)),
    ),
    # A ResNet-50 on 224 x 224 images.
    Family(
        name="resnet50", parameters=25.6e6, operations=12.3e9, utilisation=0.10, latency=16,
        sample_gb=0.09, samples=1.28e6, epochs=30, batches=(256, 8192), noise=(4, 60),
        restart_s=60, weight=0.15, sizes=((4, 0.5), (8, 0.4), (16, 0.1)),
    ),
    # A GPT of 350 million parameters on texts of 1,024 tokens.
    Family(
        name="gptmedium", parameters=355e6, operations=2.18e12, utilisation=0.35, latency=0.5,
        sample_gb=0.9, samples=50e3, epochs=20, batches=(32, 1024), noise=(3, 50),
        restart_s=90, weight=0.1, sizes=((4, 0.4), (8, 0.4), (16, 0.2)),
    ),
)  # fmt: skip

#: Shapes that get a row: GPUs on one node, some pairs, and whole nodes of 4 or 8.
_SHAPES = (
    *((g,) for g in range(1, 9)),
    *((g, g) for g in (1, 2, 3, 6)),
    *((g,) * n for g in (4, 8) for n in range(2, 17)),
)


def family(name: str) -> Family:
    """Return a family by its name.

    Raises:
        KeyError: there is none.
    """
    match = next((f for f in FAMILIES if f.name == name), None)
    if match is None:
        raise KeyError(name)
    return match


def request_patterns() -> dict[str, RequestPattern]:
    """Return the request patterns of a generated workload."""
    return {
        f.name: RequestPattern(batches=f.batches, weight=f.weight, sizes=f.sizes) for f in FAMILIES
    }


def most(model: Family, gpu: Gpu) -> int:
    """Return the samples that fit a GPU at once; 0 if the model does not fit."""
    free_gb = gpu.memory_gb - _FRAMEWORK_GB - 16e-9 * model.parameters
    return max(0, min(math.floor(free_gb / model.sample_gb), model.batches[1]))


def step(model: Family, gpu: Gpu, *, nodes: int, gpus: int, micro: int) -> tuple[float, float]:
    """Return (seconds of a step without accumulation, seconds of its synchronisation).

    Args:
        model: the model.
        gpu: the type of all its GPUs.
        nodes: nodes it spans, with equally many GPUs each.
        gpus: GPUs in all.
        micro: samples per GPU.
    """
    # A faster GPU needs more samples to be busy.
    latency = model.latency * gpu.peak / 125e12
    useful = model.utilisation * gpu.peak
    computing = _OVERHEAD_S + model.operations * (micro + latency) / useful
    gradient_bytes, gpus_per_node = 4 * model.parameters, gpus / nodes
    reduce_s = 2 * (gpus_per_node - 1) / gpus_per_node * gradient_bytes / gpu.link + 2e-5 * (
        gpus_per_node - 1
    )
    reduce_s += 2 * (nodes - 1) / nodes * gradient_bytes / gpu.network + 5e-5 * (nodes - 1)
    sync = max(reduce_s - _HIDDEN * computing * 2 / 3, 0.1 * reduce_s)
    return computing + sync, sync


def gain(scale: float, noise: float) -> float:
    """Return the progress of a step at `scale` initial batches, in steps at one (Pollux, eq. 4)."""
    return (noise + 1) / (noise / scale + 1)


def noise(model: Family, epoch: int) -> float:
    """Return the noise scale in an epoch (0-based), in initial batches."""
    first, last = model.noise
    return first * math.pow(last / first, epoch / max(1, model.epochs - 1))


def micro_batches(model: Family, gpu: Gpu) -> list[int]:
    """Return the batches per GPU that get a row: powers of two and the largest."""
    top = most(model, gpu)
    least = max(1, model.batches[0] // 32)
    powers = [least << i for i in range(16) if least << i < top]
    return [*powers, top] if top >= least else []


def write(folder: Path) -> None:
    """Write the set in the form that profiles are read in: a folder per family.

    Raises:
        OSError: the folder cannot be written.
    """
    for model in FAMILIES:
        home = folder / model.name
        home.mkdir(parents=True, exist_ok=True)
        for gpu in GPUS:
            if micro_batches(model, gpu):
                _write_csv(
                    home / f"placements-{gpu.name}.csv",
                    ("placement", "local_bsz", "step_time", "sync_time"),
                    _placements(model, gpu),
                )
                _write_csv(
                    home / f"scalability-{gpu.name}.csv",
                    ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"),
                    _scalability(model, gpu),
                )
        head = "# Invented; see simulator/workloads/builtin_profiles.py."
        text = f"{head}\nrestart_s = {model.restart_s}\n"
        (home / "application.toml").write_text(text, encoding="ascii")
        for batch, rows in _validation(model):
            _write_csv(
                home / f"validation-{batch}.csv",
                ("progress", "iteration", "metric", "grad_sqr", "grad_var"),
                rows,
            )


def _placements(model: Family, gpu: Gpu) -> Iterator[tuple[object, ...]]:
    for shape, micro in product(_SHAPES, micro_batches(model, gpu)):
        times = step(model, gpu, nodes=len(shape), gpus=sum(shape), micro=micro)
        yield ("".join(map(str, shape)), micro, *(f"{t:.6g}" for t in times))


def _scalability(model: Family, gpu: Gpu) -> Iterator[tuple[object, ...]]:
    for nodes, per_node in product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        for micro in micro_batches(model, gpu):
            times = step(model, gpu, nodes=nodes, gpus=nodes * per_node, micro=micro)
            yield (nodes, nodes * per_node, micro, *(f"{t:.6g}" for t in times))


def _validation(model: Family) -> Iterator[tuple[int, list[tuple[object, ...]]]]:
    """Yield rows by batch; the progress at an epoch's end is the same for all batches."""
    first, last = model.batches
    per_epoch = model.samples / first
    for doubling in range(round(math.log2(last / first)) + 1):
        scale = 2**doubling
        rows: list[tuple[object, ...]] = []
        iterations = 0.0
        for epoch in range(model.epochs):
            ratio = noise(model, epoch)
            iterations += per_epoch / gain(scale, ratio)
            progress = per_epoch * (epoch + 1)
            rows.append((f"{progress:.6g}", round(iterations), 0, 1, f"{ratio:.6g}"))
        yield first * scale, rows


def _write_csv(path: Path, header: tuple[str, ...], rows: object) -> None:
    with path.open("w", newline="", encoding="ascii") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)  # type: ignore[arg-type]
