"""Fields of a report with a structure of their own: layer profiles, and reasons.

All input is hostile; see `slurm_elastic.core.report`. Standard library only.
"""

from __future__ import annotations

import json
from typing import Any

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.reasons.launcher_codes import MEMBER_CODES

#: Most characters of a text.
MAX_TEXT = 200
#: Most parameters of the reason in a report.
_MOST_PARAMETERS = 8

#: One layer as it travels: name, forward_s, backward_s, activation_bytes, parameter_bytes.
ProfileRow = tuple[str, float, float, float, float]
#: Most layers of a profile, characters of a layer's name, and bytes of a profile's JSON. A whole
#: report has to stay below the 64 KiB of a request.
MAX_LAYERS, MAX_LAYER_NAME, MAX_PROFILE_BYTES = 1000, 100, 48 * 1024
_MOST_S, _MOST_BYTES = 1e6, 1e15


class ReportError(InvalidInputError):
    """A field of a report or of orders is missing, of the wrong type or out of range."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"field {field}: {reason}")
        self.field = field
        self.reason = reason


def profile_rows(value: Any) -> tuple[ProfileRow, ...]:
    """Return a layer profile in its wire form: times of six digits, whole bytes.

    Args:
        value: a list of rows as in `Report.profile`.

    Raises:
        ReportError: for field `profile`: no such list, more than `MAX_LAYERS` rows or
            `MAX_PROFILE_BYTES`; names that are long, unprintable or duplicate; numbers that are
            negative, too large or not finite.
    """
    if not isinstance(value, list | tuple) or len(value) > MAX_LAYERS:
        raise ReportError("profile", f"must be a list of at most {MAX_LAYERS} layers")
    rows = tuple(_profile_row(row, at) for at, row in enumerate(value))
    names: set[str] = set()
    for name, *_ in rows:
        if name in names:
            raise ReportError("profile", f"duplicate layer {name!r}")
        names.add(name)
    size = len(json.dumps(rows))
    if size > MAX_PROFILE_BYTES:
        raise ReportError("profile", f"has {size} bytes, more than {MAX_PROFILE_BYTES}")
    return rows


def _profile_row(row: Any, at: int) -> ProfileRow:
    if not isinstance(row, list | tuple) or len(row) != 5:
        raise ReportError("profile", f"row {at} must be a name, two times and two sizes")
    name = row[0]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_LAYER_NAME or not name.isprintable():
        raise ReportError("profile", f"row {at}: a name has 1 to {MAX_LAYER_NAME} characters")
    forward, backward = (_profile_number(v, at, _MOST_S) for v in row[1:3])
    activation, parameters = (_profile_number(v, at, _MOST_BYTES) for v in row[3:5])
    return (name, _six(forward), _six(backward), round(activation), round(parameters))


def _profile_number(value: Any, at: int, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ReportError("profile", f"row {at}: its numbers must be from 0 to {most:g}")
    return value


def _six(value: float) -> float:
    return float(f"{value:.6g}")


def change_reason(value: Any) -> Reason:
    """Return the reason of a change of members.

    A sentence, as an esrun sends that has no reasons, and the code of a newer esrun that is not
    known here, become the code `text`.

    Raises:
        ReportError: for field `change_reason`: neither; a text that is long or unprintable; or a
            number that is out of bounds.
    """
    field = "change_reason"
    row = value if isinstance(value, dict) else {"code": value, "parameters": {}}
    code, parameters = row.get("code"), row.get("parameters")
    if not isinstance(parameters, dict) or len(parameters) > _MOST_PARAMETERS:
        raise ReportError(field, "must be a code and its parameters")
    for item in (code, *(v for v in parameters.values() if isinstance(v, str))):
        if not isinstance(item, str) or len(item) > MAX_TEXT or not item.isprintable():
            raise ReportError(field, f"must be printable text of at most {MAX_TEXT} characters")
    if code not in MEMBER_CODES:
        sentence = parameters.get("text") if code == "text" else None
        return Reason("text", text=sentence if isinstance(sentence, str) else code)
    # A parameter that was not given is None, and is sent as that.
    numbers = [v for v in parameters.values() if v is not None and not isinstance(v, str)]
    if not all(type(v) in (int, float) and 0 <= v < 2**32 for v in numbers):
        raise ReportError(field, "has a parameter that is no text and no number from 0 to 2**32")
    reason = Reason.from_json(row)
    if reason is None or reason.code != code:
        raise ReportError(field, f"has other parameters than {code} in docs/reasons.md")
    return reason
