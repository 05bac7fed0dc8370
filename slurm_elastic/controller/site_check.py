"""`selastic check`: settings of a site that harm elastic jobs, and their remedies.

Pure: the caller gathers `Facts` (`slurm_elastic.slurm.slurm_settings`, the controller's
answer to `check`). Every finding states the harm and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic import __version__
from slurm_elastic.config.schema import Config
from slurm_elastic.rpc.answers import CheckAnswer
from slurm_elastic.slurm.release_rules import Release
from slurm_elastic.slurm.slurm_settings import SlurmSite, options, seconds

#: `error`: elastic jobs do not work or lose state; `warning`: harm in some cases;
#: `info`: no harm.
SEVERITIES = ("error", "warning", "info")

#: cred_expire must outlast a transition: until then Slurm leaves a requeued job alone.
_CREDENTIAL_S = (60.0, 600.0)

#: Topologies that are read, or that are none.
_TOPOLOGIES = ("", *(f"topology/{t}" for t in ("block", "default", "flat", "none", "tree")))

_DOC = "docs/install.md"

#: Associations and QOS that one line names.
_MOST_NAMED = 3

#: Hosts of addresses that mean the host on which they are used.
_THIS_HOST = frozenset({"localhost", "127.0.0.1", "::1"})


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
class _Report:
    findings: list[Finding] = field(default_factory=list)

    def error(self, subject: str, harm: str, remedy: str) -> None:
        self.findings.append(Finding(severity="error", subject=subject, harm=harm, remedy=remedy))

    def warning(self, subject: str, harm: str, remedy: str) -> None:
        self.findings.append(Finding(severity="warning", subject=subject, harm=harm, remedy=remedy))

    def info(self, subject: str, harm: str, remedy: str) -> None:
        self.findings.append(Finding(severity="info", subject=subject, harm=harm, remedy=remedy))


def check(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings, the worst first."""
    report = _Report()
    for look in _LOOKS:
        if facts.site.settings or look in _WITHOUT_SLURM:
            look(facts, report)
    return tuple(sorted(report.findings, key=lambda f: SEVERITIES.index(f.severity)))


def _reachable(facts: Facts, report: _Report) -> None:
    if facts.site.error:
        report.error(
            "slurmctld", f"cannot be asked ({facts.site.error})", "run this where scontrol works"
        )
    if facts.munge_error:
        report.error("munge", f"does not work here ({facts.munge_error})", "systemctl start munge")
    if facts.controller_error:
        report.warning(
            "selasticd", f"does not answer ({facts.controller_error})", "systemctl status selasticd"
        )


def _configuration(facts: Facts, report: _Report) -> None:
    if facts.config_error:
        report.error(
            "elastic.toml",
            f"cannot be used ({facts.config_error})",
            "mend it, then `selastic reconfigure`",
        )
    config = facts.config
    if config is None and not facts.config_error:
        report.warning(
            "elastic.toml",
            "is missing on this host, defaults hold: mode = observe, controller = localhost",
            "selastic config > /etc/slurm-elastic/elastic.toml",
        )
    if config is None:
        return
    hosts = {(a.rpartition(":")[0] or a).strip("[]") for a in config.api.addresses}
    if hosts <= _THIS_HOST:
        report.warning(
            f'[api] controller = "{config.api.controller}"',
            "is this host only: jobs on other hosts do not find the controller and keep their size",
            "name the controller's host, in the elastic.toml of all hosts",
        )
    policy = config.controller.policy
    if facts.policies and policy not in facts.policies:
        report.error(
            f'policy = "{policy}"',
            "is unknown, selasticd will not start",
            f"choose one of {', '.join(facts.policies)}",
        )
    if facts.solver_error:
        # A controller that answers has loaded its solver, maybe on another host.
        severity = report.error if facts.controller is None else report.warning
        severity(
            f'[sia] solver = "{config.sia.solver}"',
            f"cannot be used on this host ({facts.solver_error}): with the policies sia,"
            " icefrog and goodput selasticd does not start here",
            'install it where selasticd runs, or write solver = "highs"',
        )
    if config.resize.min_interval_s < 2 * config.resize.restart_s:
        report.warning(
            f"min_interval_s = {config.resize.min_interval_s:g}",
            "lets a job spend most of its time restarting",
            f"set it to {20 * config.resize.restart_s:g} or more",
        )


def _versions(facts: Facts, report: _Report) -> None:
    answer = facts.controller
    slurm = facts.site.settings.get("SLURM_VERSION", "")
    if answer is None:
        return
    if answer.get("version", __version__) != __version__:
        report.warning(
            f"slurm-elastic {__version__}",
            f"differs from the controller's {answer['version']}",
            "install the same release on both",
        )
    _reading(answer, Release.parse(slurm), report)
    for problem in answer.get("problems", ()):
        harm, _, remedy = problem.rpartition("; ")
        report.warning(
            "selasticd", f"reports: {harm or problem}", remedy if harm else "see its log"
        )


def _reading(answer: CheckAnswer, release: Release | None, report: _Report) -> None:
    """Report how the controller reads slurmctld."""
    reader, pyslurm = answer.get("reader", ""), answer.get("pyslurm")
    series = release.series if release else "of the same release"
    if reader.startswith("json"):
        report.info(
            "selasticd",
            f"reads slurmctld through {reader}, which costs more time than pyslurm",
            f"install pyslurm {series} beside it, or do nothing",
        )
    elif reader:
        return
    elif pyslurm == "":  # a controller of 0.1, which reads through pyslurm only
        report.error(
            "pyslurm", "is missing beside selasticd, it sees no jobs", f"install pyslurm {series}"
        )
    elif pyslurm and release and not release.fits(pyslurm):
        report.error(
            f"pyslurm {pyslurm}",
            f"does not fit Slurm {release}, reads fail",
            f"install pyslurm {series}",
        )


def _release(facts: Facts, report: _Report) -> None:
    """Report what this release of Slurm does differently."""
    settings = facts.site.settings
    release = Release.parse(settings.get("SLURM_VERSION", ""))
    if release is None:
        return
    if refusal := release.refusal():
        report.error(f"Slurm {release}", "is too old, selasticd does not start", refusal)
    if release.is_untried:
        report.warning(
            f"Slurm {release}",
            "is newer than what was tried with this version, the plugin adds no --elastic there",
            "upgrade slurm-elastic to a version that knows it",
        )
    for fault in release.faults():
        report.warning(f"Slurm {release}", fault.harm, fault.remedy)
    delay = seconds(options(settings.get("SchedulerParameters", "")).get("requeue_delay", ""))
    low = _CREDENTIAL_S[0]
    if release.has_requeue_delay and delay is not None and delay < low:
        report.error(
            f"requeue_delay={delay:g}",
            "lets Slurm restart a requeued job before it has its new shape",
            "remove requeue_delay from SchedulerParameters, or set it to 120",
        )
    if "enable_expedited_requeue" in options(settings.get("SlurmctldParameters", "")):
        report.warning(
            "enable_expedited_requeue",
            "allows --requeue=expedite, with which job_submit.lua refuses elastic jobs",
            "tell users, or remove it from SlurmctldParameters",
        )


def _plugin(facts: Facts, report: _Report) -> None:
    site, settings = facts.site, facts.site.settings
    plugin_lines = [line for line in site.plugstack if "elastic.so" in line]
    if any(line.split()[0] == "required" for line in plugin_lines):
        report.error(
            "plugstack.conf: required elastic.so",
            "drains every node on which the file is missing",
            "write optional instead of required",
        )
    elif not plugin_lines:
        cause = (
            site.plugstack_error or f"no elastic.so in {settings.get('PlugStackConfig') or 'it'}"
        )
        report.warning(
            "plugstack.conf",
            f"does not load the plugin on this host ({cause}), sbatch refuses #SBATCH --elastic",
            "include /etc/slurm/plugstack.conf.d/*.conf",
        )
        if settings.get("JobFileAppend") == "0":
            report.warning(
                "JobFileAppend=0",
                "truncates a job's output at every resize where the plugin is missing",
                "set JobFileAppend=1, or tell users --open-mode=append",
            )
    if len(plugin_lines) > 1:
        report.warning(
            "plugstack.conf",
            f"names elastic.so {len(plugin_lines)} times, each sbatch prints a line about it",
            "keep one include, and one elastic.conf",
        )
    if "lua" not in settings.get("JobSubmitPlugins", "").split(","):
        report.error(
            "JobSubmitPlugins",
            "lacks lua, no job becomes elastic: the directive is never recorded",
            f"set JobSubmitPlugins=lua and install job_submit.lua ({_DOC})",
        )


def _gpus(facts: Facts, report: _Report) -> None:
    settings = facts.site.settings
    if "gpu" not in settings.get("GresTypes", "").split(","):
        report.error(
            "GresTypes",
            "has no gpu, there is nothing to be elastic with",
            "set GresTypes=gpu and gres.conf",
        )
    if settings.get("SelectType") not in ("select/cons_tres", None):
        report.error(
            f"SelectType={settings['SelectType']}",
            "cannot hand out single GPUs",
            "set SelectType=select/cons_tres",
        )
    if "gres/gpu" not in settings.get("AccountingStorageTRES", "").split(","):
        report.warning(
            "AccountingStorageTRES",
            "lacks gres/gpu, GPU limits do not bind and sacct shows no GPUs",
            "add gres/gpu (needs slurmdbd)",
        )


def _saving(facts: Facts, report: _Report) -> None:
    kill_wait = seconds(facts.site.settings.get("KillWait", ""))
    answer: Mapping[str, Any] = facts.controller or {}
    slowest = answer.get("slowest_save_s")
    if kill_wait is not None and slowest and slowest > kill_wait:
        enough = _round_up(slowest)
        report.error(
            f"KillWait={kill_wait:g}",
            "is shorter than the slowest measured checkpoint"
            f" ({slowest:.0f} s, job {answer.get('slowest_job', '?')})",
            f"set KillWait={enough} or notice={enough} in the directive",
        )
    elif kill_wait is not None and kill_wait < 30:
        report.warning(
            f"KillWait={kill_wait:g}",
            "leaves jobs little time to save when Slurm ends them",
            "set KillWait=30 or more",
        )


def _requeueing(facts: Facts, report: _Report) -> None:
    settings = facts.site.settings
    if settings.get("JobRequeue") == "0":
        report.warning(
            "JobRequeue=0",
            "makes Slurm refuse to requeue jobs submitted without --requeue",
            "set JobRequeue=1, or let job_submit.lua set it for elastic jobs",
        )
    expire = seconds(options(settings.get("AuthInfo", "")).get("cred_expire", "120"))
    low, high = _CREDENTIAL_S
    if expire is not None and expire < low:
        report.error(
            f"cred_expire={expire:g}",
            "lets Slurm restart a requeued job before it has its new shape",
            "set AuthInfo=cred_expire=120",
        )
    elif expire is not None and expire > high:
        report.warning(
            f"cred_expire={expire:g}",
            "keeps jobs waiting that long after a node failure or when the controller is down",
            "set AuthInfo=cred_expire=120",
        )
    age = seconds(settings.get("MinJobAge", ""))
    if age is not None and 0 < age < 60:
        report.warning(
            f"MinJobAge={age:g}",
            "makes Slurm forget ended jobs before the controller has seen how they ended",
            "set MinJobAge=300",
        )
    if settings.get("PrologSlurmctld"):
        report.warning(
            "PrologSlurmctld",
            "runs at every resize, which waits for it",
            "keep it short, or move it to Prolog",
        )
    complete = seconds(settings.get("CompleteWait", ""))
    if complete is not None and complete > 5:
        report.warning(
            f"CompleteWait={complete:g}",
            "delays every resize by up to that long",
            "set CompleteWait=0",
        )


def _scheduling(facts: Facts, report: _Report) -> None:
    settings = facts.site.settings
    parameters = options(settings.get("SchedulerParameters", ""))
    backfill = seconds(parameters.get("bf_interval", "30"))
    if settings.get("SchedulerType") == "sched/builtin":
        report.warning(
            "SchedulerType=sched/builtin",
            "plans nothing ahead, resized jobs may take nodes that others wait for",
            "set SchedulerType=sched/backfill",
        )
    elif backfill is not None and backfill > 60:
        report.warning(
            f"bf_interval={backfill:g}",
            "lets a released job wait that long when others compete",
            "set bf_interval=30 in SchedulerParameters",
        )
    for flag in ("defer", "defer_batch"):
        if flag in parameters:
            report.warning(
                flag,
                "keeps Slurm from starting a resized job at once",
                f"remove {flag} from SchedulerParameters, or accept some seconds more per resize",
            )
    if seconds(settings.get("OverTimeLimit", "")) == float("inf"):
        report.warning(
            "OverTimeLimit=UNLIMITED",
            "lets jobs run past their limit, so that it is not known when GPUs become free",
            "set a number of minutes",
        )
    for name, reason in facts.site.unused_topologies.items():
        report.warning(
            f"topology {name}",
            f"is not used: {reason}",
            "use a tree or blocks, and one topology for partitions that share nodes",
        )
    topology = settings.get("TopologyPlugin", "")
    if topology not in _TOPOLOGIES and not facts.site.unused_topologies:
        report.warning(
            f"TopologyPlugin={topology}",
            "is not supported, jobs are kept together by node only",
            "use topology/tree or topology/block, or [topology] of elastic.toml",
        )
    elif not facts.site.switches and not facts.site.unused_topologies:
        report.info(
            "topology",
            "is flat, jobs are kept together by node only",
            f"set TopologyPlugin=topology/tree and topology.conf ({_DOC})",
        )


def _rights(facts: Facts, report: _Report) -> None:
    level = facts.site.admin_level
    answer: Mapping[str, Any] = facts.controller or {}
    account = answer.get("account") or "selastic"
    acts = facts.config is None or facts.config.controller.mode == "act"
    grant = f"sacctmgr modify user {account} set adminlevel=Operator"
    if level == "None" and acts:
        report.error(f"account {account}", "is no Operator, Slurm refuses all it does", grant)
    elif level == "None":
        report.warning(f"account {account}", "is no Operator, mode = act would not work", grant)
    elif level == "" and account not in (
        "root",
        facts.site.settings.get("SlurmUser", "").split("(")[0],
    ):
        report.warning(
            f"account {account}",
            "is unknown to slurmdbd (or slurmdbd does not answer)",
            f"sacctmgr add user {account} account=root adminlevel=Operator",
        )
    elif level == "Administrator":
        report.info(f"account {account}", "has more rights than it needs", grant)
    private = facts.site.settings.get("PrivateData", "").split(",")
    if "jobs" in private:
        report.info(
            "PrivateData=jobs",
            "is obeyed: users see only their own jobs in selastic",
            "nothing to do",
        )


def _companions(facts: Facts, report: _Report) -> None:
    """Report where jobs cannot get companions, and every change is a requeue."""
    if (facts.config or Config()).resize.in_place == "never":
        return
    for partition in facts.site.closed_partitions:
        report.info(
            f"AllocNodes of partition {partition}",
            "leaves out its own nodes, jobs there get no companions and every change is a requeue",
            "add the nodes to AllocNodes, or do nothing",
        )
    if single := facts.site.single_submits:
        more = f" and {len(single) - _MOST_NAMED} more" if len(single) > _MOST_NAMED else ""
        report.info(
            f"MaxSubmitJobs=1 of {', '.join(single[:_MOST_NAMED])}{more}",
            "leaves no room for companions, every change of jobs there is a requeue",
            "allow more jobs, or do nothing",
        )


_LOOKS: tuple[Callable[[Facts, _Report], None], ...] = (
    _reachable,
    _configuration,
    _release,
    _versions,
    _plugin,
    _gpus,
    _saving,
    _requeueing,
    _scheduling,
    _companions,
    _rights,
)
_WITHOUT_SLURM = (_reachable, _configuration)


def _round_up(slowest: float) -> int:
    """Return a KillWait with a reserve: a quarter more, rounded up to 30 s."""
    return int(-(-slowest * 1.25 // 30) * 30)


def lines(findings: tuple[Finding, ...]) -> Iterator[str]:
    """Return the findings as printed: severity and text."""
    for finding in findings:
        yield f"{finding.severity}: {finding}"
