"""The kind of training in a configuration file of accelerate."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MAX_BYTES = 65536


def distributed_type(path: str | None) -> str:
    """Return the `distributed_type` of accelerate's configuration; "" without one.

    Args:
        path: of the file; None for that of `accelerate config`.
    """
    files = [Path(path)] if path else [_default_folder() / f"default_config.{e}" for e in _ENDINGS]
    for file in files:
        try:
            with file.open("rb") as stream:
                text = stream.read(_MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        found = re.search(r"distributed_type[\"']?\s*:\s*[\"']?(\w+)", text)
        return found[1] if found else ""
    return ""


_ENDINGS = ("yaml", "json")


def _default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "accelerate"
