"""Loops as published scripts have them, with and without `ElasticLoop`, for `loop_overhead`.

    gpt      nanoGPT's: micro-steps, GradScaler, clipped gradients, samples drawn by the script
    trainer  minGPT's: a DataLoader, clipped gradients
    gan      two models and two optimizers, as docs/examples/train_gan.py
    stream   dictionaries of a dataset without length, as docs/examples/train_stream.py

With a folder of nanoGPT's or minGPT's source, `gpt` and `trainer` take the model from there.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.overhead import RANKS

_VOCABULARY, _CONTEXT = 65, 64


@dataclass
class LoopCase:
    """A training whose loop exists twice; both share its models and optimizers.

    Attributes:
        objects: what `ElasticLoop` saves.
        batch: samples of a step over all ranks.
        micro: samples that a rank computes at once; None: its share.
        plain: yields after each step of the loop without the library, for a rank.
        elastic: the same with it, for an `ElasticLoop`.
    """

    objects: dict[str, Any]
    batch: int
    micro: int | None
    plain: Callable[[int], Iterator[None]]
    elastic: Callable[[Any], Iterator[None]]


def gpt(source: Path | None = None) -> LoopCase:
    """Return nanoGPT's loop: global batch 16 in micro-batches of 4."""
    import torch  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    batch, micro = 16, 4
    model = DistributedDataParallel(_language_model(source))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    data = torch.randint(_VOCABULARY, (100_000,))

    def get_batch() -> tuple[Any, Any]:
        begins = torch.randint(len(data) - _CONTEXT - 1, (micro,))
        x = torch.stack([data[i : i + _CONTEXT] for i in begins])
        return x, torch.stack([data[i + 1 : i + 1 + _CONTEXT] for i in begins])

    def backward(x: Any, y: Any, weight: float, *, last: bool) -> None:
        model.require_backward_grad_sync = last
        _, loss = model(x, y)
        scaler.scale(loss * weight).backward()

    def update() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def plain(_rank: int) -> Iterator[None]:
        accumulation = batch // micro // RANKS
        while True:
            for number in range(accumulation):
                x, y = get_batch()
                backward(x, y, 1 / accumulation, last=number == accumulation - 1)
            update()
            yield

    def elastic(loop: Any) -> Iterator[None]:
        for _ in loop.steps(1_000_000):
            for _ in loop.micro_batches():
                x, y = get_batch()
                backward(x, y, loop.loss_weight, last=loop.last_micro_batch)
            update()
            yield

    objects = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return LoopCase(objects, batch, micro, plain, elastic)


def trainer(source: Path | None = None) -> LoopCase:
    """Return minGPT's loop: global batch 16."""
    import torch  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: PLC0415

    batch = 16
    model = DistributedDataParallel(_language_model(source))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    rows = torch.randint(_VOCABULARY, (4096, _CONTEXT + 1))
    dataset = TensorDataset(rows[:, :-1], rows[:, 1:])

    def step(x: Any, y: Any, weight: float = 1.0) -> None:
        _, loss = model(x, y)
        model.zero_grad(set_to_none=True)
        (loss * weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def plain(rank: int) -> Iterator[None]:
        sampler: Any = DistributedSampler(dataset, num_replicas=RANKS, rank=rank)
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            for x, y in DataLoader(dataset, batch_size=batch // RANKS, sampler=sampler):
                step(x, y)
                yield

    def elastic(loop: Any) -> Iterator[None]:
        loader = loop.loader(dataset, drop_last=True)
        for _ in loop.epochs(1_000_000):
            for x, y in loader:
                step(x, y, loop.loss_weight)
                yield

    return LoopCase({"model": model, "optimizer": optimizer}, batch, None, plain, elastic)


def gan(_source: Path | None = None) -> LoopCase:  # noqa: C901 - the same loop twice
    """Return the loop of a GAN: global batch 64 in micro-batches of 16."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: PLC0415

    batch, micro, noise, width = 64, 16, 32, 256

    def network(inputs: int, outputs: int) -> Any:
        layers = nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width)
        return DistributedDataParallel(
            nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Linear(width, outputs))
        )

    generator, critic = network(noise, 64), network(64, 1)
    adam_g, adam_c = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, critic))
    dataset = TensorDataset(torch.randn(4096, 64))
    criterion = nn.functional.binary_cross_entropy_with_logits

    def backward(real: Any, weight: float) -> None:
        fake = generator(torch.randn(len(real), noise))
        scores = critic(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
        (criterion(scores, truth) * weight).backward()
        critic.requires_grad_(False)
        (criterion(critic(fake), torch.ones(len(fake), 1)) * weight).backward()
        critic.requires_grad_(True)

    def update() -> None:
        for optimizer in (adam_c, adam_g):
            optimizer.step()
            optimizer.zero_grad()

    def plain(rank: int) -> Iterator[None]:
        accumulation = batch // micro // RANKS
        sampler: Any = DistributedSampler(dataset, num_replicas=RANKS, rank=rank)
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            loader = DataLoader(dataset, batch_size=micro, sampler=sampler)
            for number, (real,) in enumerate(loader, 1):
                backward(real, 1 / accumulation)
                if number % accumulation == 0:
                    update()
                    yield

    def elastic(loop: Any) -> Iterator[None]:
        loader = loop.loader(dataset, drop_last=True)
        for _ in loop.epochs(1_000_000):
            for (real,) in loader:
                backward(real, loop.loss_weight)
                if loop.last_micro_batch:
                    update()
                    yield

    objects = {"generator": generator, "critic": critic, "adam_g": adam_g, "adam_c": adam_c}
    return LoopCase(objects, batch, micro, plain, elastic)


def stream(_source: Path | None = None) -> LoopCase:  # noqa: C901 - the same loop twice
    """Return the loop over a stream of dictionaries: global batch 32 in micro-batches of 8."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
    from torch.utils.data import DataLoader, IterableDataset  # noqa: PLC0415

    batch, micro, width, records = 32, 8, 64, 4096
    values = torch.randn(records, width)
    targets = values[:, :4].sum(dim=1).tanh()
    layers = nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    class Records(IterableDataset):  # type: ignore[misc]
        """All records, or, for a script without the library, those of one rank."""

        def __init__(self, first: int = 0, every: int = 1) -> None:
            self.first, self.every = first, every

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return itertools.islice(self.read(), self.first, None, self.every)

        def read(self) -> Iterator[dict[str, Any]]:
            for number in range(records):
                yield {"number": number, "values": values[number], "target": targets[number]}

    def backward(row: dict[str, Any], weight: float) -> None:
        output = model(row["values"]).squeeze(1)
        (nn.functional.mse_loss(output, row["target"]) * weight).backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def plain(rank: int) -> Iterator[None]:
        accumulation = batch // micro // RANKS
        while True:
            loader: Any = DataLoader(Records(rank, RANKS), batch_size=micro)
            for number, row in enumerate(loader, 1):
                backward(row, 1 / accumulation)
                if number % accumulation == 0:
                    update()
                    yield

    def elastic(loop: Any) -> Iterator[None]:
        loader = loop.loader(Records())
        for _ in loop.epochs(1_000_000):
            for row in loader:
                backward(row, loop.loss_weight)
                if loop.last_micro_batch:
                    update()
                    yield

    return LoopCase({"model": model, "optimizer": optimizer}, batch, micro, plain, elastic)


CASES: dict[str, Callable[[Path | None], LoopCase]] = {
    "gpt": gpt,
    "trainer": trainer,
    "gan": gan,
    "stream": stream,
}


def _language_model(source: Path | None) -> Any:
    """Return a GPT of four layers: of the source of nanoGPT or minGPT, else one of our own."""
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128}
    if source is None:
        return _own_language_model(**sizes)
    sys.path.insert(0, str(source))
    if (source / "mingpt").is_dir():
        published = importlib.import_module("mingpt.model").GPT
        config = published.get_default_config()
        config.merge_from_dict(sizes | {"model_type": None})
        config.vocab_size, config.block_size = _VOCABULARY, _CONTEXT
        return published(config)
    module = importlib.import_module("model")
    shape = {"vocab_size": _VOCABULARY, "block_size": _CONTEXT, "dropout": 0.0, "bias": False}
    return module.GPT(module.GPTConfig(**sizes, **shape))


def _own_language_model(*, n_layer: int, n_head: int, n_embd: int) -> Any:
    """Return a model of the same size that gives logits and loss."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    class LanguageModel(nn.Module):  # type: ignore[misc]
        """Decoder with learned positions."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(_VOCABULARY, n_embd)
            self.positions = nn.Parameter(torch.zeros(_CONTEXT, n_embd))
            layer = nn.TransformerEncoderLayer(
                n_embd, n_head, 4 * n_embd, dropout=0.0, batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
            self.head = nn.Linear(n_embd, _VOCABULARY, bias=False)
            self.mask = nn.Transformer.generate_square_subsequent_mask(_CONTEXT)

        def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
            hidden = self.layers(self.tokens(x) + self.positions, mask=self.mask, is_causal=True)
            logits = self.head(hidden)
            return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    return LanguageModel()
