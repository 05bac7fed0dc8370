"""`selastic partition`: the answer as text and as JSON; errors are one line."""

import json

import pytest

from slurm_elastic.cli import main

LAYERS = [("conv", 0.02, 0.04, 8e6, 1e6), ("fc", 0.01, 0.01, 4e3, 4e8)]


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main.run(["partition", *map(str, words)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture
def profile(tmp_path):
    keys = ("name", "forward_s", "backward_s", "activation_bytes", "parameter_bytes")
    path = tmp_path / "net.json"
    path.write_text(json.dumps({"layers": [dict(zip(keys, row, strict=True)) for row in LAYERS]}))
    return path


def test_the_table_of_stages(run, profile):
    code, out, err = run(profile, "--machines", "4", "--bandwidth", "1e9")
    assert (code, err) == (0, "")
    assert out == (
        "net.json on 4 GPUs: 20.9 ms per minibatch; data parallel 321 ms (15.36 times that);"
        " one GPU 80 ms\n"
        "STAGE  REPLICAS  LAYERS  COMPUTE  PARAMETERS  OUTPUT  INFLIGHT  MEMORY\n"
        "    0         3  conv      60 ms        1 MB    8 MB         2   18 MB\n"
        "    1         1  fc        20 ms      400 MB     0 B         1  400 MB\n"
    )


def test_json(run, profile):
    arguments = (profile, "--machines", "2,2", "--bandwidth", "1e9,1e8", "--json")
    code, out, err = run(
        *arguments, "--activations", "--memory", "1e9", "--paper", "--free-sources"
    )
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["exact"]
    assert answer["pipeline_time_s"] == answer["bound_s"] < answer["data_parallel_time_s"]
    assert answer["single_time_s"] == pytest.approx(0.08)
    assert [(s["layers"], s["replicas"]) for s in answer["stages"]] == [(["conv"], 2), (["fc"], 2)]
    assert answer["replication_by_level"][1] == [1, 1]
    assert answer["in_flight"] == answer["stages"][0]["in_flight"] == 2


def test_straight_and_table_options(run, profile):
    arguments = (profile, "--machines", "2", "--bandwidth", "1e9", "--straight")
    assert run(*arguments, "-P", "-h", "-o", "stage,levels,layers")[1] == "0|1|conv\n1|1|fc\n"


def test_an_approximation_is_marked(run, tmp_path):
    net = {"layers": []}
    for i in range(6):
        row = {"name": f"n{i}", "forward_s": 1, "backward_s": 1, "activation_bytes": 1}
        after = [] if i == 0 else [f"n{j}" for j in range(1, 5)] if i == 5 else ["n0"]
        net["layers"].append(row | {"parameter_bytes": 1, "after": after})
    path = tmp_path / "wide.json"
    path.write_text(json.dumps(net))
    arguments = (path, "--machines", "2", "--bandwidth", "1e9")
    assert "Approximate" not in run(*arguments)[1]
    out = run(*arguments, "--states", "8")[1]
    assert "Approximate: 6 ways to cut were examined" in out
    assert "every plan takes at least 6.0 s" in out


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (
            ("--machines", "0", "--bandwidth", "1e9"),
            2,
            '--machines: "0" is invalid: expected a whole number above 0',
        ),
        (
            ("--machines", "4,", "--bandwidth", "1e9"),
            2,
            '--machines: "" is invalid: expected a whole number above 0',
        ),
        (
            ("--machines", "2.5", "--bandwidth", "1e9"),
            2,
            '--machines: "2.5" is invalid: expected a whole number above 0',
        ),
        (("--machines", "9999", "--bandwidth", "1e9"), 2, "9999 machines on a level: give 1-256"),
        (
            ("--machines", "4", "--bandwidth", "-1"),
            2,
            '--bandwidth: "-1" is invalid: expected a number above 0',
        ),
        (
            ("--machines", "4", "--bandwidth", "nan"),
            2,
            '--bandwidth: "nan" is invalid: expected a number above 0',
        ),
        (
            ("--machines", "4,4", "--bandwidth", "1e9"),
            2,
            "--bandwidth: 1 given: expected 2, one for each level of",
        ),
        (
            ("--machines", "4", "--bandwidth", "1e9", "--memory", "lots"),
            2,
            '--memory: "lots" is invalid: expected a number above 0',
        ),
        (("--machines", "4", "--bandwidth", "1", "--states", "0"), 2, '--states: "0" is invalid'),
        (("--machines", "4"), 2, "Missing option '--bandwidth'"),
    ],
)
def test_wrong_options(run, profile, words, code, expected):
    answer, out, err = run(profile, *words)
    assert (answer, out) == (code, "")
    assert err.startswith(f"selastic: {expected}")
    assert err.count("\n") == 1


def test_wrong_profiles(run, profile, tmp_path):
    arguments = ("--machines", "4", "--bandwidth", "1e9")
    for change, expected in (
        ({"forward_s": -1}, "layers[1]: layer fc: forward_s -1 is invalid: expected 0-1e+18"),
        ({"after": ["nobody"]}, "edge nobody -> fc: layer 'nobody' does not exist"),
        ({"after": []}, "layer fc is not connected with conv: add the edge that leads to it"),
    ):
        data = json.loads(profile.read_text())
        data["layers"][1] |= change
        path = tmp_path / "bad.json"
        path.write_text(json.dumps(data))
        assert run(path, *arguments) == (2, "", f"selastic: {path}: {expected}\n")
    missing = tmp_path / "none"
    assert run(missing, *arguments) == (2, "", f"selastic: {missing}: No such file or directory\n")
    code, out, err = run(profile, *arguments, "--memory", "5")
    assert (code, out) == (1, "")
    assert err == f"selastic: {profile}: no pipeline on 4 GPUs keeps to 5 bytes of memory per GPU\n"


def test_plans_that_fit_by_number_of_gpus(run, profile):
    arguments = (profile, "--plans", "--machines", "2", "--batch", "16", "--bandwidth", "1e9")
    code, out, err = run(*arguments, "--memory", "1.25e9")
    assert (code, err) == (0, "")
    assert out == (
        "net.json, 16 samples in a step: 6 plans that fit into 1.25 GB\n"
        "GPUS  PLAN                       MEMORY   STEP\n"
        "   2  2x1+shard=full            1.21 GB      -\n"
        "   2  2x1+shard=full+recompute   1.2 GB      -\n"
        "   2  1x2                        803 MB  60 ms\n"
        "   2  1x2+recompute              802 MB      -\n"
        "   2  1x1+tensor=2               807 MB      -\n"
        "   2  1x1+tensor=2+recompute     804 MB      -\n"
        "Not in a profile: state of the optimizer (Adam's is assumed, twice the weights),"
        " activations within layers (outputs only), context and workspace of the GPU (none).\n"
    )
    assert run(*arguments, "-P", "-h", "-o", "gpus,plan")[1].splitlines()[:2] == [
        "1|1x1", "1|1x1+recompute",
    ]  # fmt: skip
    assert "no plan fits into 1 MB" in run(*arguments, "--memory", "1e6")[1]
    answer = json.loads(run(*arguments, "--json")[1])
    assert (answer["samples"], answer["batch"], answer["gpu_bytes"]) == (16, 16, None)
    assert len(answer["missing"]) == 3
    row = next(row for row in answer["plans"] if row["plan"] == "1x1+tensor=2+recompute")
    assert row | {"memory_bytes": 0} == {
        "gpus": 2, "plan": "1x1+tensor=2+recompute", "replicas": 1, "stages": 1, "tensor": 2,
        "shard": "none", "recompute": True, "accumulation": None, "memory_bytes": 0, "step_s": None,
    }  # fmt: skip


def test_samples_of_a_profile_and_wrong_options_of_plans(run, profile):
    arguments = (profile, "--plans", "--machines", "1")
    data = json.loads(profile.read_text())
    for key, value, expected in (
        ("none", 0, "does not tell of how many samples it is: give them by --batch"),
        ("batch", 0, "batch 0 is invalid: expected a whole number above 0"),
        ("micro_batch", "8", "micro_batch '8' is invalid: expected a whole number above 0"),
    ):
        profile.write_text(json.dumps(data | {key: value}))
        assert run(*arguments) == (2, "", f"selastic: {profile}: {expected}\n")
    profile.write_text(json.dumps(data | {"micro_batch": 8}))
    assert run(*arguments)[1].startswith("net.json, 8 samples in a step: 2 plans; --memory=BYTES")
    for words, expected in (
        (("--plans", "--machines", "256,256,2"), "--machines: 131072 GPUs is invalid"),
        ((*arguments[1:], "--straight"), "--plans: --straight has no effect with it"),
        (("--plans",), "Missing option '--machines'"),
    ):
        code, out, err = run(profile, *words)
        assert (code, out) == (2, "")
        assert err.startswith(f"selastic: {expected}")


@pytest.fixture
def volumes(tmp_path):
    """A convolution of 16 channels on 64^3 voxels, and its input and result."""
    window = {"kernel": 3, "stride": 1, "padding": 1}
    layer = {"name": "conv", "kind": "convolution", "channels": [4, 16]}
    layer |= {"extents": [[64] * 3] * 2, "windows": [window] * 3, "parameters": 1744}
    kept = [{"channels": channels, "extents": [64] * 3} for channels in (4, 16)]
    path = tmp_path / "volumes.json"
    path.write_text(json.dumps({"version": 1, "volume_layers": [layer], "kept": kept}))
    return path


def test_spatial_groups_by_the_memory_of_a_gpu(run, volumes):
    code, out, err = run(volumes, "--memory", "3e7")
    assert (code, err) == (0, "")
    assert out == (
        "volumes.json, volumes of 64x64x64, 1 at once: --elastic=2-MAX,parallel=spatial,unit=2 is"
        " the least that fits into 30 MB\n"
        "LAYOUT  SLAB      ACTIVATIONS   PLANES  WORKING  WEIGHTS   MEMORY     SENT\n"
        "1x1     64x64x64        21 MB      0 B  33.6 MB  27.9 kB  54.6 MB      0 B\n"
        "1x1s2   32x64x64      10.5 MB  65.5 kB  16.8 MB  27.9 kB  27.4 MB  65.5 kB\n"
    )
    answer = json.loads(run(volumes, "--memory", "3e7", "--batch", "2", "--json")[1])
    assert answer["unit"] == 4
    assert answer["groups"][-1]["memory_bytes"] < 3e7
    assert "is a network on volumes" in run(volumes, "--plans")[2]
    assert (
        "no group of up to 2 GPUs fits into 1 MB"
        in run(volumes, "--memory", "1e6", "--machines", "2")[1]
    )


def test_a_wrong_network_on_volumes_is_one_line(run, volumes):
    content = json.loads(volumes.read_text())
    for key, value, expected in (
        ("kind", "conv", "kind 'conv' is invalid; expected one of convolution"),
        ("channels", [4], "channels or extents; give those of input and output"),
        ("extents", [[0], [1]], "0 is invalid; expected whole numbers from 1 on"),
        ("windows", [{}], "windows: invalid; one for each dimension"),
        ("parameters", -1, "-1 is invalid; expected whole numbers from 0 on"),
    ):
        layer = content["volume_layers"][0] | {key: value}
        volumes.write_text(json.dumps(content | {"volume_layers": [layer]}))
        code, out, err = run(volumes, "--memory", "3e7")
        assert (code, out) == (2, "")
        assert err.startswith(f"selastic: {volumes}: volume_layers[0]")
        assert expected in err
        assert err.count("\n") == 1
