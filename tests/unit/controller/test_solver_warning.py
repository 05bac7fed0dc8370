"""The warning that HiGHS decided a round in place of the configured solver."""

from slurm_elastic.cli.reason_text import sentence
from slurm_elastic.controller.solver_warning import SolverWarning


class FakeLog:
    def __init__(self):
        self.lines = []

    def warning(self, text):
        self.lines.append(text)


def state(at, error="CBC failed"):
    return {"policy": {"solver_fallback": {"time": at, "error": error}}}


def test_it_is_logged_once_and_shown_for_each_such_round():
    log = FakeLog()
    warning = SolverWarning("pulp:CBC", log)
    assert warning.note({}, 10.0) is None
    note = warning.note(state(20.0), 20.0)
    assert sentence(note) == "HiGHS decided the last round in place of pulp:CBC: CBC failed"
    assert warning.note(state(20.0), 30.0) is None
    assert warning.note(state(40.0, "CBC hung"), 40.0) is not None
    assert log.lines == [
        "CBC failed; HiGHS decides such rounds (further ones are not logged) Solver=pulp:CBC"
    ]
