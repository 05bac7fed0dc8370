"""Operations of the socket: what clients build is what the server reads."""

import doctest
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.report import Report
from slurm_elastic.rpc import protocol, requests
from slurm_elastic.rpc.protocol import CODES, RequestError
from slurm_elastic.rpc.requests import OPERATIONS, build, read

REPORT = Report(job_id=4711, run=0, phase="training")
#: A value of each argument, and one that is refused.
VALUES = {
    "report": (REPORT.to_wire(), {"job_id": 4711}),
    "job_id": (4711, -1),
    "run": (0, 2**32),
    "seen": (7, "7"),
    "wait_s": (25.0, float("nan")),
    "all": (True, 1),
    "jobs": (["4711", "4712_3"], ["all"]),
    "user": ("alice", "a\nb"),
    "start": (1.7e9, float("inf")),
    "end": (1.8e9, 10**400),
    "runs": (True, "yes"),
    "program": (True, "yes"),
    "dry_run": (True, "no"),
    "elastic": ("1-8", ["1-8"]),
    "layout": ("auto", 4),
    "since": ({"jobs": 0.0}, []),
    "name": ("net", ["net"]),
    "gpus": (2, -1),
    "partition": ("gpu", 1),
    "limit_s": (3600.0, -1.0),
}


def values(operation):
    """A sound value and an unsound one of each argument of an operation."""
    found = {a.name: VALUES.get(a.name, ({"a": 1}, [])) for a in operation.arguments}
    if operation.name == "show":
        found["profile"] = (True, 1)
    return found


@pytest.mark.parametrize("module", [protocol, requests])
def test_the_examples_in_the_docstrings(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("op", OPERATIONS)
def test_what_clients_build_is_what_the_server_reads(op):
    sound = {name: pair[0] for name, pair in values(OPERATIONS[op]).items()}
    operation, arguments = read(build(op, **sound))
    assert operation is OPERATIONS[op]
    assert arguments == sound | ({"report": REPORT} if op == "report" else {})


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_unsound_argument_is_refused_in_one_line_that_names_it(op):
    pairs = values(OPERATIONS[op])
    sound = {name: pair[0] for name, pair in pairs.items()}
    for name, (_, unsound) in pairs.items():
        with pytest.raises(RequestError) as refusal:
            read(build(op, **{**sound, name: unsound}))
        assert refusal.value.code == "malformed"
        assert "\n" not in str(refusal.value)
        assert name in str(refusal.value) or name in ("report", "jobs")


@pytest.mark.parametrize("op", OPERATIONS)
def test_absent_arguments_have_their_default_or_are_named(op):
    required = [a.name for a in OPERATIONS[op].arguments if a.required]
    if required:
        with pytest.raises(RequestError):
            read(build(op))
        return
    nothing = {a.name: None for a in OPERATIONS[op].arguments}
    for request in (build(op), build(op) | nothing):
        _, arguments = read(request)
        assert arguments == {
            a.name: a.default for a in OPERATIONS[op].arguments if a.default is not None
        }


def test_an_optional_argument_that_is_null_has_its_default():
    _, arguments = read({"v": 2, "op": "orders", "job_id": 7, "run": 0, "wait_s": None})
    assert arguments["wait_s"] == 0


def test_clients_cannot_build_what_is_not_defined():
    with pytest.raises(ValueError, match="operation 'rm' is unknown; known: ping"):
        build("rm")
    with pytest.raises(ValueError, match="status has no argument jobs"):
        build("status", jobs=["1"])


def test_fields_of_newer_clients_are_ignored():
    operation, arguments = read({"v": 2, "op": "plan", "colour": "blue", "job_ids": [4711]})
    assert (operation.name, arguments) == ("plan", {})


def test_each_answer_is_a_typed_dict():
    assert all(typing.is_typeddict(o.answer_type()) for o in OPERATIONS.values())


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.floats()))
def test_only_whole_numbers_of_known_versions_are_answered(version):
    if type(version) is int and version in protocol.answered():
        protocol.check_version(version, release="0.1.0")
        return
    with pytest.raises(RequestError, match="install the same release") as refusal:
        protocol.check_version(version, release="0.1.0")
    assert refusal.value.code == "version"
    assert refusal.value.code in CODES


def test_an_operation_is_answered_since_it_has_its_form():
    protocol.check_version(2, release="0.2.0", since=2, present=3)
    with pytest.raises(RequestError, match=r"^protocol 2 is invalid: .* expects 3;"):
        protocol.check_version(2, release="0.2.0", since=3, present=3)
