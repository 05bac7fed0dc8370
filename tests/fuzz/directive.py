"""Directives: Lua and Python must accept, refuse and read the same texts."""

import time
from itertools import zip_longest

from tests.fuzz.grammar import Directives
from tests.fuzz.tally import MOST_CRASHES, Tally
from tests.support.directives import read_in_lua, read_in_python

BATCH = 5000


def run(seconds: float, seed: int, *, batch: int = BATCH) -> Tally:
    """Try inputs for so long; a difference ends its batch."""
    tally = Tally()
    supply = Directives(seed)
    end = time.monotonic() + seconds
    while not tally.inputs or (time.monotonic() < end and len(tally.crashes) < MOST_CRASHES):
        texts = [supply.one() for _ in range(batch)]
        tally.inputs += batch
        try:
            tally.notes["accepted"] += compare(texts)
        except AssertionError as error:
            tally.crashes.append(f"{error!s:.2000}")
    return tally


def compare(texts: list[bytes]) -> int:
    """Compare the answers of Lua and Python; return how many texts were accepted."""
    accepted = 0
    for text, in_lua in zip_longest(texts, read_in_lua(texts)):
        in_python = read_in_python(text.decode("utf-8", "surrogateescape"))
        assert in_lua == in_python, f"{text!r}: Lua {in_lua!r}, Python {in_python!r}"
        accepted += in_python.startswith("ok\t")
    return accepted
