"""Environment of Slurm's commands, without variables of a user that would change their output."""

from __future__ import annotations

import os

#: Variables, or their prefixes, that change the effect of commands. With several clusters under one
#: slurmdbd, users name others in `SLURM_CLUSTERS`: all commands would then read and change these.
#: The rest are default options, which leave out jobs.
_CHANGING = ("SLURM_CLUSTERS", "SQUEUE_", "SACCT_", "SCONTROL_", "SACCTMGR_")
#: In a federation with `FederationParameters=fed_display` these commands would print the jobs of
#: all its clusters.
_OWN_CLUSTER = {"SQUEUE_LOCAL": "1", "SACCT_LOCAL": "1"}


def command_environment() -> dict[str, str]:
    """Return the environment in which a command addresses this cluster, and all of it."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_CHANGING)} | _OWN_CLUSTER
