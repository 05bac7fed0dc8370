"""Layers of the simulated applications: computing and gradients, from public architectures.

No layer times were published for Sia's applications (data of its artifact, SOSP'23), so they are
computed: a layer's forward time is proportional to its multiplications per sample, its backward
pass takes twice that (input and weight gradients), and its gradient has four bytes per parameter.
A *layer* here is what the training library freezes at once: a residual block, a transformer block,
a recurrent layer, the stem, the head. Times are relative.

| application | assumed model | layers |
|---|---|---|
| cifar10, resnet18 | ResNet-18 for 32x32 images (He et al., 2016) | stem, 8 blocks, head |
| imagenet, resnet50 | ResNet-50 (He et al., 2016) | stem, 16 bottlenecks, head |
| yolov3 | Darknet-53 at 416x416 (Redmon, Farhadi, 2018) | stem, 5 strides, 23 blocks, heads |
| bert, bertbase | BERT-base (Devlin et al., 2019) | embeddings, 12 blocks, head |
| deepspeech2 | 2 convolutions, 5 bidirectional LSTM of 1024 (Amodei et al., 2016), head | 8 |
| gptmedium | GPT-2 medium (Radford et al., 2019) | embeddings, 24 blocks, head |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from slurm_elastic.core.application import LayerCost

#: (multiplications per sample, parameters) of a layer.
_Row = tuple[float, float]

_BYTES = 4.0


def layers(application: str) -> tuple[LayerCost, ...]:
    """Return the layers of an application from the front; () if it is unknown.

    Args:
        application: its name; a suffix from `#` on is ignored (workloads/curve_jobs.py).
    """
    return _costs(application.partition("#")[0])


@cache
def _costs(name: str) -> tuple[LayerCost, ...]:
    make_rows = _KNOWN.get(name)
    rows = list(make_rows()) if make_rows else []
    total = sum(m for m, _ in rows)
    return tuple(LayerCost(m / total, 2 * m / total, _BYTES * p) for m, p in rows)


def _convolution(size: int, channels: int, outputs: int, kernel: int = 3) -> _Row:
    """Return the costs of a convolution with an output of size x size."""
    parameters = kernel * kernel * channels * outputs
    return float(parameters * size * size), float(parameters)


def _sum(*rows: _Row) -> _Row:
    return sum(m for m, _ in rows), sum(p for _, p in rows)


def _resnet18() -> Iterator[_Row]:
    yield _convolution(32, 3, 64)
    inputs, size = 64, 32
    for channels in (64, 128, 256, 512):
        size = 32 * 64 // channels
        for _ in range(2):
            rows = [_convolution(size, inputs, channels), _convolution(size, channels, channels)]
            if inputs != channels:
                rows.append(_convolution(size, inputs, channels, 1))
            yield _sum(*rows)
            inputs = channels
    yield 512 * 10.0, 512 * 10.0


def _resnet50() -> Iterator[_Row]:
    yield _convolution(112, 3, 64, 7)
    inputs = 64
    for channels, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        size = 56 * 64 // channels
        for _ in range(blocks):
            rows = [
                _convolution(size, inputs, channels, 1),
                _convolution(size, channels, channels),
                _convolution(size, channels, 4 * channels, 1),
            ]
            if inputs != 4 * channels:
                rows.append(_convolution(size, inputs, 4 * channels, 1))
            yield _sum(*rows)
            inputs = 4 * channels
    yield 2048 * 1000.0, 2048 * 1000.0


def _yolov3() -> Iterator[_Row]:
    yield _convolution(416, 3, 32)
    for stage, blocks in enumerate((1, 2, 8, 8, 4), start=1):
        channels, size = 32 << stage, 416 >> stage
        yield _convolution(size, channels // 2, channels)
        for _ in range(blocks):
            yield _sum(
                _convolution(size, channels, channels // 2, 1),
                _convolution(size, channels // 2, channels),
            )
    # The published totals (65.9e9 operations at 416x416, 61.9e6 parameters) less the backbone's.
    yield 8.2e9, 21.3e6


def _transformer(width: int, blocks: int, vocabulary: int, embedded: int) -> Iterator[_Row]:
    yield 0.0, float((vocabulary + embedded) * width)
    for _ in range(blocks):
        yield 12.0 * width * width, 12.0 * width * width
    yield 2.0 * width, 2.0 * width


def _deepspeech2() -> Iterator[_Row]:
    # Per output frame: 32 maps of 81 and 41 frequencies, kernels of 41x11 and 21x11.
    yield 32.0 * 81 * 41 * 11, 32.0 * 41 * 11
    yield 32.0 * 41 * 32 * 21 * 11, 32.0 * 32 * 21 * 11
    for inputs in (32 * 41, 1024, 1024, 1024, 1024):
        weights = 2.0 * 4 * (inputs + 1024) * 1024
        yield weights, weights
    yield 1024 * 29.0, 1024 * 29.0


_KNOWN: Mapping[str, Callable[[], Iterator[_Row]]] = {
    "cifar10": _resnet18,
    "resnet18": _resnet18,
    "imagenet": _resnet50,
    "resnet50": _resnet50,
    "yolov3": _yolov3,
    "bert": lambda: _transformer(768, 12, 30522, 514),
    "bertbase": lambda: _transformer(768, 12, 30522, 514),
    "deepspeech2": _deepspeech2,
    "gptmedium": lambda: _transformer(1024, 24, 50257, 1024),
}
