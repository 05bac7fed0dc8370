"""Exit codes of `selastic`, and the error that ends a command with one line."""

from __future__ import annotations

from slurm_elastic.core.errors import SlurmElasticError

#: Refused by the controller, failed, or done for some of the jobs only.
REFUSED = 1
#: The command line is wrong.
USAGE = 2
#: The controller does not answer.
SILENT = 3


class CliError(SlurmElasticError):
    """Failure that ends the command; its text follows `selastic: ` on stderr.

    Attributes:
        exit_code: one of the codes above.
    """

    def __init__(self, text: str, exit_code: int = REFUSED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
