"""What directories of known libraries show, file by file."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.checkpoints.checkpoint_formats import (
    Evidence,
    FileVersion,
    directory_evidence,
    is_temporary,
)
from slurm_elastic.job.unmodified.checkpoints.whole_files import is_whole

HF = "model.safetensors training_args.bin optimizer.pt scheduler.pt"
ZERO = "zero_pp_rank_0_mp_rank_00_optim_states.pt zero_pp_rank_1_mp_rank_00_optim_states.pt"


def shown(
    names: str,
    *,
    path: str = "/out/step-1",
    ranks: int | None = 2,
    whole: Iterable[str] = (),
    cut: Iterable[str] = (),
) -> Evidence:
    """Return the evidence of files that were written in this order, one per second."""
    files = {
        name: FileVersion(number, 10, (number + 1) * 10**9)
        for number, name in enumerate(names.split())
    }
    states = dict.fromkeys(whole, True) | dict.fromkeys(cut, False)
    return directory_evidence(path, files, states.get, ranks=ranks)


STATE = ("trainer_state.json",)


@pytest.mark.parametrize(
    ("names", "ranks", "evidence"),
    [
        (f"{HF} rng_state_0.pth rng_state_1.pth trainer_state.json", 2, Evidence.WHOLE),
        (f"{HF} trainer_state.json rng_state_1.pth rng_state_0.pth", 2, Evidence.WHOLE),
        (f"rng_state_1.pth {HF} trainer_state.json", 2, Evidence.LACKING),
        (f"rng_state_1.pth {HF} trainer_state.json", None, Evidence.UNKNOWN),
        (f"{HF} rng_state.pth trainer_state.json", 1, Evidence.WHOLE),
        (f"{HF} rng_state.pth trainer_state.json", 2, Evidence.UNKNOWN),
        (f"{HF} rng_state_0.pth trainer_state.json", 1, Evidence.UNKNOWN),
        (f"{HF} rng_state_0.pth rng_state_1.pth", 2, Evidence.LACKING),
        ("trainer_state.json rng_state.pth model.safetensors optimizer.pt", 1, Evidence.LACKING),
        ("model.safetensors training_args.bin trainer_state.json", 2, Evidence.WHOLE),
        ("model.safetensors training_args.bin", 2, Evidence.LACKING),
        ("m/__0_0.distcp m/.metadata rng_state.pth trainer_state.json", 1, Evidence.WHOLE),
        ("m/__0_0.distcp rng_state.pth trainer_state.json", 1, Evidence.LACKING),
    ],
)
def test_trainer(names: str, ranks: int | None, evidence: Evidence) -> None:
    assert shown(names, ranks=ranks, whole=STATE) is evidence
    assert shown(names, ranks=ranks) <= Evidence.LACKING, "its state is not shown to be whole"
    assert shown(names, ranks=ranks, whole=STATE, cut=[names.partition(" ")[0]]) is Evidence.CUT


@pytest.mark.parametrize(
    ("names", "evidence"),
    [
        ("__0_0.distcp __1_0.distcp .metadata", Evidence.WHOLE),
        ("__0_0.distcp __1_0.distcp", Evidence.CUT),
        ("__0_0.distcp .metadata __1_0.distcp", Evidence.UNKNOWN),
        (".metadata a b c __0_0.distcp __1_0.distcp", Evidence.LACKING),
        ("__0_0.distcp __0.metadata __1_0.distcp", Evidence.LACKING),
        ("__0_0.distcp __0.metadata __1_0.distcp __1.metadata", Evidence.WHOLE),
        ("__0_0.distcp .metadata extra.json", Evidence.UNKNOWN),
        ("__0_0.distcp .metadata .metadata.tmp", Evidence.UNKNOWN),
        ("a/__0_0.distcp a/.metadata b/__0_0.distcp", Evidence.CUT),
    ],
)
def test_distributed_checkpoints(names: str, evidence: Evidence) -> None:
    assert shown(names) is evidence


def test_lightning_sharded() -> None:
    names, path = "__0_0.distcp __1_0.distcp .metadata", "/out/epoch=1.ckpt"
    assert shown(names, path=path) is Evidence.LACKING
    assert shown(f"{names} meta.pt", path=path, whole=["meta.pt"]) is Evidence.WHOLE
    assert shown(f"{names} meta.pt", path=path, cut=["meta.pt"]) is Evidence.CUT
    assert shown(f"meta.pt {names}", path=path, whole=["meta.pt"]) is Evidence.LACKING


def test_accelerate() -> None:
    start = "model.safetensors optimizer.bin"
    assert shown(start) is Evidence.LACKING
    assert shown(f"random_states_1.pkl {start}") is Evidence.LACKING
    names = f"{start} random_states_0.pkl random_states_1.pkl"
    assert shown(names) is Evidence.UNKNOWN, "registered objects may follow"


@pytest.mark.parametrize("inside", [False, True])
def test_deepspeed(tmp_path: Path, inside: bool) -> None:
    names = [*ZERO.split(), "mp_rank_00_model_states.pt"]
    prefix = "global_step7/" if inside else ""
    path = str(tmp_path) if inside else f"{tmp_path}/global_step7"
    files = {f"{prefix}{name}": FileVersion(1, 10, 10**9) for name in names}

    def evidence(ranks: int | None, *, whole: bool | None = True) -> Evidence:
        return directory_evidence(path, files, lambda _: whole, ranks=ranks)

    assert evidence(2) is Evidence.LACKING, "no file latest"
    (tmp_path / "latest").write_text("global_step6")
    assert evidence(2) is Evidence.LACKING, "of an earlier save"
    (tmp_path / "latest").write_text("global_step7")
    assert evidence(2) is Evidence.WHOLE
    assert evidence(3) is Evidence.LACKING
    assert evidence(1, whole=None) is Evidence.WHOLE
    assert evidence(2, whole=None) is Evidence.UNKNOWN, "rank 1 may still write"
    assert evidence(None) is Evidence.UNKNOWN
    (tmp_path / "latest").write_bytes(b"\xff" * 100_000)
    assert evidence(2) is Evidence.LACKING


def test_files_of_an_unknown_format_show_no_end_of_a_save() -> None:
    assert shown("model.pt optimizer.pt") is Evidence.UNKNOWN
    assert shown("model.pt optimizer.pt", cut=["model.pt"]) is Evidence.CUT
    assert shown("model.pt " * 3, whole=["model.pt"]) is Evidence.UNKNOWN


def test_temporary_names() -> None:
    assert is_temporary("3.orbax-checkpoint-tmp-17")
    assert not is_temporary("step-3.pt")


def test_torchs_own_files(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    torch = pytest.importorskip("torch")
    state = {f"w{number}": torch.randn(20, 20) for number in range(3)}
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)

    def evidence() -> Evidence:
        files = {
            path.name: FileVersion(1, path.stat().st_size, path.stat().st_mtime_ns)
            for path in tmp_path.iterdir()
        }
        return directory_evidence(
            str(tmp_path), files, lambda name: is_whole(f"{tmp_path}/{name}"), ranks=1
        )

    assert evidence() is Evidence.WHOLE
    (tmp_path / ".metadata").rename(tmp_path / ".metadata.tmp")
    assert evidence() is Evidence.CUT
