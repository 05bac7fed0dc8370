"""Definition of the code of a reason: its meaning and its parameters."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ParameterKind(enum.Enum):
    """Kind of the value of a parameter; in JSON a number, a string, a list or an object."""

    COUNT = "whole number"
    NUMBER = "number"
    FRACTION = "fraction"
    SECONDS = "seconds"
    TIME = "time"
    FLAG = "true or false"
    WORD = "word"
    NAME = "name"
    GPU_TYPE = "GPU type"
    TEXT = "text"
    SHAPES = "list of [GPU type, GPUs]"
    NODES = "list of nodes"
    JOB = "job"
    JOBS = "list of jobs"
    USER = "user"
    USERS = "list of users"
    SENTENCE = "sentence"
    REASON = "reason"
    REASONS = "list of reasons"

    @property
    def hideable(self) -> bool:
        """Whether the value may name another user's job; where that is private it is null."""
        return self in _HIDEABLE


_HIDEABLE = frozenset(
    (
        ParameterKind.JOB,
        ParameterKind.JOBS,
        ParameterKind.USER,
        ParameterKind.USERS,
        ParameterKind.SENTENCE,
    )
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a code.

    Attributes:
        unit: of a number, "" where there is none.
        optional: whether the value may be None.
        choices: the values of a word.
    """

    name: str
    kind: ParameterKind
    meaning: str
    unit: str = ""
    optional: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasonDefinition:
    """A code, its meaning in one line, and its parameters in the order in which they are shown."""

    code: str
    meaning: str
    parameters: tuple[Parameter, ...] = ()


def define(code: str, meaning: str, *parameters: Parameter) -> ReasonDefinition:
    """Return the definition of a code."""
    return ReasonDefinition(code, meaning, parameters)


def count(name: str, meaning: str, unit: str = "", *, optional: bool = False) -> Parameter:
    """Return a parameter that is a whole number."""
    return Parameter(name, ParameterKind.COUNT, meaning, unit, optional)


def number(name: str, meaning: str, unit: str = "", *, optional: bool = False) -> Parameter:
    """Return a parameter that is a number."""
    return Parameter(name, ParameterKind.NUMBER, meaning, unit, optional)


def fraction(name: str, meaning: str, *, optional: bool = False) -> Parameter:
    """Return a parameter that is a part of one: 0.25 is a quarter."""
    return Parameter(name, ParameterKind.FRACTION, meaning, "", optional)


def seconds(name: str, meaning: str, *, optional: bool = False) -> Parameter:
    """Return a parameter that is a duration in seconds."""
    return Parameter(name, ParameterKind.SECONDS, meaning, "s", optional)


def moment(name: str, meaning: str, *, optional: bool = False) -> Parameter:
    """Return a parameter that is a time (epoch s)."""
    return Parameter(name, ParameterKind.TIME, meaning, "epoch s", optional)


def word(name: str, meaning: str, *choices: str, optional: bool = False) -> Parameter:
    """Return a parameter that is one of a few words."""
    return Parameter(name, ParameterKind.WORD, meaning, "", optional, choices)


def text(name: str, meaning: str, *, optional: bool = False) -> Parameter:
    """Return a parameter in the words of Slurm, or of an error; it names no job."""
    return Parameter(name, ParameterKind.TEXT, meaning, "", optional)


GPUS = count("gpus", "GPUs", "GPUs")
GPU_TYPE = Parameter("gpu_type", ParameterKind.GPU_TYPE, 'type of the GPUs, "" for any')
GPU_PART = fraction("gpu_part", "part of its one GPU that it holds", optional=True)
NODES = Parameter("nodes", ParameterKind.NODES, "names of the nodes")
JOB = Parameter("job", ParameterKind.JOB, "id of the other job")
JOBS = Parameter("jobs", ParameterKind.JOBS, "ids of the other jobs")
USER = Parameter("user", ParameterKind.USER, "owner of the other job")
USERS = Parameter("users", ParameterKind.USERS, "their owners, in the same order")
SHAPES = Parameter("shapes", ParameterKind.SHAPES, "the possible sizes")
BECAUSE = Parameter("reason", ParameterKind.REASON, "the reason for that")
GAIN = fraction("gain", "relative gain of speed, 0.25 is a quarter faster")
UNTIL = moment("until", "when that ends")
