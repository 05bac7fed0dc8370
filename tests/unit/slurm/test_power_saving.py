"""Settings of power saving, as Slurm prints them."""

from slurm_elastic.slurm.power_saving import PowerSaving
from tests.support.decisions.synthetic_clusters import node

SET = {
    "SuspendProgram": "/etc/slurm/off",
    "ResumeProgram": "/etc/slurm/on",
    "SuspendTime": "10000000 sec",
    "ResumeTimeout": "900 sec",
    "SuspendExcNodes": "g[01-02]:1,login",
    "SuspendExcParts": "debug,service",
}


def test_what_is_set_is_read():
    power = PowerSaving.of(SET)
    assert (power.missing, power.suspend_time_s, power.resume_timeout_s) == ((), 1e7, 900.0)
    assert [power.excludes(node(n)) for n in ("g01", "g02", "g03", "login")] == [
        True, True, False, True,
    ]  # fmt: skip
    assert power.excludes(node("g09", partitions=frozenset({"gpu", "debug"})))


def test_what_is_missing_is_named():
    names = [name for name, _ in PowerSaving.of({"SuspendTime": "INFINITE"}).missing]
    assert names == ["SuspendProgram", "ResumeProgram", "SuspendTime"]
    (missing,) = PowerSaving.of({**SET, "SuspendExcNodes": "g[1-x]"}).missing
    assert missing[0] == "SuspendExcNodes"
    assert PowerSaving.of({**SET, "SuspendTime": "NONE"}).missing
