"""esrun's command line.

Parsed by hand: argparse costs as much as the rest of a start. Options stand
before the program, everything from the first word that is none belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.core.errors import SlurmElasticError

HELP = """\
usage: esrun [options] program [arguments…]

Starts `program` once per GPU of the present allocation and, where a controller
runs, lets it resize the job. In a batch script, instead of srun or torchrun:

    #SBATCH --elastic=2-16
    esrun python train.py

Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK,
MASTER_ADDR and MASTER_PORT, and one GPU in CUDA_VISIBLE_DEVICES. Outside Slurm
one process runs, as rank 0 of 1.

options for scripts that do not use slurm_elastic.training:
  --checkpoint GLOB   where the script writes its checkpoints, e.g. 'ckpt/*.pt'. It is
                      resized only after a complete new one, and only once it has
                      been seen to resume from one (see `man esrun`). Quote the pattern.
  --signal NAME       sent to the ranks, e.g. USR2, to ask for a checkpoint at once;
                      without it esrun waits for the next one

options:
  --srun-args ARGS    more options for srun, e.g. '--container-image=…'; may be repeated
  --local N           run N ranks on this machine without Slurm
  -n, --dry-run       print the srun command instead of running it
  --version           print the version
  -h, --help          print this help

exit code: that of the first rank that failed (128+n if signal n ended it),
2 for wrong usage, 0 if all ranks succeeded. A program that uses the library and
leaves with 83 is started again in place.

environment:
  SLURM_ELASTIC_CONTROLLER   HOST:PORT of the controller, instead of the site's
  USE_LIBUV                  is left alone if set
"""

_SIGNALS = ("USR1", "USR2", "HUP", "INT", "TERM", "CONT", "WINCH")


class UsageError(SlurmElasticError):
    """The command line cannot be used; one clear line."""


class Options:
    """What was asked."""

    __slots__ = ("checkpoint", "dry_run", "local", "program", "show", "signal", "srun_args")

    def __init__(self) -> None:
        self.checkpoint: str | None = None
        self.signal: str | None = None
        self.srun_args: list[str] = []
        self.local: int | None = None
        self.dry_run = False
        self.show: str | None = None
        self.program: list[str] = []


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        UsageError: naming the word that is wrong.
    """
    options = Options()
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            words.insert(0, word)
            break
        name, equals, value = word.partition("=")
        if name in ("-h", "--help", "--version") and not equals:
            options.show = name.lstrip("-")[0]
            return options
        if name in ("-n", "--dry-run") and not equals:
            options.dry_run = True
            continue
        if name not in ("--checkpoint", "--signal", "--srun-args", "--local"):
            raise UsageError(f"{word}: no such option; see esrun --help")
        if not equals:
            if not words:
                raise UsageError(f"{name}: a value is missing")
            value = words.pop(0)
        _set(options, name, value)
    options.program = words
    if not words:
        raise UsageError("no program given; see esrun --help")
    if options.signal and not options.checkpoint:
        raise UsageError("--signal needs --checkpoint: nothing else shows that a save has ended")
    return options


def _set(options: Options, name: str, value: str) -> None:
    if name == "--checkpoint":
        if not value:
            raise UsageError("--checkpoint: the pattern is empty")
        options.checkpoint = value
    elif name == "--signal":
        signal = value.upper().removeprefix("SIG")
        if signal not in _SIGNALS:
            raise UsageError(f"--signal {value}: use one of {', '.join(_SIGNALS)}")
        options.signal = signal
    elif name == "--srun-args":
        import shlex  # noqa: PLC0415 - slow to load and seldom needed

        try:
            options.srun_args += shlex.split(value)
        except ValueError as error:
            raise UsageError(f"--srun-args {value}: {error}") from None
    elif not value.isdecimal() or not 0 < int(value) <= 1024:
        raise UsageError(f"--local {value}: write a number from 1 to 1024")
    else:
        options.local = int(value)
