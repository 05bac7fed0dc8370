r"""A submission: the directive and the requested shape, as recorded by job_submit.lua.

    >>> text = '{"elastic":"2-16","shape":{"req_nodes":"g01","time_limit":60},"v":1}'
    >>> submission = parse_admin_comment(text)
    >>> str(submission.directive), submission.shape["time_limit"]
    ('2-16', 60)
    >>> submission.admin_comment() == text
    True
    >>> parse_admin_comment("migrated by hand") is None
    True
    >>> str(parse_comment("elastic:2-16 first try").directive)
    '2-16'

The record is in AdminComment, which users cannot write; a site's tool may have added text after it.
Comment, the portable form, can be changed by the job's owner at any time; nothing in it can affect
other users' jobs.
Fields of `shape` are named as in job_submit.lua and hold Slurm's own units: minutes for
`time_limit`, megabytes for `min_mem_per_node`, 4294967295 for "unlimited", `nice` as typed.
Fields that the user did not give are missing. Standard library only.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_elastic.core.directive import Directive, DirectiveError
from slurm_elastic.core.errors import InvalidInputError

VERSION = 1
#: Longest record that job_submit.lua writes, in bytes.
MAX_BYTES = 65536

Shape = Mapping[str, int | str]

_NAME = re.compile(r"\w+")
_NUMBERS = frozenset(
    _NAME.findall("""
        begin_time contiguous core_spec cores_per_socket cpus_per_task max_nodes min_mem_per_cpu
        min_mem_per_node min_nodes nice ntasks_per_node ntasks_per_socket ntasks_per_tres num_tasks
        pn_min_cpus pn_min_tmp_disk req_switch shared sockets_per_node threads_per_core time_limit
        time_min wait4switch
    """)
)
_STRINGS = frozenset(
    _NAME.findall("""
        cpus_per_tres dependency exc_nodes features licenses mem_per_tres network partition prefer
        qos req_nodes reservation tres_bind tres_freq tres_per_job tres_per_node tres_per_socket
        tres_per_task
    """)
)
_RECORD = re.compile(r'\s*\{\s*(?:"at"\s*:\s*[0-9]+\s*,\s*)?"elastic"')
_DECODER = json.JSONDecoder()
_COMMENT = re.compile(r"elastic:(\S+)")


class SubmissionError(InvalidInputError):
    """A record of job_submit.lua that is damaged or of another version.

    Attributes:
        part: The faulty part: a field's name, or "AdminComment" or "Comment".
        reason: What is wrong with it.
    """

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(part, reason)
        self.part = part
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.part}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Submission:
    """A directive and the shape that its job was submitted with.

    Attributes:
        directive: As submitted.
        shape: The fields of the job that the user gave, by their names in job_submit.lua; empty
            when only Comment carries the directive.
        other: Earlier content of AdminComment, written by the site's own script, and what has been
            appended to the record since.
        submitted: Epoch seconds; 0 when only Comment carries the directive. Distinguishes jobs
            whose id slurmctld has used twice.
    """

    directive: Directive
    shape: Shape = field(default_factory=dict, hash=False)
    other: str = ""
    submitted: int = 0

    def admin_comment(self) -> str:
        """Return the record as job_submit.lua writes it."""
        record: dict[str, object] = {"elastic": str(self.directive), "v": VERSION}
        if self.submitted:
            record["at"] = self.submitted
        record["shape"] = {
            name: _escaped(value) if isinstance(value, str) else value
            for name, value in self.shape.items()
        }
        if self.other:
            record["other"] = _escaped(self.other)
        return json.dumps(record, sort_keys=True, separators=(",", ":"))


def parse_admin_comment(text: str | None) -> Submission | None:
    """Read the record from a job's AdminComment.

    Args:
        text: As Slurm returns it, undecodable bytes as surrogates.

    Returns:
        None if the text is not one of our records.

    Raises:
        SubmissionError: It is one, but damaged or of another version.
    """
    if not text or not _RECORD.match(text):
        return None
    start = len(text) - len(text.lstrip())
    try:
        record, end = _DECODER.raw_decode(text[: start + MAX_BYTES], start)
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON: {error}"
        if len(text) > MAX_BYTES:
            problem = f"{len(text)} characters are more than {MAX_BYTES}"
        raise SubmissionError("AdminComment", problem) from None
    if record.get("v") != VERSION:
        raise SubmissionError("v", f"is {record.get('v')!r:.20}, this release reads {VERSION}")
    shape = record.get("shape")
    if not isinstance(shape, dict):
        raise SubmissionError("shape", "is not an object")
    appended = text[end:].lstrip(", ").strip()
    others = (_unescaped("other", record.get("other", "")), appended)
    return Submission(
        _directive(record["elastic"], "elastic"),
        {name: _value(name, value) for name, value in shape.items() if name in _NUMBERS | _STRINGS},
        ",".join(text for text in others if text),
        _number("at", record.get("at", 0)),
    )


def parse_comment(text: str | None) -> Submission | None:
    """Read the portable form, `elastic:2-16` at the beginning of a job's Comment.

    Raises:
        SubmissionError: The directive in it is faulty.
    """
    match = _COMMENT.match(text or "")
    return Submission(_directive(match[1], "Comment")) if match else None


def _directive(text: object, part: str) -> Directive:
    if not isinstance(text, str):
        raise SubmissionError(part, "is not a string")
    try:
        return Directive.parse(text)
    except DirectiveError as error:
        raise SubmissionError(part, str(error)) from None


def _value(name: str, value: object) -> int | str:
    return _unescaped(name, value) if name in _STRINGS else _number(name, value)


def _number(name: str, value: object) -> int:
    if type(value) is not int or not -(2**53) < value < 2**53:
        raise SubmissionError(name, f"{value!r:.40} is not a whole number")
    return value


# The record is ASCII: job_submit.lua writes each byte outside it as \u00XX.


def _escaped(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("latin-1")


def _unescaped(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise SubmissionError(name, f"{value!r:.40} is not a string")
    try:
        return value.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise SubmissionError(name, "holds characters that job_submit.lua never writes") from None
