"""Rows of a report: one value that was checked or measured.

A part appends rows to a file as it goes, so that those of a part that is killed are kept.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

OK, WRONG, MEASURED, NOT_RUN = "ok", "WRONG", "measured", "not run"


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One value of a report.

    Attributes:
        what: the quantity that has the value.
        state: `OK` or `WRONG` for a check, `MEASURED` for a value that nothing is expected of,
            `NOT_RUN` with the reason as `value`.
        value: a number or a text.
        unit: of a number.
        expected: of a check.
    """

    what: str
    state: str
    value: float | str
    unit: str = ""
    expected: str = ""


class RowWriter:
    """Rows of one part.

    Args:
        path: of the file; rows are appended.
        checks_times: whether values of `timed` are checked, or only recorded. On a CPU that others
            use too, times say nothing.
    """

    def __init__(self, path: Path, *, checks_times: bool) -> None:
        self._path, self._checks_times = path, checks_times

    def measured(self, what: str, value: float | str, unit: str = "") -> None:
        """Record a value that nothing is expected of."""
        self._write(ReportRow(what, MEASURED, value, unit))

    def check(
        self, what: str, value: float | str, *, ok: bool, expected: str, unit: str = ""
    ) -> None:
        """Record a value and whether it is as expected."""
        self._write(ReportRow(what, OK if ok else WRONG, value, unit, expected))

    def at_most(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """Check that a value is not above a limit; NaN is."""
        self.check(what, value, ok=value <= limit, expected=f"at most {limit:g}", unit=unit)

    def timed(
        self, what: str, value: float, low: float, high: float, unit: str = "", *, note: str = ""
    ) -> None:
        """Check that a value that depends on times is within two limits."""
        if self._checks_times:
            expected = f"{low:.3g} to {high:.3g}" + (f" ({note})" if note else "")
            self.check(what, value, ok=low <= value <= high, expected=expected, unit=unit)
        else:
            self.measured(what + (f" ({note})" if note else ""), value, unit)

    def not_run(self, what: str, reason: str) -> None:
        """Record what could not be tried here."""
        self._write(ReportRow(what, NOT_RUN, reason))

    @contextlib.contextmanager
    def trial(self, what: str) -> Iterator[None]:
        """Run a block; if it fails, record that as a row, and go on behind the block."""
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the next trial is to run
            sys.stderr.write(f"{what}: {error}\n")
            self.check(what, _last_line(str(error)) or repr(error), ok=False, expected="no error")

    def _write(self, row: ReportRow) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> tuple[ReportRow, ...]:
    """Read the rows of a part; a line that a killed part did not finish is left out."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                rows.append(ReportRow(**json.loads(line)))
    return tuple(rows)


def _last_line(text: str) -> str:
    """Return the last line, which in the output of ranks names the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("slurm-elastic:")]
    return (errors or lines or [""])[-1][:300]
