"""Valid and invalid directives that all their readers are tested with (tests/data)."""

import tomllib
from pathlib import Path
from typing import Any

DIRECTIVES: dict[str, list[dict[str, Any]]] = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "directives.toml").read_text("utf-8")
)


def octets(row: dict[str, Any]) -> bytes:
    """Return the directive of a row, as a user would type it."""
    if "hex" in row:
        return bytes.fromhex(row["hex"])
    if "repeat" in row:
        return (row["repeat"][0] * row["repeat"][1]).encode()
    return bytes(row["text"], "utf-8")
