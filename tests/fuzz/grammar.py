"""Directives as bytes, drawn from a seed: valid, nearly valid and hostile ones."""

import random
import tomllib
from pathlib import Path
from typing import Any

from slurm_elastic.core import directive_grammar

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "data" / "directives.toml"

KEYS = (*directive_grammar.KEYS, "tpyes", "UNIT")
NAMES = ("a100", "v100", "h100", "a", "A100", "mig", "MIG-1g", "1g.5gb", "a100_3g.20gb", "x" * 99)
NUMBERS = (
    *("1", "2", "3", "4", "8", "16", "64", "007", "0", "00", "65536", "65537", "86400", "86401"),
    *(
        "1000000000",
        "1000000001",
        "4294967296",
        "9223372036854775808",
        "1e3",
        "0x10",
        "-1",
        "9" * 99,
    ),
)
PERCENTS = ("0%", "0.5%", "100%", "100.0001%", "0.00001%", "1.", ".5%", "5", "%", "1.2.3%", "5%%")
MODES = ("data", "pipeline", "hybrid", "spatial", "off", "auto", "on", "Data", "", "own")
#: Longest text made.
MAX_BYTES = 8000
BREAKERS = (
    *(b"\n", b"\t", b" ", b"\x1b[31m", b"\x7f", b"\xff", b"\xc3\xa9", b"%s", b"%n", b"%1", b"%"),
    *(
        b"[",
        b"]",
        b"^",
        b"$",
        b"\\",
        b'"',
        b"'",
        b";",
        b"`id`",
        b"$(id)",
        b",,",
        b"==",
        b"--",
        b":",
    ),
)


def examples() -> list[bytes]:
    """Return every example of tests/data/directives.toml that a command line can carry."""
    table = tomllib.loads(EXAMPLES.read_text("utf-8"))
    texts = [_octets(row) for row in table["valid"] + table["invalid"]]
    return [text for text in texts if b"\0" not in text]


def _octets(row: dict[str, Any]) -> bytes:
    if "hex" in row:
        return bytes.fromhex(row["hex"])
    if "repeat" in row:
        return str(row["repeat"][0] * row["repeat"][1]).encode()
    return str(row["text"]).encode()


class Directives:
    """Endless sequence of directives.

    Args:
        seed: what they are made from.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.examples = examples()

    def one(self) -> bytes:
        """Return the next directive, without zero bytes, which no argument can hold."""
        draw = self.random
        kind = draw.randrange(10)
        if kind < 5:
            text = self._sound()
        elif kind < 7:
            text = draw.choice(self.examples)
        elif kind < 8:
            text = draw.randbytes(draw.choice((1, 3, 10, 255, 256, 257, 300, 2000)))
        else:
            text = b",".join(self._item() for _ in range(draw.randrange(1, 30)))
        for _ in range(draw.choice((0, 0, 0, 1, 1, 2, 5))):
            text = self._mutated(text)
        return text.replace(b"\0", b"0")[:MAX_BYTES]

    def _sound(self) -> bytes:
        draw = self.random
        unit = draw.choice((1, 1, 2, 4, 8))
        low = unit * draw.randrange(1, 9)
        high = low + unit * draw.randrange(0, 9)
        items = (
            "types=a100:v100",
            f"batch={draw.randrange(1, 99)}-{draw.randrange(99, 9999)}",
            "parallel=" + draw.choice(MODES[:3]),
            "freeze=" + draw.choice(MODES[3:5]),
            f"max-penalty={draw.randrange(100)}.{draw.randrange(9999)}%",
            f"notice={draw.randrange(1, 86400)}",
            draw.choice((f"unit={unit}", f"unit=a100:{unit}/v100:{2 * unit}")),
            "sizes=" + ":".join(map(str, self._sizes(low, high, unit))),
            "in-place=" + draw.choice(("auto", "never")),
            "plan=" + draw.choice(("own", "auto")),
        )
        words = [f"{low}-{high}", *draw.sample(items, draw.randrange(0, 9))]
        return ",".join(words).encode()

    def _sizes(self, low: int, high: int, unit: int) -> list[int]:
        """Return sizes in any order; one in three lists has some that are not allowed."""
        draw = self.random
        count = draw.randrange(1, 7)
        if draw.randrange(3):
            legal = range(low, high + 1, unit)
            return draw.sample(legal, min(count, len(legal)))
        return [draw.randrange(1, high + 3) for _ in range(count)]

    def _item(self) -> bytes:
        draw = self.random
        values = [draw.choice(NAMES + NUMBERS + PERCENTS + MODES) for _ in range(draw.randrange(4))]
        return (draw.choice(KEYS) + "=" + draw.choice(":/-,.%").join(values)).encode()

    def _mutated(self, text: bytes) -> bytes:
        draw = self.random
        at, end = sorted((draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)))
        match draw.randrange(6):
            case 0:
                return text[:at] + draw.choice(BREAKERS) + text[at:]
            case 1:
                return text[:at] + text[end:]
            case 2:
                return text[:at] + draw.randbytes(1) + text[at + 1 :]
            case 3:
                return text[:end] + text[at:]
            case 4:
                return text[:at] + draw.choice(NUMBERS).encode() + text[at:]
            case _:
                return text[:at] + draw.choice(self.examples)[at:]
