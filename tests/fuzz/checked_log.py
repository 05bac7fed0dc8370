"""Log that checks itself: each event of the program must be one printable line."""

from __future__ import annotations

from typing import Any

import structlog

from slurm_elastic.controller import daemon


class CheckedLog:
    """Log that checks its lines in place of selasticd's output; `lines` counts them."""

    def __init__(self) -> None:
        self.lines, self.last = 0, ""

    def msg(self, line: str) -> None:
        """Check one line."""
        self.lines, self.last = self.lines + 1, line
        assert line.isprintable(), f"a log line with control characters: {line!r}"
        assert len(line) < 10_000, f"a log line of {len(line)} characters"

    info = warning = error = debug = msg


LOG = CheckedLog()


def quiet() -> Any:
    """Send the program's log through selasticd's own rendering into `LOG`; return a logger."""
    structlog.configure(
        processors=[structlog.stdlib.add_log_level, daemon._line],
        logger_factory=lambda *_: LOG,
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger("selasticd")


def loud() -> None:
    """Restore structlog's defaults."""
    structlog.reset_defaults()
