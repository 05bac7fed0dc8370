"""The training library with Debian's torch: layout changes, and weight stashing."""

import base64
import io
import tarfile
from pathlib import Path

from tests.support.container_cluster.slurm_cluster import SlurmCluster

TESTS = Path(__file__).parents[2]
FILES = ("test_layout_changes.py", "pipeline/test_weight_stashing.py")
SETTINGS = "[pytest]\nfilterwarnings = error\nmarkers =\n    torch\n    timeout\n"
HOME = "/tmp/debian-torch"


def test_the_walk_and_weight_stashing(cluster: SlurmCluster) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(TESTS / "unit" / "training", "tests/unit/training")
        tar.add(TESTS / "conftest.py", "tests/conftest.py")
        tar.add(TESTS / "support", "tests/support")
    sent = base64.b64encode(packed.getvalue()).decode()
    cluster.exec(f"rm -rf {HOME}; mkdir {HOME}; base64 -d | tar -xC {HOME}", stdin=sent)
    cluster.exec(f"cat >{HOME}/pytest.ini", stdin=SETTINGS)
    done = cluster.exec(
        f"cd {HOME} && PYTHONPATH=/opt/src/slurm-elastic OMP_NUM_THREADS=1"
        f" python3 -m pytest -q -p no:cacheprovider "
        + " ".join(f"tests/unit/training/{name}" for name in FILES),
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
