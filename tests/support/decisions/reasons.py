"""Reasons in tests: their sentences, and one of a policy that a test makes up."""

from __future__ import annotations

from slurm_elastic.cli.reason_text import sentence
from slurm_elastic.core.reason import Reason


def words(reason: Reason | None) -> str:
    """Return the English sentence of a reason; "" for none."""
    return "" if reason is None else sentence(reason)


def told(text: str) -> Reason:
    """Return a reason of a site's own policy."""
    return Reason("text", text=text)
