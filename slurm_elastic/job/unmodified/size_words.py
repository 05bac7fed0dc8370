"""Words of a batch script that depend on the size of its job.

A program that is started again in the same run of its job gets the arguments of before. If the
batch script has computed them from the number of GPUs (`--accumulation $((64 / SLURM_NTASKS))`),
they are wrong then. So a program whose batch script mentions that number is started again only if
its command was the same on two sizes. The same holds for scripts between the batch script and esrun
(`bash run.sh`, with esrun in it), for files that one of these reads (`source settings.sh`), and for
the rules of make and Snakemake, with esrun in one.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slurm_elastic.job.environment.regular_file import regular_file

_TIMEOUT_S = 20.0
_WORDS = re.compile(
    r"SLURM_(?!ARRAY)\w*(?:NODE|TASK|GPU|PROC|CPU|TRES)\w*|(?:CUDA|ROCR|HIP)_VISIBLE_DEVICES"
    r"|nvidia-smi|rocm-smi|device_count"
)


_SOURCED = re.compile(
    r"(?:^|[;&|({]|\b(?:then|do|else))[ \t]*(?:source|\.)[ \t]+(\"[^\"\n]+\"|'[^'\n]+'|[^\s;&|)]+)",
    re.MULTILINE,
)
#: Lines by which the rules of make, Snakemake and just include others.
_INCLUDED = re.compile(r"^(?:-?s?include|include:|import)[ \t]+(.+)$", re.MULTILINE)
#: Larger files are no scripts that a user has written; processes and files that are looked at.
_MAX_BYTES, _MOST_CALLERS, _MOST_FILES = 256 * 1024, 16, 50
_SLURM_DAEMON = "slurmstepd"
#: Files that a program reads without being given their names.
_DEFAULT_FILES = {
    "make": ("GNUmakefile", "makefile", "Makefile"),
    "snakemake": ("Snakefile", "snakefile", "workflow/Snakefile", "workflow/snakefile"),
    "just": ("justfile", "Justfile", ".justfile"),
}


class ScriptFile(NamedTuple):
    """Script that may have chosen the program's command."""

    path: str
    text: str


def size_word(script: str) -> str:
    """Return the first word of a batch script that depends on the job's size; "" without one.

    >>> size_word("N=$((64 / SLURM_JOB_NUM_NODES))"), size_word("#SBATCH --nodes=2")
    ('SLURM_JOB_NUM_NODES', '')
    """
    lines = (line for line in script.splitlines() if not line.lstrip().startswith("#"))
    found = _WORDS.search("\n".join(lines))
    return found[0] if found else ""


def read_batch_script(job_id: int) -> str | None:
    """Return the batch script of a job, from slurmctld; None: it could not be read."""
    command = ("scontrol", "write", "batch_script", str(job_id), "-")
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def called_scripts(batch_script: str, pid: int, *, proc: Path = Path("/proc")) -> list[ScriptFile]:
    """Return scripts between the batch script and esrun, and files that they and it read.

    Paths with variables that are not exported, or with a command, are left out.

    Args:
        batch_script: its text.
        pid: of esrun, whose environment and directory these scripts have, as far as is known.
        proc: where the kernel shows processes.
    """
    directory = os.getcwd()  # noqa: PTH109 - a text
    found = {file.path: file for file in _callers(pid, proc) if file.text != batch_script}
    texts = [batch_script, *(file.text for file in found.values())]
    while texts and len(found) < _MOST_FILES:
        for path in _sourced(texts.pop(), directory, os.environ):
            text = None if path in found else _read(path)
            if text is not None:
                found[path] = ScriptFile(path, text)
                texts.append(text)
    return list(found.values())


def _callers(pid: int, proc: Path) -> Iterator[ScriptFile]:
    """Yield the scripts that the processes above esrun run, up to Slurm's daemon."""
    for _ in range(_MOST_CALLERS):
        try:
            status = (proc / str(pid) / "stat").read_text("utf-8", "replace")
            pid = int(status.rpartition(")")[2].split()[1])
            words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
            directory = os.readlink(proc / str(pid) / "cwd")  # noqa: PTH115 - a text
        except (OSError, ValueError, IndexError):
            return  # of another user, or ended
        if _SLURM_DAEMON in words[0].decode(errors="replace"):
            return
        names = [os.fsdecode(word) for word in words if word]
        names += _DEFAULT_FILES.get(_program_name(names), ())
        for name in names:
            path = os.path.normpath(os.path.join(directory, name))  # noqa: PTH118 - a text
            text = _read(path)
            if text is not None:
                yield ScriptFile(path, text)


def _program_name(words: Sequence[str]) -> str:
    """Return the name of a program: that of a Python script, if Python runs it.

    >>> _program_name(["/usr/bin/python3", "-u", "/opt/bin/snakemake", "-c1"])
    'snakemake'
    >>> _program_name(["gmake", "train"])
    'make'
    """
    names = [word.rpartition("/")[2] for word in words if not word.startswith("-")]
    if len(names) > 1 and names[0].startswith("python"):
        del names[0]
    return names[0].removeprefix("g") if names else ""


def _sourced(text: str, directory: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths of files that shell text, or a file of rules, reads."""
    words = [match[1] for match in _SOURCED.finditer(text)]
    words += (word for match in _INCLUDED.finditer(text) for word in match[1].split())
    for quoted in words:
        word = re.sub(
            r"\$(?:(\w+)|\{(\w+)\})",
            lambda name: environ.get(name[1] or name[2], "$"),
            quoted.strip("\"'"),
        )
        if "$" not in word and "`" not in word:
            path = os.path.join(directory, os.path.expanduser(word))  # noqa: PTH111, PTH118 - a text
            yield os.path.normpath(path)


def _read(path: str) -> str | None:
    """Return the text of a script; None: it is no such file."""
    try:
        with regular_file(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError):
        return None
    is_script = data and len(data) <= _MAX_BYTES and b"\0" not in data
    return data.decode(errors="replace") if is_script else None
