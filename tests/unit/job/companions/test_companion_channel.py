"""The connection between the script of a companion and esrun: proofs and lines."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_elastic.job.companions import companion_channel
from slurm_elastic.job.companions.companion_channel import (
    CompanionChannel,
    CompanionChannelError,
    CompanionPlace,
    prove_to_companion,
    prove_to_esrun,
)

PLACE = CompanionPlace("g02", 8, 2)


Ends = tuple[CompanionChannel, CompanionChannel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Yield the channels of a script and of esrun, and the socket of the script."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    yield CompanionChannel(ours), CompanionChannel(theirs), ours
    ours.close()
    theirs.close()


def handshake(ends: Ends, secret_of_script: str, secret_of_esrun: str) -> tuple[Any, Any]:
    """Return the outcome of the handshake on both sides: a result or an error."""
    script, esrun, _ = ends
    results: dict[str, Any] = {}

    def serve() -> None:
        try:
            results["esrun"] = prove_to_companion(esrun, secret_of_esrun)
            esrun.send(mark="a mark")
        except CompanionChannelError as error:
            results["esrun"] = error
            esrun.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        results["script"] = prove_to_esrun(script, secret_of_script, 4712, PLACE)
    except CompanionChannelError as error:
        results["script"] = error
    script.close()
    thread.join()
    return results["script"], results["esrun"]


def test_both_sides_prove_themselves(ends: Ends) -> None:
    assert handshake(ends, "s3cret", "s3cret") == ("a mark", (4712, PLACE))


def test_an_esrun_without_the_secret_is_left(ends: Ends) -> None:
    of_script, of_esrun = handshake(ends, "s3cret", "another")
    assert "does not have the secret" in str(of_script)
    assert isinstance(of_esrun, CompanionChannelError)


def test_a_script_that_only_repeats_what_it_hears_is_refused(ends: Ends) -> None:
    script, esrun, _ = ends
    errors: list[str] = []

    def serve() -> None:
        with pytest.raises(CompanionChannelError) as caught:
            prove_to_companion(esrun, "s3cret")
        errors.append(str(caught.value))

    thread = threading.Thread(target=serve)
    thread.start()
    script.send(companion=4712, nonce="ab")
    answer = script.receive(10)
    assert answer is not None
    script.send(proof=answer["proof"], place=PLACE._asdict())
    thread.join()
    assert errors == ["the other side does not have the secret"]


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n", b"[]\n", b'{"companion": "4711", "nonce": "a"}\n', b'{"companion": true}\n',
        b'{"companion": 4711, "nonce": 3}\n', b"x" * 20000, b'{"companion": 4711}\n', b"[" * 9000,
    ],
)  # fmt: skip
def test_hostile_first_lines_end_the_connection(ends: Ends, line: bytes) -> None:
    _, esrun, ours = ends
    ours.sendall(line)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(CompanionChannelError):
        prove_to_companion(esrun, "s3cret")


@pytest.mark.parametrize(
    "place", [None, [], {"node": "", "cpus": 1, "gpus": 1}, {"node": "g01", "cpus": -1, "gpus": 1},
              {"node": "g01", "cpus": "1", "gpus": 1}, {"node": "g" * 300, "cpus": 1, "gpus": 1}],
)  # fmt: skip
def test_an_invalid_place_is_refused(place: object) -> None:
    with pytest.raises(CompanionChannelError, match="place"):
        CompanionPlace.from_wire(place)


def test_a_peer_that_says_nothing_is_left(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion_channel, "HANDSHAKE_S", 0.1)
    _, esrun, _ = ends
    with pytest.raises(CompanionChannelError, match="does not answer"):
        prove_to_companion(esrun, "s3cret")


def test_lines_that_come_in_pieces_and_together(ends: Ends) -> None:
    _, reader, theirs = ends
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert reader.receive(10) == {"a": 1}
    assert reader.receive(0.05) is None
    theirs.sendall(b": 2}\n")
    assert reader.receive(10) == {"b": 2}


def test_the_place_is_what_slurm_says() -> None:
    env = {"SLURMD_NODENAME": "g03", "SLURM_JOB_CPUS_PER_NODE": "6(x1)", "SLURM_GPUS_ON_NODE": "3"}
    assert CompanionPlace.from_environment(env) == CompanionPlace("g03", 6, 3)
