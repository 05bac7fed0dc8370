"""Reasons of esrun in the job's log, and the texts in them.

>>> from slurm_elastic.core.reason import Reason
>>> log_text(Reason("companion-late", job="4712"))
'A companion did not join by the deadline (companion-late job=4712)'
"""

from __future__ import annotations

from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report_fields import MAX_TEXT


def log_text(reason: Reason) -> str:
    """Return meaning, code and parameters of a reason, in one line."""
    return f"{reason.definition.meaning.removesuffix('.')} ({reason})"


def printable(text: object) -> str:
    """Return a text in the form that a report allows."""
    return "".join(char if char.isprintable() else "?" for char in str(text))[:MAX_TEXT]
