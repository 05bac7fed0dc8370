"""Facts about a site, and the findings of `selastic check` about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_elastic.config.schema import Config
from slurm_elastic.rpc.answers import CheckAnswer
from slurm_elastic.slurm.slurm_settings import SlurmSite

#: `error`: elastic jobs do not work or lose state; `warning`: harm in some cases;
#: `info`: no harm.
SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of `selastic check`; `subject` names the setting, e.g. `KillWait=30`."""

    severity: str
    subject: str
    harm: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject} {self.harm}: {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Settings and answers that are checked.

    Attributes:
        site: Slurm's side.
        config: the site's elastic.toml; None: missing, or it cannot be used.
        config_error: why it cannot be used, "" when it can or is missing.
        solver_error: why the configured solver cannot be used on this host, "" when it can.
        policies: names of the installed policies; empty: not checked.
        munge_error: why munge does not work on this host, "" when it does.
        controller: its answer, None when it does not answer.
        controller_error: why it does not.
    """

    site: SlurmSite
    config: Config | None = None
    config_error: str = ""
    solver_error: str = ""
    policies: tuple[str, ...] = ()
    munge_error: str = ""
    controller: CheckAnswer | None = None
    controller_error: str = ""


@dataclass
class FindingList:
    """Findings so far, in the order in which they were made."""

    items: list[Finding] = field(default_factory=list)

    def error(self, subject: str, harm: str, remedy: str) -> None:
        """Add an error; arguments as of `Finding`."""
        self.items.append(Finding(severity="error", subject=subject, harm=harm, remedy=remedy))

    def warning(self, subject: str, harm: str, remedy: str) -> None:
        """Add a warning; arguments as of `Finding`."""
        self.items.append(Finding(severity="warning", subject=subject, harm=harm, remedy=remedy))

    def info(self, subject: str, harm: str, remedy: str) -> None:
        """Add a note; arguments as of `Finding`."""
        self.items.append(Finding(severity="info", subject=subject, harm=harm, remedy=remedy))
