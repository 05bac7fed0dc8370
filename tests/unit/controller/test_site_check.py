"""`selastic check` on the settings of a real slurmctld, whole and spoilt."""

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_elastic.config.policy_settings import SiaSettings
from slurm_elastic.config.schema import ApiSettings, Config, parse
from slurm_elastic.controller.site_check import check, lines
from slurm_elastic.controller.site_findings import Facts
from slurm_elastic.slurm import slurm_settings
from slurm_elastic.slurm.slurm_settings import SlurmSite

SCONTROL = (Path(__file__).parents[2] / "data" / "scontrol_show_config.txt").read_text()
PRINTED = slurm_settings.parse_settings(SCONTROL)
SETTINGS = {**PRINTED, "SLURM_VERSION": "24.11.6"}  # 24.11.5 itself is a finding

GOOD = Facts(
    site=SlurmSite(
        settings=SETTINGS,
        switches=True,
        admin_level="Operator",
        plugstack=("optional elastic.so",),
    ),
    config=Config(api=ApiSettings(controller="ctl1:7321")),
    policies=("fair", "sia"),
    controller={"version": "0.1.0", "mode": "act", "account": "selastic", "pyslurm": "24.11.0",
                "slowest_save_s": 2.0, "slowest_job": "4711"},
)  # fmt: skip


def spoilt(**settings):
    return replace(GOOD, site=replace(GOOD.site, settings={**SETTINGS, **settings}))


def test_settings_are_read_as_slurm_prints_them():
    assert PRINTED["KillWait"] == "30 sec"
    assert PRINTED["AuthInfo"] == ""
    assert PRINTED["SLURM_VERSION"] == "24.11.5"
    assert slurm_settings.seconds(PRINTED["MinJobAge"]) == 300
    assert slurm_settings.options(PRINTED["SchedulerParameters"])["bf_interval"] == "5"


def test_a_good_site_has_nothing_to_mend():
    assert check(GOOD) == ()


@pytest.mark.parametrize(
    ("setting", "severity", "words"),
    [
        ({"KillWait": "10 sec"}, "warning", "KillWait=10 leaves jobs little time"),
        ({"JobRequeue": "0"}, "warning", "JobRequeue=0 makes Slurm refuse"),
        ({"AuthInfo": "cred_expire=30"}, "error", "cred_expire=30 lets Slurm restart"),
        ({"AuthInfo": "socket=/x,cred_expire=3600"}, "warning", "cred_expire=3600 keeps jobs"),
        ({"MinJobAge": "2 sec"}, "warning", "MinJobAge=2 makes Slurm forget"),
        ({"SchedulerParameters": "bf_interval=300"}, "warning", "bf_interval=300 lets"),
        ({"SchedulerParameters": "defer,bf_continue"}, "warning", "defer keeps Slurm from"),
        ({"SchedulerType": "sched/builtin"}, "warning", "plans nothing ahead"),
        ({"AccountingStorageTRES": "cpu,mem"}, "warning", "lacks gres/gpu"),
        ({"JobSubmitPlugins": ""}, "error", "JobSubmitPlugins lacks lua"),
        ({"JobSubmitPlugins": "all_partitions"}, "error", "JobSubmitPlugins lacks lua"),
        ({"GresTypes": ""}, "error", "GresTypes has no gpu"),
        ({"SelectType": "select/linear"}, "error", "cannot hand out single GPUs"),
        ({"OverTimeLimit": "UNLIMITED"}, "warning", "OverTimeLimit=UNLIMITED lets jobs run past"),
        ({"PrivateData": "jobs,usage"}, "info", "PrivateData=jobs is obeyed"),
        ({"PrologSlurmctld": "/x"}, "warning", "runs at every resize"),
        (
            {"SlurmctldParameters": "rl_enable,rl_refill_rate=4,rl_refill_period=2"},
            "warning",
            "rl_enable lets selasticd make 2 requests a second",
        ),
        ({"CompleteWait": "32 sec"}, "warning", "CompleteWait=32 delays every resize"),
    ],
)  # fmt: skip
def test_each_bad_setting_is_found_and_nothing_else(setting, severity, words):
    (finding,) = check(spoilt(**setting))
    assert finding.severity == severity
    assert words in str(finding)
    assert finding.remedy


def test_harmless_settings_are_not_complained_about():
    for setting in (
        {"AuthInfo": "cred_expire=120"},
        {"MinJobAge": "0 sec"},
        {"SchedulerParameters": ""},
        {"OverTimeLimit": "5 min"},
        {"JobSubmitPlugins": "all_partitions,lua"},
    ):
        assert check(spoilt(**setting)) == ()


@pytest.mark.parametrize(
    ("address", "complains"),
    [
        ("localhost:7321", True),
        ("localhost", True),
        ("[::1]:7321,127.0.0.1:7322", True),
        ("ctl1:7321,localhost:7321", False),
    ],
)
def test_an_address_that_only_this_host_reaches_is_found(address, complains):
    config = Config(api=ApiSettings(controller=address))
    found = [f.subject for f in check(replace(GOOD, config=config))]
    assert found == ([f'[api] controller = "{address}"'] if complains else [])


def test_kill_wait_against_the_slowest_checkpoint():
    slow = {**GOOD.controller, "slowest_save_s": 44.0}
    (finding,) = check(replace(GOOD, controller=slow))
    assert list(lines((finding,))) == [
        (
            "error: KillWait=30 is shorter than the slowest measured checkpoint (44 s, job 4711):"
            " set KillWait=60 or notice=60 in the directive"
        )
    ]


def test_the_plugin():
    absent = replace(GOOD.site, plugstack=(), plugstack_error="/etc/slurm/plugstack.conf: x")
    found = check(replace(GOOD, site=absent))
    assert [f.subject for f in found] == ["plugstack.conf", "JobFileAppend=0"]
    required = replace(GOOD.site, plugstack=("required /usr/lib/elastic.so",))
    (finding,) = check(replace(GOOD, site=required))
    assert "drains every node" in finding.harm
    twice = replace(GOOD.site, plugstack=("optional elastic.so", "optional /usr/lib/elastic.so"))
    (finding,) = check(replace(GOOD, site=twice))
    assert "names elastic.so 2 times" in finding.harm


def test_plugstack_lies_beside_slurm_conf_unless_configured():
    path = slurm_settings._plugstack_path
    assert path({"PlugStackConfig": "", "SLURM_CONF": "/opt/s/slurm.conf"}) == Path(
        "/opt/s/plugstack.conf"
    )
    assert path({"PlugStackConfig": "/etc/p.conf"}) == Path("/etc/p.conf")
    assert path({}) == Path("/etc/slurm/plugstack.conf")


def test_plugstack_includes_are_followed(tmp_path):
    (tmp_path / "plugstack.conf").write_text(
        f"# include nothing\ninclude {tmp_path}/conf.d/*.conf\noptional other.so a=b # why\n"
    )
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "elastic.conf").write_text("optional elastic.so\n")
    (tmp_path / "conf.d" / "loop.conf").write_text(f"include {tmp_path}/plugstack.conf\n")
    found, error = slurm_settings._plugstack(tmp_path / "plugstack.conf")
    assert "optional elastic.so" in found
    assert error == ""
    assert (
        slurm_settings._plugstack(tmp_path / "none")[1]
        == f"{tmp_path}/none: No such file or directory"
    )


def test_rights_of_the_account():
    def found(level, mode="act", **settings):
        config = parse(f'[controller]\nmode = "{mode}"\n[api]\ncontroller = "ctl1"')
        bare = replace(GOOD.site, admin_level=level, settings={**SETTINGS, **settings})
        return [(f.severity, f.remedy) for f in check(replace(GOOD, site=bare, config=config))]

    grant = "sacctmgr modify user selastic set adminlevel=Operator"
    assert found("None") == [("error", grant)]
    assert found("None", mode="observe") == [("warning", grant)]
    assert found("Administrator") == [("info", grant)]
    assert found("")[0][1].startswith("sacctmgr add user selastic")
    assert found("", SlurmUser="selastic(64030)") == []
    assert slurm_settings.parse_admin_level(
        "root|Administrator\nselastic|Operator\n", "selastic"
    ) == ("Operator")
    assert slurm_settings.parse_admin_level("", "selastic") == ""


def test_versions_that_do_not_fit_are_named():
    def found(**answer):
        return [str(f) for f in check(replace(GOOD, controller={**GOOD.controller, **answer}))]

    assert "pyslurm 25.11.0 does not fit Slurm 24.11.6" in found(pyslurm="25.11.0")[0]
    assert "pyslurm is missing" in found(pyslurm="")[0]
    assert "differs from the controller's 0.0.9" in found(version="0.0.9")[0]
    assert "reports: ledger is full" in found(problems=["ledger is full"])[0]
    twice = "node g1 is in two racks, r1 and r2; name it in one of them"
    assert found(problems=[twice])[0].endswith(
        "reports: node g1 is in two racks, r1 and r2: name it in one of them"
    )


def test_the_worst_comes_first():
    found = check(spoilt(PrivateData="jobs", JobSubmitPlugins="", KillWait="5 sec"))
    assert [f.severity for f in found] == ["error", "warning", "info"]


def test_it_works_without_slurm_controller_munge_and_configuration():
    found = check(
        Facts(
            site=SlurmSite(error="scontrol: No such file or directory"),
            munge_error="x",
            controller_error="connection refused",
        )
    )
    assert [f.subject for f in found] == ["slurmctld", "munge", "selasticd", "elastic.toml"]


def test_a_command_that_is_missing_fails_or_hangs_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_settings.gather(timeout_s=1).error == "scontrol: No such file or directory"
    script = tmp_path / "scontrol"
    script.write_text("#!/bin/sh\necho slurm_load_ctl_conf error: >&2\necho down >&2\nexit 1\n")
    script.chmod(0o755)
    assert slurm_settings.gather(timeout_s=5).error == "scontrol: slurm_load_ctl_conf error: down"
    script.write_text("#!/bin/sh\nwhile :; do :; done\n")
    assert slurm_settings.gather(timeout_s=0.3).error == "scontrol: no answer in 0.3 s"


@pytest.mark.parametrize(
    ("version", "severity", "words"),
    [
        ("22.05.8", "error", "Slurm 22.05.8 is too old"),
        (
            "24.11.5",
            "warning",
            "may crash slurmctld when many jobs are requeued",
        ),
        ("25.05.8", "warning", "loses the licenses of requeued jobs"),
        ("26.11.0-0rc1", "warning", "is newer than what was tried with this version"),
    ],
)
def test_a_release_that_harms_elastic_jobs_is_named_with_the_remedy(version, severity, words):
    facts = replace(spoilt(SLURM_VERSION=version), controller=None)
    (finding,) = check(facts)
    assert finding.severity == severity
    assert words in str(finding)


@pytest.mark.parametrize("version", ["23.11.0", "24.05.8", "24.11.6", "25.11.7", "26.05.12"])
def test_other_releases_are_not_complained_about(version):
    assert check(replace(spoilt(SLURM_VERSION=version), controller=None)) == ()


@pytest.mark.parametrize("plugin", ["topology/ring", "topology/torus3d", "topology/3d_torus"])
def test_a_topology_that_is_not_read_is_not_called_flat(plugin):
    site = replace(spoilt(TopologyPlugin=plugin).site, switches=False)
    (finding,) = check(replace(GOOD, site=site))
    assert str(finding).startswith(f"TopologyPlugin={plugin} is not supported")
    assert finding.severity == "warning"


def test_topologies_of_partitions_that_are_not_used_are_named():
    unused = {"ring1 of partition gpu": "RingName is not supported"}
    site = replace(spoilt(TopologyPlugin="topology/ring").site, unused_topologies=unused)
    (finding,) = check(replace(GOOD, site=site))
    assert str(finding).startswith("topology ring1 of partition gpu is not used: RingName is not")
    assert finding.severity == "warning"


def test_a_short_requeue_delay_is_found_where_slurm_obeys_it():
    old = spoilt(SLURM_VERSION="24.11.6", SchedulerParameters="requeue_delay=5,bf_interval=5")
    assert check(replace(old, controller=None)) == ()
    new = spoilt(SLURM_VERSION="25.11.7", SchedulerParameters="requeue_delay=5,bf_interval=5")
    (finding,) = check(replace(new, controller=None))
    assert "requeue_delay=5 lets Slurm restart a requeued job" in str(finding)


def test_expedited_requeues_are_found_where_slurm_allows_them():
    (finding,) = check(spoilt(SlurmctldParameters="idle_on_node_suspend,enable_expedited_requeue"))
    assert finding.severity == "warning"
    assert "allows --requeue=expedite" in str(finding)


def test_a_controller_that_reads_json_says_so():
    answer = {**GOOD.controller, "pyslurm": "", "reader": "json (pyslurm is not installed)"}
    (finding,) = check(replace(GOOD, controller=answer))
    assert finding.severity == "info"
    assert "reads slurmctld through json (pyslurm is not installed)" in str(finding)


def test_places_where_jobs_get_no_companions_are_named_once_each():
    site = replace(GOOD.site, closed_partitions=("gpu",), single_submits=("QOS a", "b", "c", "d"))
    text = '[api]\ncontroller = "ctl1:7321"\n[resize]\nin_place = "auto"\n'
    texts = [str(finding) for finding in check(replace(GOOD, site=site, config=parse(text)))]
    assert [text.split(" leaves ")[0] for text in texts] == [
        "AllocNodes of partition gpu",
        "MaxSubmitJobs=1 of QOS a, b, c and 1 more",
    ]
    never = parse(text.replace("auto", "never"))
    assert check(replace(GOOD, site=site, config=never)) == ()


@pytest.mark.parametrize(("answers", "severity"), [(True, "warning"), (False, "error")])
def test_a_solver_that_is_missing_is_found(answers, severity):
    config = replace(GOOD.config, sia=SiaSettings(solver="pulp:GLPK"))
    facts = replace(GOOD, config=config, solver_error="PuLP finds no GLPK on this host")
    (finding,) = check(facts if answers else replace(facts, controller=None))
    assert finding.severity == severity
    assert str(finding).startswith(
        '[sia] solver = "pulp:GLPK" cannot be used on this host (PuLP finds no GLPK on this host)'
    )


def test_sleep_needs_power_saving():
    sleeping = parse('[controller]\nmode = "act"\n[sleep]\nmode = "act"\nboot_s = 300')
    sleeping = replace(sleeping, api=GOOD.config.api)
    (finding,) = [f for f in check(replace(GOOD, config=sleeping)) if "Administrator" in f.harm]
    assert (finding.severity, finding.subject) == ("error", "account selastic")
    facts = replace(GOOD, config=sleeping, site=replace(GOOD.site, admin_level="Administrator"))
    subjects = [(f.severity, f.subject) for f in check(facts)]
    assert subjects == [
        ("error", "SuspendProgram"), ("error", "ResumeProgram"), ("error", "SuspendTime"),
        ("error", "ResumeTimeout=60"),
    ]  # fmt: skip
    enough = {
        "SuspendProgram": "/off", "ResumeProgram": "/on", "SuspendTime": "10000000 sec",
        "ResumeTimeout": "600 sec",
    }  # fmt: skip
    set_up = replace(spoilt(**enough).site, admin_level="Administrator")
    assert check(replace(facts, site=set_up)) == ()
    soon = replace(set_up, settings=SETTINGS | enough | {"SuspendTime": "1800 sec"})
    (finding,) = check(replace(facts, site=soon))
    assert str(finding).startswith("SuspendTime=1800 lets Slurm itself switch off nodes")
    observing = replace(sleeping, controller=replace(sleeping.controller, mode="observe"))
    finding, _ = check(replace(facts, site=set_up, config=observing))
    assert finding.subject == '[controller] mode = "observe"'


def test_partitions_that_give_jobs_all_memory_or_whole_nodes_are_named():
    site = replace(GOOD.site, no_memory_default=("a", "b", "c", "d"), whole_nodes=("x",))
    memory, nodes = check(replace(GOOD, site=site))
    assert str(memory).startswith("DefMemPerGPU of partition a, b, c and 1 more is not set")
    assert memory.severity == "warning"
    assert str(nodes).startswith("OverSubscribe=EXCLUSIVE of partition x gives each job all GPUs")
    assert nodes.severity == "info"


def test_nodes_with_several_gpu_types_are_named():
    (finding,) = check(replace(GOOD, site=replace(GOOD.site, unmanaged_nodes=("g1", "g2"))))
    assert finding.severity == "info"
    assert str(finding).startswith("Gres of g[1-2] has GPUs of several types or slices of GPUs")


def test_sharing_gpus_needs_shards():
    sharing = replace(parse('[neighbours]\nshare_gpus = "act"'), api=GOOD.config.api)
    (finding,) = check(replace(GOOD, config=sharing))
    assert str(finding).startswith('share_gpus = "act" has no effect: no GPU has shards')
    with_shards = spoilt(GresTypes="gpu,shard").site
    assert check(replace(GOOD, config=sharing, site=with_shards)) == ()
