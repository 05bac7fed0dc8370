"""Each block of docs/install*.md is run by a test, or named here with the reason why it is not."""

from tests.releases.install_page import blocks, pages_text

#: Section → number of blocks that `tests/releases/install_page.py` runs.
RUN = {
    "Five minutes to a first look": 1,
    "The directive": 1,
    "From observing to acting": 1,
    "Several clusters": 1,
    "Slurm under a prefix": 1,
    "Without packages": 2,
    "pyslurm": 1,
    "Conda, venv, uv": 1,
    "Removing": 1,
}
#: Section → number of blocks, and what is tried in their place.
NOT_RUN = {
    "A second controller": (2, "tests/cluster/controller/test_standby.py: it needs a second host"),
    "The controller as a container": (1, "it needs a Docker of the host; by hand"),
    "Container images": (2, "they need images of a registry, and apptainer or pyxis"),
}


def test_every_block_of_the_page_is_tried_or_named():
    counts = {}
    for block in blocks(pages_text()):
        counts[block.section] = counts.get(block.section, 0) + 1
    assert counts == RUN | {section: count for section, (count, _) in NOT_RUN.items()}
