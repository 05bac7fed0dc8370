"""Record of a companion in AdminComment, which its owner cannot change.

job_submit.lua writes it at submission from the comment that esrun gives; an operator, as selasticd
is, cannot write AdminComment. It names the job whose companion it marks; it gives no rights
(docs/adr/0018-in-place-changes.md). Standard library only.

>>> record = companion_record(CompanionComment(base=4711, run=0, change=5))
>>> record
'{"companion":{"base":4711,"change":5,"run":0},"v":1}'
>>> parse_companion_record(record)
CompanionComment(base=4711, run=0, change=5)
"""

from __future__ import annotations

import json
import re

from slurm_elastic.core.member_orders import CompanionComment

_VERSION = 1
_RECORD = re.compile(
    r'\{"companion":\{"base":([0-9]{1,10}),"change":([0-9]{1,18}),"run":([0-9]{1,10})\},"v":1\}',
    re.ASCII,
)


def companion_record(companion: CompanionComment) -> str:
    """Return the text for AdminComment."""
    fields = {"base": companion.base, "run": companion.run, "change": companion.change}
    record = {"companion": fields, "v": _VERSION}
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def parse_companion_record(text: str) -> CompanionComment | None:
    """Return the companion of an AdminComment; None if that is not its record."""
    match = _RECORD.fullmatch(text)
    if match is None:
        return None
    base, change, run = map(int, match.groups())
    return CompanionComment(base=base, run=run, change=change)
