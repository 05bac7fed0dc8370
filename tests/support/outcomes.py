"""What became of each test, for the end of a run: a pytest plugin and the lines that it prints.

`--outcomes FILE` writes the outcomes down instead, for tests/run.py, which joins several runs.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.support import needs


@dataclass
class Outcome:
    """Result of one test.

    Args:
        test: its id, as on pytest's command line.
        result: passed, failed or skipped; an error in a fixture is a failure.
        seconds: of the test and of the fixtures that were set up for it.
        reason: why it was skipped, or the last line of its failure.
    """

    test: str
    result: str = "passed"
    seconds: float = 0.0
    reason: str = ""


class Recorder:
    """Outcomes of the tests of one run; with pytest-xdist, of all its workers."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self.outcomes.setdefault(report.nodeid, Outcome(report.nodeid))
        outcome.seconds += report.duration
        self._judge(outcome, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._judge(self.outcomes.setdefault(report.nodeid, Outcome(report.nodeid)), report)

    @staticmethod
    def _judge(outcome: Outcome, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            outcome.result, outcome.reason = "failed", last_line(report)
        elif report.skipped and outcome.result == "passed":
            outcome.result = "skipped"
            place = report.longrepr
            outcome.reason = place[2].removeprefix("Skipped: ") if isinstance(place, tuple) else ""


class Writer(Recorder):
    """Recorder that names each failure at once, and writes a file when the run ends."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        super().__init__()
        self.path, self._config = path, config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line("")
            terminal.write_line(f"failed: {report.nodeid}: {last_line(report)}", red=True)

    def pytest_sessionfinish(self) -> None:
        lines = (json.dumps(asdict(outcome)) for outcome in self.outcomes.values())
        self.path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


class Printer(Recorder):
    """Recorder that names at the end of the run what tests lacked."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, None, None]:
        yield  # pytest's own summary
        for line in lacking(self.outcomes.values()):
            terminalreporter.write_line(line, yellow=True)


def read(path: Path) -> list[Outcome]:
    """Return the outcomes that a run has written down; none if it did not get so far."""
    if not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def lacking(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield the lines that name what tests lacked, and what brings it here."""
    return needs.summary((o.test, o.reason) for o in outcomes if o.result == "skipped")


def last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the line that says what failed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[0] if crash else lines[-1]) if lines else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="write each test's outcome here")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # the reports of a worker of pytest-xdist come to its controller
    path = config.getoption("--outcomes")
    config.pluginmanager.register(Writer(path, config) if path else Printer(), "outcomes")
