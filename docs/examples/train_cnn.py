#!/usr/bin/env python3
"""A small convolutional network on generated images; its front layers may freeze.

    python docs/examples/train_cnn.py --out /tmp/cnn                  # all layers train
    python docs/examples/train_cnn.py --out /tmp/cnn2 --freeze auto   # converged ones freeze
    sbatch docs/examples/train_cnn.sbatch                             # as the directive says

Writes OUT/epochs.jsonl: one line per epoch with training loss, validation loss, accuracy and
number of frozen layers.
"""

# Before torch: the library starts torch faster than torch does.
from slurm_elastic.training import Freezing, init  # isort: skip

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

CLASSES, SIDE = 10, 16
#: Standard deviation of a pixel's noise; that of the patterns is about 1.
NOISE = 4.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on generated images.")
    parser.add_argument("--out", type=Path, required=True, help="directory on a shared file system")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, help="most samples through the model at once")
    parser.add_argument("--freeze", choices=("off", "auto"), default="off")
    parser.add_argument(
        "--criterion",
        choices=("plasticity", "gradient-change", "gradient-norm"),
        default="plasticity",
        help="rule by which a layer has converged",
    )
    parser.add_argument(
        "--max-penalty",
        type=float,
        default=0.5,
        metavar="PERCENT",
        help="useful progress that freezing may cost; in a job, the directive's",
    )
    parser.add_argument("--checkpoint-every", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def images(samples: int, *, seed: int, draw: int) -> TensorDataset:
    """Return images of one smooth pattern per class, shifted at random, with noise.

    Args:
        samples: their number.
        seed: of the patterns.
        draw: seed of shifts and noise: another number gives other images of the same classes.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(CLASSES, 3, 5, 5, generator=generator)
    patterns = nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic")
    generator.manual_seed(1000 * seed + draw)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    shifts = torch.randint(-3, 4, (samples, 2), generator=generator).tolist()
    moved = [
        patterns[label].roll(tuple(shift), dims=(1, 2))
        for label, shift in zip(labels.tolist(), shifts, strict=True)
    ]
    noise = torch.randn(samples, 3, SIDE, SIDE, generator=generator)
    return TensorDataset(torch.stack(moved) + NOISE * noise, labels)


def network() -> nn.Sequential:
    """Return four convolutions with batch-norm, and a linear layer."""
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((16, 1), (32, 2), (32, 1), (64, 2)):
        layers += [
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)
    )


def validate(model: nn.Module, dataset: TensorDataset, device: torch.device) -> dict[str, float]:
    """Return loss and accuracy on images that are not trained on."""
    model.eval()
    with torch.no_grad():
        inputs, labels = (tensor.to(device) for tensor in dataset.tensors)
        output = model(inputs)
        loss = nn.functional.cross_entropy(output, labels).item()
        accuracy = (output.argmax(dim=1) == labels).float().mean().item()
    model.train()
    return {"validation_loss": loss, "accuracy": accuracy}


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = network()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    steps = args.epochs * math.ceil(args.samples / args.global_batch)
    held_out = images(1024, seed=args.seed, draw=2)
    freezing = Freezing(criterion=args.criterion, max_penalty=args.max_penalty / 100)
    job = init(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        images(args.samples, seed=args.seed, draw=1),
        global_batch=args.global_batch,
        epochs=args.epochs,
        checkpoint_dir=args.out / "checkpoints",
        seed=args.seed,
        # Down to a fifth: a rate that falls tenfold would thaw what is frozen.
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda step: 0.6 + 0.4 * math.cos(math.pi * min(1.0, step / steps))
        ),
        micro_batch=args.micro_batch,
        checkpoint_every_s=args.checkpoint_every,
        application="cnn",
        freeze=freezing if args.freeze == "auto" else "off",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    begun, losses = time.process_time(), []
    with (args.out / "epochs.jsonl").open("a", buffering=1) as log:
        for batch in job:
            losses.append(job.step(batch))
            if batch.last_of_epoch and job.rank == 0:
                cpu_s = time.process_time() - begun
                validation = validate(model, held_out, job.device)
                job.validated(validation["validation_loss"])
                loss = sum(losses) / len(losses)
                line = {"epoch": batch.epoch, "loss": loss, "frozen": job.frozen, "cpu_s": cpu_s}
                log.write(json.dumps(line | validation) + "\n")
                print(
                    f"epoch {batch.epoch}: loss {loss:.4f}, accuracy {validation['accuracy']:.1%},"
                    f" {job.frozen} layers frozen",
                    flush=True,
                )
                begun, losses = time.process_time(), []
    job.finish()


if __name__ == "__main__":
    main()
