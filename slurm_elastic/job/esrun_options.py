"""Command line of esrun.

Parsed by hand: importing argparse takes as long as the rest of a start. Options stand
before the program; the first word that is not an option begins the program.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.core.errors import SlurmElasticError

HELP = """\
usage: esrun [options] program [arguments…]

Start `program` once per GPU of the current allocation. If a controller runs, it
can resize the job. In a batch script, instead of srun or torchrun:

    #SBATCH --elastic=2-16
    esrun python train.py

Each rank gets the environment of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and so on, and sees all GPUs of its node. torchrun and `accelerate launch` as program
are started once per node. Outside Slurm one process runs, as rank 0 of 1.

options for scripts that do not use slurm_elastic.training:
  --checkpoint GLOB   quoted pattern of the script's checkpoints, e.g. 'ckpt/*.pt'. The
                      job is resized only after a new complete checkpoint, and only if
                      a restart has resumed from one before (see `man esrun`)
  --complete PATTERN  file that the script writes when a checkpoint is complete, e.g. 'DONE'
                      in a checkpoint directory, '{}.done' beside a checkpoint; then
                      nothing else counts as complete
  --signal NAME       signal that makes the ranks save a checkpoint, e.g. USR2; without
                      it esrun waits for the next checkpoint

options:
  --gpus one|all      GPUs that a rank sees: all of its node, of which it takes number
                      LOCAL_RANK (the default), or only its own
  --micro-batches N   micro-batches of one optimizer step over all ranks: global batch / batch
                      of one GPU. Ranks get their share as SLURM_ELASTIC_ACCUMULATION, and
                      accelerate accumulates so many steps. `script`: the script keeps its
                      batch itself; it is resized even if that cannot be seen
  --srun-args ARGS    additional options of srun, e.g. '--container-image=…'; may be repeated
  --local N           run N ranks on this machine, without Slurm
  -n, --dry-run       print the srun command and exit
  --version           print the version
  -h, --help          print this help

exit code: that of the first rank that failed (128+n after signal n), 0 if all ranks
succeeded, 2 for wrong usage, 127 if srun or the program is not found. A program that
uses the library and exits with 83 is started again in place.

environment:
  SLURM_ELASTIC_CONTROLLER   HOST:PORT of the controller, instead of the configured one
  USE_LIBUV                  not changed if set
"""

_WITH_VALUE = (
    *(
        "--checkpoint",
        "--complete",
        "--signal",
        "--gpus",
        "--micro-batches",
        "--srun-args",
        "--local",
    ),
)
_SIGNALS = ("USR1", "USR2", "HUP", "INT", "TERM", "CONT", "WINCH")


class UsageError(SlurmElasticError):
    """An invalid command line; the message is one line."""


class Options:
    """Options of one command line, and the program to run."""

    __slots__ = (
        *(
            "checkpoint",
            "complete",
            "dry_run",
            "gpus",
            "local",
            "keeps_batch",
            "micro_batches",
            "program",
            "show",
            "signal",
        ),
        "srun_args",
    )

    def __init__(self) -> None:
        self.checkpoint: str | None = None
        self.complete: str | None = None
        self.signal: str | None = None
        self.srun_args: list[str] = []
        self.gpus = "all"
        self.local: int | None = None
        self.micro_batches: int | None = None
        self.keeps_batch = False
        self.dry_run = False
        self.show: str | None = None
        self.program: list[str] = []


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        UsageError: names the word that is invalid.
    """
    options = Options()
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            remaining.insert(0, word)
            break
        name, equals, value = word.partition("=")
        if name in ("-h", "--help", "--version") and not equals:
            options.show = name.lstrip("-")[0]
            return options
        if name in ("-n", "--dry-run") and not equals:
            options.dry_run = True
            continue
        if name not in _WITH_VALUE:
            raise UsageError(f"{word}: unknown option; see esrun --help")
        if not equals:
            if not remaining:
                raise UsageError(f"{name}: expected a value; see esrun --help")
            value = remaining.pop(0)
        _set(options, name, value)
    options.program = remaining
    if not remaining:
        raise UsageError("expected a program to run; see esrun --help")
    if options.complete and not options.checkpoint:
        raise UsageError("--complete: expected --checkpoint too, the checkpoints that it marks")
    if options.signal and not options.checkpoint:
        raise UsageError("--signal: expected --checkpoint too, which shows when a save is complete")
    return options


def _set(options: Options, name: str, value: str) -> None:
    if name == "--checkpoint":
        if not value:
            raise UsageError("--checkpoint: expected a pattern; write one such as 'ckpt/*.pt'")
        options.checkpoint = value
    elif name == "--complete":
        # Imported late: rarely needed, and each start waits for it.
        from slurm_elastic.job.complete_marker import pattern_error  # noqa: PLC0415

        if error := pattern_error(value):
            raise UsageError(f"--complete: {value} is invalid: {error}")
        options.complete = value
    elif name == "--signal":
        signal = value.upper().removeprefix("SIG")
        if signal not in _SIGNALS:
            raise UsageError(f"--signal: {value} is invalid: expected {', '.join(_SIGNALS)}")
        options.signal = signal
    elif name == "--gpus":
        if value not in ("one", "all"):
            raise UsageError(f"--gpus: {value} is invalid: expected one or all")
        options.gpus = value
    elif name == "--srun-args":
        import shlex  # noqa: PLC0415 - slow to load, rarely needed

        try:
            options.srun_args += shlex.split(value)
        except ValueError as error:
            raise UsageError(f"--srun-args: {value} is invalid: {error}") from None
    elif name == "--micro-batches":
        options.keeps_batch = value == "script"
        options.micro_batches = None if options.keeps_batch else _number(name, value, 1_000_000)
    else:
        options.local = _number(name, value, 1024)


def _number(name: str, value: str, most: int) -> int:
    # Long digits are refused by their length: int() of thousands of them raises.
    short = value.isascii() and value.isdecimal() and len(value) <= 9
    if not short or not 0 < int(value) <= most:
        raise UsageError(f"{name}: {value} is invalid: expected a number from 1 to {most}")
    return int(value)
