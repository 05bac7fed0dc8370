"""Reasons in English, from their codes and parameters (docs/reasons.md).

>>> text({"code": "holds-max", "parameters": {"gpus": 8}})
'8 is its MAX'
>>> text({"code": "of-tomorrow", "parameters": {"gpus": 8}}), text(None)
('of-tomorrow gpus=8', '')
>>> with_texts({"reason": {"code": "waits", "parameters": {}}})
{'reason': {'code': 'waits', 'parameters': {}, 'text': 'waits'}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.sentences import (
    controller_sentences,
    launcher_sentences,
    placement_sentences,
    policy_sentences,
)
from slurm_elastic.cli.sentences.phrases import Sentence
from slurm_elastic.core.reason import Reason

if TYPE_CHECKING:
    from slurm_elastic.rpc.answers import ReasonRow

SENTENCES: Mapping[str, Sentence] = {
    **placement_sentences.SENTENCES,
    **policy_sentences.SENTENCES,
    **controller_sentences.SENTENCES,
    **launcher_sentences.SENTENCES,
}
_KEYS = frozenset(("code", "parameters"))


def text(row: ReasonRow | str | None) -> str:
    """Return the sentence of a reason in an answer; "" for none.

    A string is the sentence that a controller of version 0.1.0 sends. A reason that this version
    does not know, or cannot read, is shown as code and parameters.
    """
    if not row:
        return ""
    if isinstance(row, str):
        return clean(row)
    try:
        return clean(sentence(Reason(row["code"], **row["parameters"])))
    except (ValueError, TypeError):
        values = (f"{k}={json.dumps(v)}" for k, v in row["parameters"].items())
        return clean(" ".join((row["code"], *values)))


def logged(reason: Reason) -> str:
    """Return the sentence of a reason for the log of a job; code and parameters without one."""
    return clean(sentence(reason)) if reason.code in SENTENCES else str(reason)


def sentence(reason: Reason) -> str:
    """Return the sentence of a reason, a clause without a full stop."""
    values = {name: _value(value) for name, value in reason.parameters.items()}
    form = SENTENCES[reason.code]
    return form.format_map(values) if isinstance(form, str) else form(values)


def with_texts(answer: Any) -> Any:
    """Return a JSON answer with the key `text` in each of its reasons."""
    if isinstance(answer, list):
        return [with_texts(value) for value in answer]
    if not isinstance(answer, dict):
        return answer
    if answer.keys() == _KEYS:
        row: Any = answer
        return {**answer, "text": text(row)}
    return {key: with_texts(value) for key, value in answer.items()}


def _value(value: Any) -> Any:
    """Return a parameter for a sentence: nested reasons are sentences themselves."""
    if isinstance(value, Reason):
        return sentence(value)
    if isinstance(value, tuple) and value and isinstance(value[0], Reason):
        return tuple(sentence(v) for v in value)
    return value
