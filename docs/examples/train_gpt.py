#!/usr/bin/env python3
"""A small GPT that learns to generate, letter by letter, sentences of a small grammar.

    python docs/examples/train_gpt.py --out /tmp/gpt     # a laptop, about a minute
    sbatch docs/examples/train_gpt.sbatch                # a job that may be spread over 1 to 4 GPUs

The library gets the model as a list of layers, so that a job with `parallel=hybrid` may also
train it in stages, each with some of the layers.

Writes OUT/losses.jsonl, one line per step. A complete run on one GPU prints a few generated
sentences; a further start on one GPU with the same OUT prints others.
"""

# Before torch: the library starts torch faster than torch does.
from slurm_elastic.training import init  # isort: skip

import argparse
import json
import math
from pathlib import Path
from random import Random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

GRAMMAR = {
    "SENTENCE": ("WHO DOES .", "WHO SEES WHOM .", "WHERE WHO SEES WHOM ."),
    "WHO": ("the THING", "the KIND THING", "the THING that SEES WHOM"),
    "WHOM": ("a THING", "the THING", "a KIND THING"),
    "THING": ("cat", "dog", "bird", "fox", "old man", "child"),
    "KIND": ("small", "red", "quiet", "happy"),
    "DOES": ("sleeps", "sings", "runs away"),
    "SEES": ("sees", "likes", "hears", "follows"),
    "WHERE": ("in the garden", "at night", "near the river"),
}
ALPHABET = " .abcdefghijklmnopqrstuvwxyz"
CONTEXT, WIDTH, HEADS = 64, 64, 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on generated text.")
    parser.add_argument("--out", type=Path, required=True, help="directory on a shared file system")
    parser.add_argument("--samples", type=int, default=2048, help="pieces of 64 letters")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tied", action="store_true", help="embedding and head share weights")
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument(
        "--micro-batch", type=int, default=8, help="samples through a stage at once"
    )
    parser.add_argument("--rate", type=float, default=6e-3, help="of learning, at its highest")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe", "pipedream"), default="1f1b")
    parser.add_argument("--checkpoint-every", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def text(letters: int, random: Random) -> str:
    """Return the given number of letters of random sentences."""

    def expand(word: str) -> str:
        choices = GRAMMAR.get(word)
        return " ".join(map(expand, random.choice(choices).split())) if choices else word

    sentences = ""
    while len(sentences) < letters:
        sentences += expand("SENTENCE").replace(" .", ". ")
    return sentences[:letters]


def pieces(samples: int, seed: int) -> TensorDataset:
    """Return sequences of CONTEXT letters (as numbers), with the letter that follows each."""
    whole = text(samples * CONTEXT + 1, Random(seed))
    numbers = torch.tensor([ALPHABET.index(letter) for letter in whole])
    return TensorDataset(numbers[:-1].view(samples, CONTEXT), numbers[1:].view(samples, CONTEXT))


class Embedding(nn.Module):
    """Embedding of letters and of their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(len(ALPHABET), WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        for table in (self.letter, self.place):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(letters.shape[1], device=letters.device)
        return self.letter(letters) + self.place(places)


class Block(nn.Module):
    """Causal attention, then a multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        heads = self.attention(self.before_attention(x)).view(samples, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(samples, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


def layers(blocks: int, *, tied: bool) -> list[tuple[str, nn.Module]]:
    """Return the model's layers in the order of the forward pass."""
    embedding, head = Embedding(), nn.Linear(WIDTH, len(ALPHABET), bias=False)
    if tied:
        head.weight = embedding.letter.weight
    return [
        ("embedding", embedding),
        *((f"block{number}", Block()) for number in range(blocks)),
        ("norm", nn.LayerNorm(WIDTH)),
        ("head", head),
    ]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean over all letters, which is that over samples, as these are equally long."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@torch.no_grad()
def generate(model: nn.Module, letters: int, device: torch.device) -> str:
    """Return text that the model generates."""
    model.eval()
    start = [ALPHABET.index(letter) for letter in ". "]
    text_ids = torch.tensor([start], device=device)
    for _ in range(letters):
        probabilities = model(text_ids[:, -CONTEXT:])[:, -1].softmax(dim=-1)
        text_ids = torch.cat([text_ids, torch.multinomial(probabilities, 1)], dim=1)
    return "".join(ALPHABET[number] for number in text_ids[0, len(start) :].tolist())


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    steps = args.epochs * math.ceil(args.samples / args.global_batch)
    job = init(
        layers(args.blocks, tied=args.tied),
        loss_fn,
        lambda parameters: torch.optim.AdamW(parameters, lr=args.rate),
        pieces(args.samples, args.seed),
        global_batch=args.global_batch,
        epochs=args.epochs,
        checkpoint_dir=args.out / "checkpoints",
        seed=args.seed,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        micro_batch=args.micro_batch,
        # PipeDream's stages update at different times: there is no gradient of the whole model.
        clip_norm=None if args.schedule == "pipedream" else 1.0,
        checkpoint_every_s=args.checkpoint_every,
        application="gpt",
        schedule=args.schedule,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "losses.jsonl").open("a", buffering=1) as losses:
        for batch in job:
            loss = job.step(batch)
            if job.rank == 0:
                line = {"step": batch.step, "loss": loss, "layout": job.layout}
                losses.write(json.dumps(line) + "\n")
                if batch.step % 20 == 0:
                    print(f"step {batch.step} of {steps}: loss {loss:.4f}", flush=True)
    job.finish()
    if job.world_size == 1:  # else this rank may not hold all layers
        torch.seed()
        print(f"generated: {generate(job.model, 200, job.device)}")


if __name__ == "__main__":
    main()
