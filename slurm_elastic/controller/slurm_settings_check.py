"""Settings of Slurm that harm elastic jobs, for `selastic check`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slurm_elastic.controller.site_findings import Facts, FindingList
from slurm_elastic.core.nodelist import fold
from slurm_elastic.slurm.power_saving import PowerSaving
from slurm_elastic.slurm.release_rules import Release
from slurm_elastic.slurm.slurm_settings import options, seconds

#: cred_expire must outlast a transition: until then Slurm leaves a requeued job alone.
_CREDENTIAL_S = (60.0, 600.0)

#: Requests that selasticd makes during changes; with one a second each took 35 s.
_REQUESTS_A_SECOND = 10.0

#: Topologies that are read, or that are none.
_TOPOLOGIES = ("", *(f"topology/{t}" for t in ("block", "default", "flat", "none", "tree")))

_DOC = "docs/install.md"

#: Partitions that one line names.
_MOST_NAMED = 3

#: SuspendTime below which Slurm itself switches nodes off, and one with which it never does.
_DAY_S, _LONG_SUSPEND_S = 86400.0, 10_000_000
_POWER_REMEDIES = {
    "SuspendProgram": "name the program that switches nodes off (docs/sleep.md)",
    "ResumeProgram": "name the program that switches nodes on (docs/sleep.md)",
    "SuspendTime": f"set SuspendTime={_LONG_SUSPEND_S}",
    "SuspendExcNodes": "mend the list",
}


def check_release(facts: Facts, findings: FindingList) -> None:
    """Report the differences of this release of Slurm."""
    settings = facts.site.settings
    release = Release.parse(settings.get("SLURM_VERSION", ""))
    if release is None:
        return
    if refusal := release.refusal():
        findings.error(f"Slurm {release}", "is too old, selasticd does not start", refusal)
    if release.is_untried:
        findings.warning(
            f"Slurm {release}",
            "is newer than what was tried with this version, the plugin adds no --elastic there",
            "upgrade slurm-elastic to a version that knows it",
        )
    for fault in release.faults():
        findings.warning(f"Slurm {release}", fault.harm, fault.remedy)
    delay = seconds(options(settings.get("SchedulerParameters", "")).get("requeue_delay", ""))
    low = _CREDENTIAL_S[0]
    if release.has_requeue_delay and delay is not None and delay < low:
        findings.error(
            f"requeue_delay={delay:g}",
            "lets Slurm restart a requeued job before it has its new shape",
            "remove requeue_delay from SchedulerParameters, or set it to 120",
        )
    if "enable_expedited_requeue" in options(settings.get("SlurmctldParameters", "")):
        findings.warning(
            "enable_expedited_requeue",
            "allows --requeue=expedite, with which job_submit.lua refuses elastic jobs",
            "tell users, or remove it from SlurmctldParameters",
        )


def check_plugin(facts: Facts, findings: FindingList) -> None:
    """Report how the SPANK plugin and job_submit.lua are configured."""
    site, settings = facts.site, facts.site.settings
    plugin_lines = [line for line in site.plugstack if "elastic.so" in line]
    if any(line.split()[0] == "required" for line in plugin_lines):
        findings.error(
            "plugstack.conf: required elastic.so",
            "drains every node on which the file is missing",
            "write optional instead of required",
        )
    elif not plugin_lines:
        cause = (
            site.plugstack_error or f"no elastic.so in {settings.get('PlugStackConfig') or 'it'}"
        )
        findings.warning(
            "plugstack.conf",
            f"does not load the plugin on this host ({cause}), sbatch refuses #SBATCH --elastic",
            "include /etc/slurm/plugstack.conf.d/*.conf",
        )
        if settings.get("JobFileAppend") == "0":
            findings.warning(
                "JobFileAppend=0",
                "truncates a job's output at every resize where the plugin is missing",
                "set JobFileAppend=1, or tell users --open-mode=append",
            )
    if len(plugin_lines) > 1:
        findings.warning(
            "plugstack.conf",
            f"names elastic.so {len(plugin_lines)} times, each sbatch prints a line about it",
            "keep one include, and one elastic.conf",
        )
    if "lua" not in settings.get("JobSubmitPlugins", "").split(","):
        findings.error(
            "JobSubmitPlugins",
            "lacks lua, no job becomes elastic: the directive is never recorded",
            f"set JobSubmitPlugins=lua and install job_submit.lua ({_DOC})",
        )


def check_gpus(facts: Facts, findings: FindingList) -> None:
    """Report settings with which Slurm does not hand out GPUs."""
    settings = facts.site.settings
    if "gpu" not in settings.get("GresTypes", "").split(","):
        findings.error(
            "GresTypes",
            "has no gpu, there is nothing to be elastic with",
            "set GresTypes=gpu and gres.conf",
        )
    if settings.get("SelectType") not in ("select/cons_tres", None):
        findings.error(
            f"SelectType={settings['SelectType']}",
            "cannot hand out single GPUs",
            "set SelectType=select/cons_tres",
        )
    if names := _named(facts.site.no_memory_default):
        findings.warning(
            f"DefMemPerGPU of partition {names}",
            "is not set, a job that asks for none gets all memory of its nodes, and no other job"
            " fits there, also when it shrinks",
            "set DefMemPerGPU or DefMemPerCPU",
        )
    if names := _named(facts.site.whole_nodes):
        findings.info(
            f"OverSubscribe=EXCLUSIVE of partition {names}",
            "gives each job all GPUs of its nodes, jobs are resized by whole nodes",
            "tell users to name whole nodes: --elastic=8-32,unit=8 where nodes have eight GPUs",
        )
    if facts.site.unmanaged_nodes:
        findings.info(
            f"Gres of {fold(facts.site.unmanaged_nodes)}",
            "has GPUs of several types or slices of GPUs (MIG), jobs there are not resized and no"
            " job grows onto them",
            "put elastic jobs into a partition without these nodes",
        )
    if "gres/gpu" not in settings.get("AccountingStorageTRES", "").split(","):
        findings.warning(
            "AccountingStorageTRES",
            "lacks gres/gpu, GPU limits do not bind and sacct shows no GPUs",
            "add gres/gpu (needs slurmdbd)",
        )


def check_saving(facts: Facts, findings: FindingList) -> None:
    """Report a KillWait in which jobs cannot save."""
    kill_wait = seconds(facts.site.settings.get("KillWait", ""))
    answer: Mapping[str, Any] = facts.controller or {}
    slowest = answer.get("slowest_save_s")
    if kill_wait is not None and slowest and slowest > kill_wait:
        enough = _round_up(slowest)
        findings.error(
            f"KillWait={kill_wait:g}",
            "is shorter than the slowest measured checkpoint"
            f" ({slowest:.0f} s, job {answer.get('slowest_job', '?')})",
            f"set KillWait={enough} or notice={enough} in the directive",
        )
    elif kill_wait is not None and kill_wait < 30:
        findings.warning(
            f"KillWait={kill_wait:g}",
            "leaves jobs little time to save when Slurm ends them",
            "set KillWait=30 or more",
        )


def check_requeueing(facts: Facts, findings: FindingList) -> None:
    """Report settings that make requeues slow or unsafe."""
    settings = facts.site.settings
    if settings.get("JobRequeue") == "0":
        findings.warning(
            "JobRequeue=0",
            "makes Slurm refuse to requeue jobs submitted without --requeue",
            "set JobRequeue=1, or let job_submit.lua set it for elastic jobs",
        )
    expire = seconds(options(settings.get("AuthInfo", "")).get("cred_expire", "120"))
    low, high = _CREDENTIAL_S
    if expire is not None and expire < low:
        findings.error(
            f"cred_expire={expire:g}",
            "lets Slurm restart a requeued job before it has its new shape",
            "set AuthInfo=cred_expire=120",
        )
    elif expire is not None and expire > high:
        findings.warning(
            f"cred_expire={expire:g}",
            "keeps jobs waiting that long after a node failure or when the controller is down",
            "set AuthInfo=cred_expire=120",
        )
    age = seconds(settings.get("MinJobAge", ""))
    if age is not None and 0 < age < 60:
        findings.warning(
            f"MinJobAge={age:g}",
            "makes Slurm forget ended jobs before the controller has seen how they ended",
            "set MinJobAge=300",
        )
    if settings.get("PrologSlurmctld"):
        findings.warning(
            "PrologSlurmctld",
            "runs at every resize, which waits for it",
            "keep it short, or move it to Prolog",
        )
    limits = options(settings.get("SlurmctldParameters", ""))
    if "rl_enable" in limits and (rate := _requests_a_second(limits)) < _REQUESTS_A_SECOND:
        findings.warning(
            "rl_enable",
            f"lets selasticd make {rate:g} requests a second, each step of a resize waits",
            f"set rl_refill_rate={_REQUESTS_A_SECOND:g} in SlurmctldParameters",
        )
    complete = seconds(settings.get("CompleteWait", ""))
    if complete is not None and complete > 5:
        findings.warning(
            f"CompleteWait={complete:g}",
            "delays every resize by up to that long",
            "set CompleteWait=0",
        )


def _requests_a_second(parameters: Mapping[str, str]) -> float:
    """Return the requests of one user that slurmctld answers each second, its defaults included."""
    rate = seconds(parameters.get("rl_refill_rate", "2"))
    period = seconds(parameters.get("rl_refill_period", "1"))
    return math.inf if rate is None or not period else rate / period


def check_scheduling(facts: Facts, findings: FindingList) -> None:
    """Report settings of the scheduler and of the topology."""
    settings = facts.site.settings
    parameters = options(settings.get("SchedulerParameters", ""))
    backfill = seconds(parameters.get("bf_interval", "30"))
    if settings.get("SchedulerType") == "sched/builtin":
        findings.warning(
            "SchedulerType=sched/builtin",
            "plans nothing ahead, resized jobs may take nodes that others wait for",
            "set SchedulerType=sched/backfill",
        )
    elif backfill is not None and backfill > 60:
        findings.warning(
            f"bf_interval={backfill:g}",
            "lets a released job wait that long when others compete",
            "set bf_interval=30 in SchedulerParameters",
        )
    for flag in ("defer", "defer_batch"):
        if flag in parameters:
            findings.warning(
                flag,
                "keeps Slurm from starting a resized job at once",
                f"remove {flag} from SchedulerParameters, or accept some seconds more per resize",
            )
    if seconds(settings.get("OverTimeLimit", "")) == float("inf"):
        findings.warning(
            "OverTimeLimit=UNLIMITED",
            "lets jobs run past their limit, so that it is not known when GPUs become free",
            "set a number of minutes",
        )
    for name, reason in facts.site.unused_topologies.items():
        findings.warning(
            f"topology {name}",
            f"is not used: {reason}",
            "use a tree or blocks, and one topology for partitions that share nodes",
        )
    topology = settings.get("TopologyPlugin", "")
    if topology not in _TOPOLOGIES and not facts.site.unused_topologies:
        findings.warning(
            f"TopologyPlugin={topology}",
            "is not supported, jobs are kept together by node only",
            "use topology/tree or topology/block, or [topology] of elastic.toml",
        )
    elif not facts.site.switches and not facts.site.unused_topologies:
        findings.info(
            "topology",
            "is flat, jobs are kept together by node only",
            "set TopologyPlugin=topology/tree and topology.conf (docs/topology.md)",
        )


def check_power_saving(facts: Facts, findings: FindingList) -> None:
    """Report settings with which `[sleep] mode = "act"` switches no node, or harms jobs."""
    if facts.config is None or facts.config.sleep.mode != "act":
        return
    sleep, settings = facts.config.sleep, facts.site.settings
    power = PowerSaving.of(settings)
    for name, harm in power.missing:
        findings.error(name, f'{harm}: [sleep] mode = "act" does nothing', _POWER_REMEDIES[name])
    if facts.config.controller.mode != "act":
        findings.warning(
            f'[controller] mode = "{facts.config.controller.mode}"',
            'leaves all nodes on, whatever [sleep] mode = "act" says',
            'set it to "act", or [sleep] mode to "observe"',
        )
    if power.suspend_time_s < _DAY_S:
        findings.warning(
            f"SuspendTime={power.suspend_time_s:g}",
            "lets Slurm itself switch off nodes that selasticd keeps awake",
            f"set SuspendTime={_LONG_SUSPEND_S}",
        )
    if power.resume_timeout_s < sleep.boot_s:
        findings.error(
            f"ResumeTimeout={power.resume_timeout_s:g}",
            f"is shorter than a boot ([sleep] boot_s = {sleep.boot_s:g}), Slurm gives up nodes"
            " that still boot",
            f"set ResumeTimeout={math.ceil(2 * sleep.boot_s)}",
        )


def _named(names: tuple[str, ...]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _round_up(slowest: float) -> int:
    """Return a KillWait with a reserve: a quarter more, rounded up to 30 s."""
    return int(-(-slowest * 1.25 // 30) * 30)
