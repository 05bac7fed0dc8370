"""slurm-elastic on other releases of Slurm than the cluster tests', in small clusters of their own.

Part of `make test`, beside the cluster tests (tests/run.py). Without a built tree of a release its
test is skipped.
"""

import pytest

from tests.releases.release_trial import SERIES, STEPS, missing, try_release
from tests.support.container_cluster.slurm_cluster import WAIT_FACTOR, cluster_name
from tests.support.needs import require

#: In the form that tests/support/needs.py sums up in one line.
NO_TREE = (
    "Slurm {} is missing: a folder with slurm-RELEASE-trixie-*.tar.xz in SLURM_TREES,"
    " contrib/cluster/README.md"
)

#: The release of the cluster tests, which look at the same steps more closely. `make test-releases`
#: tries it like the others.
OF_CLUSTER_TESTS = "24.11"


@pytest.mark.cluster
@pytest.mark.timeout(WAIT_FACTOR * 300)
@pytest.mark.parametrize("series", [s for s in SERIES if s != OF_CLUSTER_TESTS])
def test_every_step_passes(series: str) -> None:
    if missing(series):
        pytest.skip(NO_TREE.format(series))
    require("docker")
    (result,) = try_release(series, name=f"{cluster_name()}-slurm-{series.replace('.', '-')}")
    assert result.get("failure", "") == ""
    assert result["release"].startswith(f"{series}.")
    assert list(result["steps"]) == list(STEPS)
