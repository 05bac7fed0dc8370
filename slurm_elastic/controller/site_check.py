"""`selastic check`: settings of a site that harm elastic jobs, and their remedies.

Pure: the caller gathers `Facts` (`slurm_elastic.slurm.slurm_settings`, the controller's
answer to `check`). Every finding states the harm and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slurm_elastic import __version__
from slurm_elastic.config.schema import Config
from slurm_elastic.controller import slurm_settings_check
from slurm_elastic.controller.site_findings import SEVERITIES, Facts, Finding, FindingList
from slurm_elastic.rpc.answers import CheckAnswer
from slurm_elastic.slurm.release_rules import Release

#: Associations and QOS that one line names.
_MOST_NAMED = 3

#: Hosts of addresses that mean the host on which they are used.
_THIS_HOST = frozenset({"localhost", "127.0.0.1", "::1"})


def check(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings, the worst first."""
    findings = FindingList()
    for look in _LOOKS:
        if facts.site.settings or look in _WITHOUT_SLURM:
            look(facts, findings)
    return tuple(sorted(findings.items, key=lambda f: SEVERITIES.index(f.severity)))


def _reachable(facts: Facts, findings: FindingList) -> None:
    if facts.site.error:
        findings.error(
            "slurmctld", f"cannot be asked ({facts.site.error})", "run this where scontrol works"
        )
    if facts.munge_error:
        findings.error(
            "munge", f"does not work here ({facts.munge_error})", "systemctl start munge"
        )
    if facts.controller_error:
        findings.warning(
            "selasticd", f"does not answer ({facts.controller_error})", "systemctl status selasticd"
        )


def _configuration(facts: Facts, findings: FindingList) -> None:
    if facts.config_error:
        findings.error(
            "elastic.toml",
            f"cannot be used ({facts.config_error})",
            "mend it, then `selastic reconfigure`",
        )
    config = facts.config
    if config is None and not facts.config_error:
        findings.warning(
            "elastic.toml",
            "is missing on this host, defaults hold: mode = observe, controller = localhost",
            "selastic config > /etc/slurm-elastic/elastic.toml",
        )
    if config is None:
        return
    hosts = {(a.rpartition(":")[0] or a).strip("[]") for a in config.api.addresses}
    if hosts <= _THIS_HOST:
        findings.warning(
            f'[api] controller = "{config.api.controller}"',
            "is this host only: jobs on other hosts do not find the controller and keep their size",
            "name the controller's host, in the elastic.toml of all hosts",
        )
    policy = config.controller.policy
    if facts.policies and policy not in facts.policies:
        findings.error(
            f'policy = "{policy}"',
            "is unknown, selasticd will not start",
            f"choose one of {', '.join(facts.policies)}",
        )
    if facts.solver_error:
        # A controller that answers has loaded its solver, maybe on another host.
        severity = findings.error if facts.controller is None else findings.warning
        severity(
            f'[sia] solver = "{config.sia.solver}"',
            f"cannot be used on this host ({facts.solver_error}): with the policies sia,"
            " icefrog and goodput selasticd does not start here",
            'install it where selasticd runs, or write solver = "highs"',
        )
    gres_types = facts.site.settings.get("GresTypes", "").split(",")
    if config.neighbours.share_gpus == "act" and facts.site.settings and "shard" not in gres_types:
        findings.warning(
            'share_gpus = "act"',
            "has no effect: no GPU has shards",
            "add shard to GresTypes, and an even number of shards per GPU to Gres, in slurm.conf"
            " and gres.conf",
        )
    if config.resize.min_interval_s < 2 * config.resize.restart_s:
        findings.warning(
            f"min_interval_s = {config.resize.min_interval_s:g}",
            "lets a job spend most of its time restarting",
            f"set it to {20 * config.resize.restart_s:g} or more",
        )


def _versions(facts: Facts, findings: FindingList) -> None:
    answer = facts.controller
    slurm = facts.site.settings.get("SLURM_VERSION", "")
    if answer is None:
        return
    if answer.get("version", __version__) != __version__:
        findings.warning(
            f"slurm-elastic {__version__}",
            f"differs from the controller's {answer['version']}",
            "install the same release on both",
        )
    _reading(answer, Release.parse(slurm), findings)
    for problem in answer.get("problems", ()):
        harm, _, remedy = problem.rpartition("; ")
        findings.warning(
            "selasticd", f"reports: {harm or problem}", remedy if harm else "see its log"
        )


def _reading(answer: CheckAnswer, release: Release | None, findings: FindingList) -> None:
    """Report how the controller reads slurmctld."""
    reader, pyslurm = answer.get("reader", ""), answer.get("pyslurm")
    series = release.series if release else "of the same release"
    if reader.startswith("json"):
        findings.info(
            "selasticd",
            f"reads slurmctld through {reader}, which costs more time than pyslurm",
            f"install pyslurm {series} beside it, or do nothing",
        )
    elif reader:
        return
    elif pyslurm == "":  # a controller of 0.1, which reads through pyslurm only
        findings.error(
            "pyslurm", "is missing beside selasticd, it sees no jobs", f"install pyslurm {series}"
        )
    elif pyslurm and release and not release.fits(pyslurm):
        findings.error(
            f"pyslurm {pyslurm}",
            f"does not fit Slurm {release}, reads fail",
            f"install pyslurm {series}",
        )


def _rights(facts: Facts, findings: FindingList) -> None:
    level = facts.site.admin_level
    answer: Mapping[str, Any] = facts.controller or {}
    account = answer.get("account") or "selastic"
    acts = facts.config is None or facts.config.controller.mode == "act"
    switches = facts.config is not None and facts.config.sleep.mode == "act" and acts
    needed = "Administrator" if switches else "Operator"
    grant = f"sacctmgr modify user {account} set adminlevel={needed}"
    if level == "None" and acts:
        findings.error(f"account {account}", "is no Operator, Slurm refuses all it does", grant)
    elif level == "None":
        findings.warning(f"account {account}", "is no Operator, mode = act would not work", grant)
    elif level == "" and account not in (
        "root",
        facts.site.settings.get("SlurmUser", "").split("(")[0],
    ):
        findings.warning(
            f"account {account}",
            "is unknown to slurmdbd (or slurmdbd does not answer)",
            f"sacctmgr add user {account} account=root adminlevel=Operator",
        )
    elif level == "Operator" and switches:
        findings.error(
            f"account {account}",
            "is no Administrator, Slurm lets no Operator switch nodes off and on",
            f'{grant}, or [sleep] mode = "observe"',
        )
    elif level == "Administrator" and not switches:
        findings.info(f"account {account}", "has more rights than it needs", grant)
    private = facts.site.settings.get("PrivateData", "").split(",")
    if "jobs" in private:
        findings.info(
            "PrivateData=jobs",
            "is obeyed: users see only their own jobs in selastic",
            "nothing to do",
        )


def _companions(facts: Facts, findings: FindingList) -> None:
    """Report where jobs cannot get companions, and every change is a requeue."""
    if (facts.config or Config()).resize.in_place == "never":
        return
    for partition in facts.site.closed_partitions:
        findings.info(
            f"AllocNodes of partition {partition}",
            "leaves out its own nodes, jobs there get no companions and every change is a requeue",
            "add the nodes to AllocNodes, or do nothing",
        )
    if single := facts.site.single_submits:
        more = f" and {len(single) - _MOST_NAMED} more" if len(single) > _MOST_NAMED else ""
        findings.info(
            f"MaxSubmitJobs=1 of {', '.join(single[:_MOST_NAMED])}{more}",
            "leaves no room for companions, every change of jobs there is a requeue",
            "allow more jobs, or do nothing",
        )


_LOOKS: tuple[Callable[[Facts, FindingList], None], ...] = (
    _reachable,
    _configuration,
    slurm_settings_check.check_release,
    _versions,
    slurm_settings_check.check_plugin,
    slurm_settings_check.check_gpus,
    slurm_settings_check.check_saving,
    slurm_settings_check.check_requeueing,
    slurm_settings_check.check_scheduling,
    slurm_settings_check.check_power_saving,
    _companions,
    _rights,
)
_WITHOUT_SLURM = (_reachable, _configuration)


def lines(findings: tuple[Finding, ...]) -> Iterator[str]:
    """Return the findings as printed: severity and text."""
    for finding in findings:
        yield f"{finding.severity}: {finding}"
