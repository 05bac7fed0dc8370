"""The job_submit module, run by slurmctld's interpreter; tests/cluster runs it in Slurm."""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.companion_record import companion_record, parse_companion_record
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.member_orders import CompanionComment
from slurm_elastic.core.submission import parse_admin_comment
from tests.fuzz import directive as fuzz_directive
from tests.fuzz import lua as fuzz_lua
from tests.support.directives import DIRECTIVES, octets, read_in_lua, read_in_python
from tests.support.needs import needs

ROOT = Path(__file__).parents[3]
MODULES = ROOT / "plugins" / "lua"
LUA = "lua5.1"

pytestmark = needs(LUA)

SUBMIT = """
local said = {}
slurm = { SUCCESS = 0, ERROR = -1, EXPEDITED_REQUEUE = 2^45 }
function slurm.log_user(...) said[#said + 1] = string.format(...) end
function slurm.log_error(...) said[#said + 1] = "log: " .. string.format(...) end
local elastic = require("slurm_elastic")
local job, changed = %s, {}
local proxy = setmetatable({}, {
    __index = function(_, name)
        assert(name ~= BROKEN, "broken")
        if changed[name] ~= nil then return changed[name] end
        return job[name]
    end,
    __newindex = changed,
})
local rc = elastic.%s(proxy, %s)
print(rc)
for _, line in ipairs(said) do print("said " .. line) end
for name, value in pairs(changed) do print("set " .. name .. " " .. tostring(value)) end
"""

UNSET = {
    **dict.fromkeys(
        ["min_nodes", "max_nodes", "num_tasks", "nice", "time_limit", "time_min", "het_job_offset"],
        4294967294,
    ),
    **dict.fromkeys(["cpus_per_task", "ntasks_per_node", "ntasks_per_tres", "shared"], 65534),
    **dict.fromkeys(["begin_time", "contiguous"], 0),
    "requeue": 65534,
    "script": "#!/bin/bash\n",
}
MIXED = (
    "NodeName=g[01-02] Gres=gpu:a100:4\nNodeName=g03 CPUs=8 \\\n  gres=gpu:v100:8(S:0-1),nic:1\n"
)


def lua(code: str, path: Path, stdin: str = "") -> list[str]:
    code = f'package.path = "{path}/?.lua;" .. package.path\n{code}'
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(code)
        script.flush()
        done = subprocess.run(
            [LUA, script.name], input=stdin.encode(), capture_output=True, check=False
        )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode("utf-8", "surrogateescape").splitlines()


def literal(value: object) -> str:
    """Return a value as a Lua literal."""
    if isinstance(value, dict):
        return "{" + ",".join(f"[{literal(k)}]={literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogateescape")
        return '"' + "".join(f"\\{byte:03d}" for byte in data) + '"'
    return json.dumps(value)


class Slurm:
    """The hooks of the Lua module, with the directory of slurm.conf."""

    def __init__(self, directory: Path, *, slurm_conf: str = MIXED, conf: str = "") -> None:
        self.directory = directory
        for module in MODULES.glob("*.lua"):
            shutil.copy(module, directory)
        (directory / "slurm.conf").write_text(slurm_conf)
        if conf:
            (directory / "slurm_elastic_conf.lua").write_text(conf)

    def _run(self, hook: str, job: dict[str, object], arguments: str, broken: str = "nil"):
        code = f"BROKEN = {broken}\n" + SUBMIT % (literal(job), hook, arguments)
        rc, *lines = lua(code, self.directory)
        said = "\n".join(line[5:] for line in lines if line.startswith("said "))
        changes = dict(line[4:].split(" ", 1) for line in lines if line.startswith("set "))
        return int(rc), said, changes

    def submit(
        self,
        elastic: str | None,
        *,
        uid: int = 1000,
        broken: str = "nil",
        partitions: dict[str, Any] | None = None,
        **fields: object,
    ):
        job = UNSET | fields
        if elastic is not None:
            job["spank_job_env"] = {"0": "OTHER=1", "1": f"ELASTIC={elastic}"}
        return self._run("job_submit", job, f"{literal(partitions or {})}, {uid}", broken)

    def modify(self, *, uid: int = 1000, **fields: object):
        return self._run("job_modify", UNSET | fields, f"{{}}, {{}}, {uid}")


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path)


def test_valid_directives():
    rows = DIRECTIVES["valid"]
    for row, line in zip(rows, read_in_lua(map(octets, rows)), strict=True):
        assert line == read_in_python(row["text"])
        _, canonical, gpus, gpu_type = line.split("\t")
        assert canonical == row.get("canonical", row["text"])
        if "start" in row:
            assert [int(gpus), gpu_type] == row["start"]


def test_invalid_directives():
    rows = DIRECTIVES["invalid"]
    for row, line in zip(rows, read_in_lua(map(octets, rows)), strict=True):
        assert line.split("\t")[0] == row["part"]
        assert line == read_in_python(octets(row).decode("utf-8", "surrogateescape"))


@settings(max_examples=40)
@given(
    st.lists(
        st.text(alphabet="0123456789-,=:/.%abtypesunichlmx\t", max_size=30).map("2-16,".__add__)
        | st.binary(max_size=300).map(lambda data: data.decode("utf-8", "surrogateescape")),
        min_size=20,
    )
)
def test_agrees_with_python(texts):
    octets_of = [text.encode("utf-8", "surrogateescape") for text in texts]
    assert read_in_lua(octets_of) == [read_in_python(text) for text in texts]


def test_agrees_with_python_on_random_directives():
    tally = fuzz_directive.run(0, 1, batch=3000)
    assert tally.crashes == []
    assert tally.inputs == 3000
    assert tally.notes["accepted"] > 300


def test_job_without_directive_is_left_alone(slurm):
    assert slurm.submit(None, tres_per_node="gres/gpu:3", comment="elastic: a plan") == (0, "", {})


def test_directive_suffices(slurm):
    rc, said, changes = slurm.submit("2-16,types=a100:v100,freeze=off")
    assert rc == 0
    assert said == (
        "elastic: 2-16 GPUs, a100 before v100; starts at 2."
        " `selastic explain JOBID` shows what is done and why"
    )
    record = changes.pop("admin_comment")
    assert re.fullmatch(
        r'\{"at":\d{10},"elastic":"2-16,types=a100:v100","shape":\{\},"v":1\}', record
    )
    assert parse_admin_comment(record).submitted > 1_700_000_000
    assert changes == {
        "min_nodes": "1",
        "max_nodes": "1",
        "tres_per_node": "gres/gpu:2",
        "requeue": "1",
    }


@pytest.mark.parametrize(
    ("elastic", "fields", "expected"),
    [
        ("2-16,types=v100", {}, "1 gres/gpu:v100:2 - -"),
        ("2-16,types=h100:v100", {}, "1 gres/gpu:v100:2 - -"),
        ("2-16,types=h100:b200", {}, "1 gres/gpu:h100:2 - -"),
        ("2-16,types=a100:v100:h100", {}, "1 gres/gpu:2 - -"),
        ("4-16", {}, "1 gres/gpu:4 - -"),
        ("6-16", {}, "1 gres/gpu:v100:6 - -"),
        ("6-16,types=a100:v100", {}, "2 gres/gpu:a100:3 - -"),
        ("7-16,types=a100:v100", {}, "2 - gres/gpu:a100:7 2"),
        ("16,types=a100", {"num_tasks": 1}, "4 gres/gpu:a100:4 - 4"),
        ("16,types=a100", {"num_tasks": 16}, "4 gres/gpu:a100:4 - -"),
        ("4-16", {"min_nodes": 2, "max_nodes": 2}, "2 gres/gpu:a100:2 - -"),
        ("4-16", {"min_nodes": 2}, "2 gres/gpu:a100:2 - -"),
        ("12-16", {"min_nodes": 1, "req_nodes": "g[01-02]"}, "3 gres/gpu:a100:4 - -"),
        ("12-16", {"min_nodes": 1, "req_nodes": "g03"}, "2 gres/gpu:v100:6 - -"),
        ("12-16", {"req_nodes": "g[1-999999]"}, "2 gres/gpu:v100:6 - -"),
        ("12-16", {"req_nodes": "g[a]"}, "2 gres/gpu:v100:6 - -"),
        ("12-16", {"req_nodes": "g[1-999999999][]"}, "2 gres/gpu:v100:6 - -"),
        ("12-16", {"req_nodes": "g[1-5000]" + 300 * "x"}, "2 gres/gpu:v100:6 - -"),
        ("12-16", {"req_nodes": "g" + 6000 * "[1]"}, "2 gres/gpu:v100:6 - -"),
        ("12-16", {"req_nodes": "g[1-5000][" + 7000 * "1," + "1]"}, "2 gres/gpu:v100:6 - -"),
        ("12-16", {"features": "a100"}, "3 gres/gpu:4 - -"),
        ("12-16,types=v100:a100", {"features": "rack1"}, "2 gres/gpu:v100:6 - -"),
        ("16", {"min_nodes": 1, "max_nodes": 1}, "1 gres/gpu:16 - -"),
        ("2-16,unit=a100:2/v100:8", {}, "1 gres/gpu:v100:8 - -"),
        ("2-16,unit=a100:2/v100:4", {}, "1 gres/gpu:4 - -"),
        ("1-16,sizes=2:4:8", {}, "1 gres/gpu:2 - -"),
        ("2-16,sizes=16:6", {}, "1 gres/gpu:v100:6 - -"),
        ("1-16,sizes=1:8,unit=a100:2/v100:8", {}, "1 gres/gpu:v100:8 - -"),
    ],
)
def test_start_without_shape(slurm, elastic, fields, expected):
    rc, said, changes = slurm.submit(elastic, **fields)
    assert rc == 0, said
    assert changes["max_nodes"] == changes["min_nodes"]
    names = ("min_nodes", "tres_per_node", "tres_per_job", "num_tasks")
    assert " ".join(changes.get(name, "-") for name in names) == expected


@pytest.mark.parametrize(
    ("elastic", "fields", "starts", "changed"),
    [
        ("2-16", {"tres_per_node": "gres/gpu:2"}, "2", {"min_nodes": "1", "max_nodes": "1"}),
        ("2-16", {"tres_per_node": "gres/gpu:a100:2", "min_nodes": 2}, "4 a100", None),
        (
            "2-16",
            {"tres_per_node": "gres/gpu:2", "min_nodes": 2},
            "4 a100",
            {"tres_per_node": "gres/gpu:a100:2", "min_nodes": "2", "max_nodes": "2"},
        ),
        ("2-16", {"tres_per_job": "gres/gpu:8"}, "8 v100", {"tres_per_job": "gres/gpu:v100:8"}),
        ("2-16", {"tres_per_job": "gres/gpu:4"}, "4", {"min_nodes": "1", "max_nodes": "1"}),
        (
            "2-16,types=a100",
            {"tres_per_task": "cpu=2,gres/gpu=1", "num_tasks": 4},
            "4 a100",
            {"tres_per_task": "cpu=2,gres/gpu:a100:1"},
        ),
        (
            "2-16,types=a100",
            {"ntasks_per_tres": 1, "num_tasks": 4},
            "4 a100",
            {"tres_per_job": "gres/gpu:a100:4"},
        ),
        ("2-16,types=a100", {"tres_per_node": "gres/gpu:a100:2"}, "2 a100", None),
        ("1-8,sizes=1:2:4", {"tres_per_node": "gres/gpu:2"}, "2", None),
        ("1-8,sizes=1:2:4", {"tres_per_task": "gres/gpu:1", "num_tasks": 4}, "4", None),
        ("1-16,types=a100", {"tres_per_node": "gres/gpu"}, "1 a100", None),
        ("1-16,types=a100", {"tres_per_node": "gres/gpu:a100"}, "1 a100", None),
        ("2-16", {"tres_per_socket": "gres/gpu:a100:2", "sockets_per_node": 2}, "4 a100", None),
        (
            "2-16",
            {"tres_per_node": "gres/gpu:a100:4", "num_tasks": 8, "ntasks_per_node": 4},
            "8 a100",
            {"min_nodes": "2", "max_nodes": "2"},
        ),
    ],
)
def test_own_shape_is_the_start(slurm, elastic, fields, starts, changed):
    rc, said, changes = slurm.submit(elastic, **fields)
    assert rc == 0, said
    assert f"; starts at {starts}." in said
    recorded = parse_admin_comment(changes.pop("admin_comment"))
    assert dict(recorded.shape) == fields
    if changed is not None:
        assert changes == changed | {"requeue": "1"}


@pytest.mark.parametrize(
    ("elastic", "fields", "message"),
    [
        ("16-2", {}, "--elastic=16-2: MIN 16 is larger than MAX 2; write 2-16"),
        ("", {}, "--elastic=: nothing is given; write MIN-MAX, for example 2-16"),
        ("2???16", {}, '"2???16" is neither a number of GPUs nor a range; begin with 2 or 2-16'),
        ("a" * 511, {}, "511 bytes are more than the 256 allowed; shorten it"),
        ("2\x1b[2J", {}, "--elastic=2?[2J: byte 0x1b at position 2 is not allowed"),
        ("4-16", {"tres_per_node": "gres/gpu:2"}, "asks for 2 GPUs to start with, outside 4-16"),
        ("2-16", {"tres_per_node": "gres/gpu"}, "asks for 1 GPU to start with, outside 2-16"),
        ("2-16", {"tres_per_job": "gres/gpu:1k"}, "asks for 1024 GPUs to start with"),
        ("2-16,types=a100", {"tres_per_job": "gres/gpu:v100:4"}, "asks for 4 v100 to start with"),
        ("4-16,unit=4", {"tres_per_job": "gres/gpu:6"}, "no multiple of its unit"),
        (
            "1-8,sizes=1:2:4",
            {"tres_per_node": "gres/gpu:3"},
            "asks for 3 GPUs to start with, not among its sizes: ask for 2 or 4 GPUs, or add 3 to",
        ),
        (
            "1-8,sizes=1:2:4",
            {"tres_per_job": "gres/gpu:8"},
            "asks for 8 GPUs to start with, not among its sizes: ask for 4 GPUs, or add 8 to sizes",
        ),
        (
            "1-8,sizes=2:4",
            {"tres_per_task": "gres/gpu", "num_tasks": 1},
            "asks for 1 GPU to start with, not among its sizes: ask for 2 GPUs, or add 1 to sizes",
        ),
        ("1-4,sizes=1:8", {}, "sizes: 8 is outside 1-4; remove it or widen MIN-MAX"),
        ("2-16", {"tres_per_node": "gres/gpu:a100:1,gres/gpu:v100:1"}, "two types of GPUs"),
        (
            "2-16",
            {"tres_per_job": "gres/gpu:a100:4", "tres_per_node": "gres/gpu:v100:2"},
            "a100 and v100 are two types",
        ),
        ("2-16", {"tres_per_node": "gres/gpu:a100_1g.5gb:2"}, "slice of a GPU (MIG)"),
        ("2-16", {"tres_per_node": "gres/gpu:MIG:2"}, "slice of a GPU (MIG)"),
        ("2-16", {"tres_per_node": "gres/shard:2"}, "gres/shard:2 cannot be resized"),
        ("2-16", {"tres_per_node": "gres/gpu:2,gres/mps:50"}, "gres/mps:50 cannot be resized"),
        ("2-16", {"tres_per_job": "gres/gpu:99999999999999999999"}, "more GPUs than the 65536"),
        ("2-16", {"tres_per_node": "gres/nic\x1b[31m\nslurm: ok:1"}, "nic?[31m?slurm: ok:1 cannot"),
        ("2-16", {"tres_per_node": "gres/" + 9000 * "x"}, "xxx..."),
        ("2-16", {"tres_per_job": "license/x:1"}, "license/x:1 cannot be resized"),
        ("2-16", {"min_nodes": 4}, "4 nodes need as many GPUs at least"),
        ("2-16", {"requeue": 0}, "leave out --no-requeue"),
        (
            "2-16",
            {"ntasks_per_tres": 2, "num_tasks": 4},
            "--ntasks-per-gpu=2 cannot be resized: leave it out, esrun starts one rank on each GPU",
        ),
        ("2-16", {"bitflags": 2**45 + 1}, "leave out =expedite"),
        ("2-16", {"het_job_offset": 0}, "heterogeneous jobs cannot be resized"),
        ("2-16", {"dependency": '"' * 20000}, "more than the 65536 that can be recorded"),
        (
            "2-16",
            {"reservation": "a," * 40000},
            "80000 bytes: expected at most 65536",
        ),
        ("2-16", {"features": "x" * 70000}, "more than the 65536 that can be recorded"),
    ],
)
def test_a_faulty_submission_is_refused_in_one_line_and_not_changed(
    slurm, elastic, fields, message
):
    rc, said, changes = slurm.submit(elastic, **fields)
    assert rc == -1
    assert said.startswith("elastic: ")
    assert message in said
    assert said.isascii()
    assert said.isprintable()
    assert changes == {}


def test_everything_given_is_recorded(slurm):
    fields = {
        "time_limit": 4294967295,
        "begin_time": 1795183737,
        "min_mem_per_node": 0,
        "shared": 0,
        "cpus_per_task": 4,
        "contiguous": 1,
        "features": 'a100&"rack1"\\\n\x7f',
        "req_nodes": "g[01-02]",
        "dependency": "afterok:7",
        "partition": "gpu\udcff€",
    }
    changes = slurm.submit("2-16", nice=2147483648 + 10, **fields)[2]
    text = changes["admin_comment"]
    assert text.isascii()
    assert text.isprintable()
    assert dict(parse_admin_comment(text).shape) == fields | {"nice": 10}


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        (
            "srun python t.py",
            "srun without esrun, so the job will not be resized; write esrun in the",
        ),
        ("  /opt/x/torchrun t.py", "torchrun without esrun, .*; write esrun before torchrun"),
        ("esrun torchrun t.py\nsrun hostname", None),
        ("# srun is not used\necho srun", None),
        ("bash run.sh", None),
    ],
)
def test_a_script_that_does_without_esrun_is_told(slurm, script, hint):
    text = f"#!/bin/bash\n#SBATCH --elastic=2-4\n{script}\n"
    rc, said, _ = slurm.submit("2-4", script=text)
    assert rc == 0
    lines = said.splitlines()
    assert len(lines) == (2 if hint else 1)
    assert hint is None or re.search(hint, lines[1])
    assert "esrun" not in slurm.submit(None, script=text)[1], "no elastic job"


def test_portable_form_moves_out_of_the_comment(slurm):
    rc, said, changes = slurm.submit(None, comment="elastic:2-4 my own words")
    assert rc == 0
    assert said.startswith("elastic: 2-4 GPUs; ")
    assert changes["comment"] == "my own words"
    assert parse_admin_comment(changes["admin_comment"]).directive == Directive(2, 4)
    assert slurm.submit(None, comment="elastic:4-2")[0] == -1


def test_interactive_jobs_get_their_start_and_stay(slurm):
    rc, said, changes = slurm.submit("2-16", script=None)
    assert rc == 0
    assert said == "elastic: only batch jobs can be resized: this one stays at 2"
    assert changes == {"min_nodes": "1", "max_nodes": "1", "tres_per_node": "gres/gpu:2"}


def test_forged_record_is_cleared(slurm):
    forged = '{"elastic":"1-999","shape":{},"v":1}'
    assert slurm.submit(None, admin_comment=forged)[2] == {"admin_comment": ""}
    dated = '{"at":1700000000,"elastic":"1-999","shape":{},"v":1}'
    assert slurm.submit(None, admin_comment=dated)[2] == {"admin_comment": ""}
    changes = slurm.submit("2-4", admin_comment=" " + forged)[2]
    assert parse_admin_comment(changes["admin_comment"]).directive == Directive(2, 4)


def test_companion_is_recorded_and_a_forged_record_of_one_is_cleared(slurm):
    companion = CompanionComment(base=4711, run=2, change=35)
    changes = slurm.submit(None, comment=str(companion))[2]
    assert parse_companion_record(changes.pop("admin_comment")) == companion
    assert changes == {}
    record = companion_record(companion)
    assert slurm.submit(None, admin_comment=record)[2] == {"admin_comment": ""}
    for comment in (
        "selastic:companion:1:2",
        "selastic:companion:1:2:3x",
        "xselastic:companion:1:2:3",
    ):
        assert slurm.submit(None, comment=comment)[2] == {}


def test_in_a_federation_elastic_jobs_and_companions_stay_on_their_cluster(tmp_path):
    slurm = Slurm(tmp_path, slurm_conf="clustername=Tiny # short\n" + MIXED)
    assert slurm.submit("2-4", clusters="other,tiny")[2]["clusters"] == "tiny"
    companion = CompanionComment(base=4711, run=2, change=35)
    assert slurm.submit(None, comment=str(companion))[2]["clusters"] == "tiny"
    assert "clusters" not in slurm.submit("2-4", script=None)[2], "Slurm chooses for others"
    assert slurm.submit(None, clusters="other")[2] == {}


def test_what_the_site_recorded_is_kept(slurm):
    changes = slurm.submit("2-4", admin_comment='{"ticket": 7}')[2]
    assert parse_admin_comment(changes["admin_comment"]).other == '{"ticket": 7}'


def test_reservations_of_the_controller(slurm, tmp_path):
    message = "elastic: reservation selastic_7 belongs to the elastic controller: leave it out"
    assert slurm.submit(None, reservation="selastic_7") == (-1, message, {})
    assert slurm.modify(reservation="other, selastic_7") == (-1, message, {})
    assert slurm.modify(reservation="myselastic_7") == (0, "", {})
    assert slurm.modify(reservation="selastic_7", uid=0) == (0, "", {})
    assert slurm.modify(comment="x") == (0, "", {})
    controller = Slurm(tmp_path, conf="return { controller = 4711 }")
    assert controller.modify(reservation="selastic_7", uid=4711) == (0, "", {})
    assert controller.modify(reservation="selastic_7", uid=4712)[0] == -1


def test_controller_by_name(tmp_path):
    slurm = Slurm(tmp_path, conf='return { controller = "root" }')
    assert slurm.modify(reservation="selastic_7", uid=1000)[0] == -1
    slurm = Slurm(tmp_path, conf='return { controller = "daemon" }')
    assert slurm.modify(reservation="selastic_7", uid=1)[0] == 0


@pytest.mark.parametrize(
    ("settings", "slurm_conf", "elastic", "nodes", "asked"),
    [
        ("{}", "", "6", "2", "gres/gpu:3"),
        ("{ default_gpus_per_node = 8 }", "", "6", "1", "gres/gpu:6"),
        ("{ gpus_per_node = { h100 = 8 } }", MIXED, "16", "2", "gres/gpu:8"),
        ("{}", "NodeName=n Gres=gpu:8\nNodeName=m Gres=gpu:2", "6", "3", "gres/gpu:2"),
        ("{}", "#NodeName=n Gres=gpu:8\n", "8", "2", "gres/gpu:4"),
        ("{}", "NodeName=n Gres=gpu:h100:8", "16", "2", "gres/gpu:8"),
        ("{}", "", "2,types=h100:a100", "1", "gres/gpu:h100:2"),
    ],
)
def test_the_first_shape_follows_settings_and_slurm_conf(
    tmp_path, settings, slurm_conf, elastic, nodes, asked
):
    slurm = Slurm(tmp_path, slurm_conf=slurm_conf, conf=f"return {settings}")
    rc, said, changes = slurm.submit(elastic)
    assert rc == 0, said
    assert (changes["min_nodes"], changes["tres_per_node"]) == (nodes, asked)


PARTITIONS = {
    "all": {"nodes": "ALL", "flag_default": 0},
    "small": {"nodes": "g[01-02]", "flag_default": 1},
    "large": {"nodes": "g03", "flag_default": 0},
}


@pytest.mark.parametrize(
    ("partition", "elastic", "nodes", "asked"),
    [
        (None, "6", "2", "gres/gpu:3"),
        ("", "6", "2", "gres/gpu:3"),
        ("small", "6", "2", "gres/gpu:3"),
        ("large", "6", "1", "gres/gpu:6"),
        ("large,small", "6", "1", "gres/gpu:v100:6"),
        ("all", "6", "1", "gres/gpu:v100:6"),
        ("unknown", "6", "1", "gres/gpu:v100:6"),
        ("large", "2,types=a100", "1", "gres/gpu:a100:2"),
    ],
)
def test_the_first_shape_follows_the_nodes_of_the_partition(
    slurm, partition, elastic, nodes, asked
):
    rc, said, changes = slurm.submit(elastic, partition=partition, partitions=PARTITIONS)
    assert rc == 0, said
    assert (changes["min_nodes"], changes["tres_per_node"]) == (nodes, asked)


#: Four nodes with an a100, three with eight v100, one with two h100.
UNEQUAL = (
    "NodeName=DEFAULT CPUs=16\nNodeName=a[1-4] Gres=gpu:a100:1\n"
    "NodeName=v[1-3] Gres=gpu:v100:8\nNodeName=h1 Gres=gpu:h100:2\n"
)
GPU = {"all": {"nodes": "ALL", "flag_default": 1}}
LISTED = {
    "gpu": {"nodes": "a[1-4],v[1-3],h1", "flag_default": 1},
    "part": {"nodes": "v[1-3],h1", "flag_default": 0},
    "dynamic": {"nodes": "a[1-4],d[1-99]", "flag_default": 0},
}
FOUR_TASKS = {
    "min_nodes": 4,
    "max_nodes": 4,
    "num_tasks": 4,
    "tres_per_task": "cpu=1,gres/gpu=1",
}


FOUR_NODES = {"min_nodes": 4, "max_nodes": 4, "tres_per_node": "gres/gpu:1"}


#: Nodes with four a100 beside nodes with seven slices of each of their eight a100.
SLICED = "NodeName=a[1-4] Gres=gpu:a100:4\nNodeName=s[1-2] Gres=gpu:a100_1g.5gb:56\n"


@pytest.mark.parametrize("fields", [{}, {"tres_per_node": "gres/gpu:2"}])
def test_slices_of_gpus_are_passed_over(tmp_path, fields):
    slurm = Slurm(tmp_path, slurm_conf=SLICED)
    rc, said, changes = slurm.submit("2-8", partitions=GPU, **fields)
    assert rc == 0, said
    assert changes["tres_per_node"] == "gres/gpu:a100:2"


def test_a_partition_of_slices_is_refused(tmp_path):
    slurm = Slurm(tmp_path, slurm_conf=SLICED)
    sliced = {"sliced": {"nodes": "s[1-2]", "flag_default": 1}}
    for fields in ({}, {"tres_per_node": "gres/gpu:2"}):
        rc, said, changes = slurm.submit("2-8", partitions=sliced, **fields)
        assert (rc, changes) == (-1, {})
        assert said == (
            "elastic: its partition has slices of GPUs (MIG: a100_1g.5gb) and no whole ones, and"
            " slices cannot be resized: name another partition or leave out --elastic"
        )


@pytest.mark.parametrize("partitions", [GPU, LISTED], ids=["ALL", "listed"])
@pytest.mark.parametrize(
    ("elastic", "fields", "starts"),
    [
        ("1-8", FOUR_TASKS, "4 a100"),
        ("1-8,types=v100:a100", FOUR_TASKS, "4 a100"),
        ("1-8,types=v100", FOUR_TASKS | {"min_nodes": 3, "max_nodes": 3}, "4 v100"),
        ("1-8", FOUR_TASKS | {"min_nodes": 3, "max_nodes": 3}, "4 v100"),
        ("1-8", {"min_nodes": 4, "max_nodes": 4, "tres_per_node": "gres/gpu:1"}, "4 a100"),
        ("1-8", {"min_nodes": 3, "max_nodes": 3, "tres_per_node": "gres/gpu:2"}, "6 v100"),
        ("1-8", {"min_nodes": 4, "max_nodes": 4, "tres_per_job": "gres/gpu:4"}, "4 a100"),
        ("1-32", {"tres_per_job": "gres/gpu:24"}, "24 v100"),
        ("1-8", {"num_tasks": 4, "ntasks_per_tres": 1, "min_nodes": 4, "max_nodes": 4}, "4 a100"),
        (
            "1-8",
            {"num_tasks": 4, "ntasks_per_node": 2, "tres_per_task": "gres/gpu:1"},
            "4 v100",
        ),
        ("4-8", {"min_nodes": 4, "max_nodes": 4}, "4 a100"),
        ("2-8,types=h100:v100:a100", {"min_nodes": 2, "max_nodes": 2}, "2 v100"),
        ("4-8,types=h100:v100:a100", {}, "4 v100"),
        ("1-8", FOUR_TASKS | {"min_nodes": 3, "max_nodes": 3, "exc_nodes": "v1"}, "4 a100"),
    ],
)
def test_a_type_that_has_the_nodes(tmp_path, partitions, elastic, fields, starts):
    if "exc_nodes" in fields:  # a100 gives three GPUs on three nodes
        fields = fields | {"num_tasks": 3}
        starts = "3 a100"
    slurm = Slurm(tmp_path, slurm_conf=UNEQUAL)
    rc, said, changes = slurm.submit(elastic, partitions=partitions, **fields)
    assert rc == 0, said
    assert f"; starts at {starts}." in said
    kind = starts.split()[1]
    asked = [changes[n] for n in ("tres_per_task", "tres_per_node", "tres_per_job") if n in changes]
    assert asked
    assert all(kind in text for text in asked)


@pytest.mark.parametrize(
    ("elastic", "fields", "message"),
    [
        (
            "1-8,types=v100:h100",
            FOUR_NODES,
            "has 4 GPUs on 4 nodes in its partition (v100: 3 nodes of 8 GPUs; h100: 1 node of 2",
        ),
        (
            "1-8",
            FOUR_NODES | {"partition": "part"},
            "4 GPUs on 4 nodes in its partition (v100: 3 nodes of 8 GPUs; h100: 1 node of 2 GPUs)",
        ),
        (
            "1-8",
            FOUR_NODES | {"exc_nodes": "a[1-2],v3"},
            "(v100: 2 nodes of 8 GPUs; h100: 1 node of 2 GPUs; a100: 2 nodes of 1 GPU): ask for",
        ),
        (
            "1-8,types=v100",
            FOUR_TASKS | {"ntasks_per_node": 1},
            "has 4 GPUs on 4 nodes in its partition (v100: 3 nodes of 8 GPUs)",
        ),
        (
            "1-64,types=a100",
            {"min_nodes": 6, "max_nodes": 6, "tres_per_job": "gres/gpu:6"},
            "has 6 GPUs on 6 nodes in its partition (a100: 4 nodes of 1 GPU)",
        ),
        ("1-64", {"tres_per_job": "gres/gpu:a100:5"}, "has 5 GPUs in its partition (a100: 4 nodes"),
        (
            "1-64",
            {"tres_per_node": "gres/gpu:9", "max_nodes": 1},
            "has 9 GPUs on one node in its partition (v100: 3 nodes of 8 GPUs; h100",
        ),
        (
            "1-8",
            FOUR_TASKS | {"min_nodes": 4294967293, "max_nodes": 4294967293},
            "has 4 GPUs on 4294967293 nodes in its partition",
        ),
        ("1-8", FOUR_TASKS | {"min_nodes": 5, "max_nodes": 5}, "has 4 GPUs on 5 nodes in its"),
        ("25-64", {}, "has 25 GPUs in its partition (v100: 3 nodes of 8 GPUs; h100: 1 node of 2"),
        ("16", {"min_nodes": 1, "max_nodes": 1}, "has 16 GPUs on one node in its partition"),
    ],
)
def test_no_type_has_the_nodes(tmp_path, elastic, fields, message):
    slurm = Slurm(tmp_path, slurm_conf=UNEQUAL)
    rc, said, changes = slurm.submit(elastic, partitions=LISTED, **fields)
    assert rc == -1
    assert message in said
    assert said.isprintable()
    assert changes == {}


@pytest.mark.parametrize(
    ("elastic", "fields", "starts", "changed"),
    [
        (
            "1-8,types=v100:h100",
            FOUR_TASKS,
            "4 v100 on 2 nodes, as no GPU type of the partition has 4",
            {"tres_per_task": "cpu=1,gres/gpu:v100:1", "min_nodes": "2", "max_nodes": "2"},
        ),
        (
            "1-8",
            FOUR_TASKS | {"tres_per_task": "gres/gpu:v100:1"},
            "4 v100 on 2 nodes, as no GPU type of the partition has 4",
            {"min_nodes": "2", "max_nodes": "2"},
        ),
        (
            "1-64,types=v100",
            {"min_nodes": 8, "max_nodes": 8, "tres_per_job": "gres/gpu:24"},
            "24 v100 on 3 nodes, as no GPU type of the partition has 8",
            {"tres_per_job": "gres/gpu:v100:24", "min_nodes": "3", "max_nodes": "3"},
        ),
        (
            "1-8,types=h100",
            {"min_nodes": 2, "max_nodes": 2, "num_tasks": 2, "ntasks_per_tres": 1},
            "2 h100 on 1 node, as no GPU type of the partition has 2",
            {"tres_per_job": "gres/gpu:h100:2", "min_nodes": "1", "max_nodes": "1"},
        ),
        (
            "4-8,types=v100",
            {"min_nodes": 4, "max_nodes": 4},
            "4 v100 on 2 nodes, as no GPU type of the partition has 4",
            {"tres_per_node": "gres/gpu:v100:2", "min_nodes": "2", "max_nodes": "2"},
        ),
    ],
)
def test_fewer_nodes_where_no_type_has_as_many(tmp_path, elastic, fields, starts, changed):
    slurm = Slurm(tmp_path, slurm_conf=UNEQUAL)
    rc, said, changes = slurm.submit(elastic, partitions=LISTED, **fields)
    assert rc == 0, said
    assert f"; starts at {starts}. `selastic" in said
    recorded = parse_admin_comment(changes.pop("admin_comment"))
    assert recorded.shape["min_nodes"] == fields["min_nodes"]
    assert changes == changed | {"requeue": "1"}


@pytest.mark.parametrize(
    ("settings", "partitions", "fields"),
    [
        ("{}", LISTED, {"partition": "dynamic"}),
        ("{}", {}, {}),
        ("{}", LISTED, {"partition": "unknown"}),
        ("{}", GPU, {"features": "big"}),
        ("{ gpus_per_node = { a100 = 1 } }", LISTED, {}),
    ],
)
def test_slurm_decides_where_nodes_are_not_known(tmp_path, settings, partitions, fields):
    slurm = Slurm(tmp_path, slurm_conf=UNEQUAL, conf=f"return {settings}")
    asked = {"min_nodes": 50, "max_nodes": 50, "tres_per_node": "gres/gpu:1"}
    rc, said, _ = slurm.submit("1-64", partitions=partitions, **(asked | fields))
    assert rc == 0, said


@pytest.mark.parametrize(
    ("elastic", "sizes"),
    [
        ("1-8,sizes=1:2:4", "1, 2 or 4 GPUs"),
        ("1-8,sizes=4", "4 GPUs"),
        ("1-8,sizes=2:8", "2 or 8 GPUs"),
        ("1-30,sizes=" + ":".join(str(i) for i in range(1, 31, 3)), "1-28 GPUs"),
    ],
)
def test_listed_sizes_are_shown(slurm, elastic, sizes):
    rc, said, changes = slurm.submit(elastic)
    assert rc == 0
    assert said.startswith(f"elastic: {sizes}; starts at ")
    assert parse_admin_comment(changes["admin_comment"]).directive == Directive.parse(elastic)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("g[1-3],login", ["g1", "g2", "g3", "login"]),
        ("a,g[08-10,2]x,,b", ["a", "g08x", "g09x", "g10x", "g2x", "b"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("g[3-1]", []),
        ("g[a]", None),
        ("g[1-999999999]", None),
        ("g[1-999999999][]", None),
        ("g[1-300000][2-1]", None),
        ("g[9007199254740993-9007199254740994]", None),
        ("g" + 5_000 * "[1]" + "[]", []),
        ("g[1-2]" + 300 * "x", None),
    ],
)
def test_node_lists(text, names):
    code = f"""
    local sound, names = pcall(require("slurm_elastic_cluster").expand, {literal(text)})
    print(sound and table.concat(names, " ") or "error")
    """
    assert lua(code, MODULES) == ["error" if names is None else " ".join(names)]


def test_slurm_conf(tmp_path):
    (tmp_path / "slurm.conf").write_text(
        "nodename=default gres=gpu:2\nINCLUDE more.conf # rest\nNodeName=g[1-2]\n"
        "Include missing.conf\n#NodeName=x Gres=gpu:9\nNodeName=n Gres=nic:1\n"
        "NodeName=m CPUs=4 \\\n Gres=gpu:a100:2,gpu:a100:2(S:1) Feature=x\n"
        f"Include {tmp_path}/slurm.conf\n"
    )
    (tmp_path / "more.conf").write_text("NodeName=h Gres=gpu:h100:8(IDX:0-7)\n")
    code = f"""
    local cluster = require("slurm_elastic_cluster")
    local nodes = cluster.read("{tmp_path}/")
    for _, list in ipairs({{ "g[1-2]", "h", "m", "n", "x", "g1,h,m", "ALL" }}) do
        local words = {{ list }}
        for name, count in pairs(cluster.sizes(nodes, list)) do
            words[#words + 1] = string.format("%s:%d", name, count)
        end
        table.sort(words)
        print(table.concat(words, " "))
    end
    """
    assert lua(code, MODULES) == [
        *(":2 g[1-2]", "h h100:8", "a100:4 m", "n", "x"),
        *(":2 a100:4 g1,h,m h100:8", ":2 ALL a100:4 h100:8"),
    ]


def test_modules_of_a_package_read_what_lies_beside_slurm_conf(tmp_path):
    folder, packaged = tmp_path / "slurm", tmp_path / "package"
    folder.mkdir()
    packaged.mkdir()
    Slurm(packaged)
    (packaged / "slurm.conf").unlink()
    script = (packaged / "job_submit.lua").read_text("utf-8")
    assert "/usr/share/slurm-elastic" in script
    text = script.replace("/usr/share/slurm-elastic/lua", str(packaged))
    (folder / "job_submit.lua").write_text(text)
    (folder / "slurm.conf").write_text("NodeName=n Gres=gpu:h100:6\n")
    (folder / "slurm_elastic_conf.lua").write_text("return { default_gpus_per_node = 5 }")
    code = f"""
    slurm = {{ SUCCESS = 0, ERROR = -1, log_error = print }}
    dofile("{folder}/job_submit.lua")
    local settings = package.loaded.slurm_elastic.settings
    print(settings.nodes.n.h100, settings.default_gpus_per_node)
    """
    assert lua(code, tmp_path) == ["6\t5"]


@pytest.mark.parametrize("broken", ['"spank_job_env"', '"min_nodes"', '"reservation"'])
def test_internal_errors_fail_open(slurm, broken):
    rc, said, changes = slurm.submit("2-4", broken=broken)
    assert rc == 0
    assert "log: slurm_elastic: internal error, the job runs unmanaged: " in said
    assert changes == {}


@pytest.mark.parametrize("fault", ["syntax error here", "error('x')", "return 7"])
def test_script_without_a_sound_module_accepts_everything(tmp_path, fault):
    Slurm(tmp_path, conf=fault)
    code = f"""
    slurm = {{ SUCCESS = 0, ERROR = -1, log_error = function(...) print(string.format(...)) end }}
    dofile("{tmp_path}/job_submit.lua")
    print(slurm_job_submit({{}}, {{}}, 0), slurm_job_modify({{}}, {{}}, {{}}, 0))
    """
    said, result = lua(code, tmp_path)
    assert said.startswith("slurm_elastic: not loaded, jobs run unmanaged: ")
    assert result == "0\t0"


def test_random_jobs():
    tally = fuzz_lua.run(0, 1, batch=3000)
    assert tally.crashes == []
    assert tally.notes["records read back"] > 20


ALONE = """
local said = {}
slurm = { SUCCESS = 0, ERROR = -1 }
function slurm.log_user(text) said[#said + 1] = text end
function slurm.log_error(...) end
dofile(%s)
print(slurm_job_submit(%s, {}, 1000), #said, said[1])
"""


@pytest.mark.parametrize(
    ("job", "answer"),
    [
        ({"spank_job_env": {"1": "ELASTIC=1-2"}}, "0\t1\telastic: the modules are missing"),
        ({"spank_job_env": {"1": "OTHER=1"}}, "0\t0\tnil"),
        ({"spank_job_env": "no table"}, "0\t0\tnil"),
        ({}, "0\t0\tnil"),
    ],
)
def test_without_the_modules_jobs_are_accepted_and_users_of_the_option_are_told(
    tmp_path, job, answer
):
    script = tmp_path / "job_submit.lua"
    shutil.copy(MODULES / "job_submit.lua", script)
    (line,) = lua(ALONE % (literal(str(script)), literal(job)), tmp_path)
    assert line.startswith(answer)
