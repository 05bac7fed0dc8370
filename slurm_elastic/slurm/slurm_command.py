"""Slurm's commands that read, each with a timeout and one line per failure."""

from __future__ import annotations

import subprocess

from slurm_elastic.slurm.command_environment import command_environment
from slurm_elastic.slurm.release_rules import Release
from slurm_elastic.slurm.scontrol import SlurmUnreachableError

#: Answers without spaces and line breaks (from Slurm 25.11; others ignore it), times in epoch s.
_ENVIRONMENT = {"SLURM_JSON": "compact", "SLURM_TIME_FORMAT": "%s"}


def output(*words: str, timeout_s: float = 30.0, shown: str = "") -> bytes:
    """Return the output of a command of Slurm.

    Args:
        words: the command and its arguments.
        timeout_s: seconds after which it is killed.
        shown: the command in error messages; "": its first three words.

    Raises:
        SlurmUnreachableError: it is missing, failed or took too long.
    """
    shown = shown or " ".join(words[:3])
    try:
        process = subprocess.run(
            words,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=command_environment() | _ENVIRONMENT,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(f"{shown}: no answer in {timeout_s:g} s") from None
    except FileNotFoundError:
        raise SlurmUnreachableError(
            f"{words[0]} is not on PATH: install Slurm's client commands"
        ) from None
    except OSError as error:
        raise SlurmUnreachableError(f"{shown}: {error.strerror}") from None
    if process.returncode:
        text = " ".join(process.stderr.decode(errors="replace").split())
        raise SlurmUnreachableError(f"{shown}: {text or f'exit code {process.returncode}'}")
    return process.stdout


def require_answer() -> None:
    """Ask slurmctld, or its backup, for an answer.

    Raises:
        SlurmUnreachableError: there is none.
    """
    if b" is UP" not in output("scontrol", "ping"):
        raise SlurmUnreachableError("scontrol ping: no slurmctld answers")


def installed_release(*, command: str = "scontrol", timeout_s: float = 30.0) -> Release:
    """Return the release of a command on this host.

    Raises:
        SlurmUnreachableError: the command is missing, or the release cannot be used.
    """
    text = output(command, "--version", timeout_s=timeout_s).decode(errors="replace").strip()
    release = Release.parse(text)
    if release is None:
        raise SlurmUnreachableError(
            f"{command} --version: {text!r:.80} is invalid: expected a release such as 24.11.5"
        )
    if refusal := release.refusal():
        raise SlurmUnreachableError(refusal)
    return release
