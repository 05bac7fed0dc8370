"""Build of the image, with the builder's steps as progress."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

from clusterlib.compose import LABEL, image_name
from clusterlib.context import CLUSTER_DIR, build_context
from clusterlib.engine import attempt, ensure_base_image, run
from clusterlib.progress import ClusterError, task
from clusterlib.slurm_build import SlurmBuild

# Output of the builders: "Step 3/20 : RUN …" (classic) and "#7 [3/20] RUN …" (BuildKit).
STEP = re.compile(r"^(?:Step (\d+/\d+) :|#\d+ \[(?:\S+ )?\s*(\d+/\d+)\]) (.*)")
CACHED = re.compile(r"Using cache$|^#\d+ CACHED$")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Passed on where the host has them; Docker knows the proxy variables by itself.
BUILD_ARGS = (
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "PIP_INDEX_URL",
)

#: Name of the image's first stage: Debian with Slurm and a compiler.
SLURM_IMAGE = "slurm-elastic-site:trixie"


def build_slurm_image() -> str:
    """Build the first stage alone, of which clusters have the same layers; return its name."""
    ensure_base_image()
    recipe = (CLUSTER_DIR / "Dockerfile").read_bytes()
    run("docker", "build", "--quiet", "--tag", SLURM_IMAGE, "--target=slurm", "-", stdin=recipe)
    return SLURM_IMAGE


def build_image(name: str, slurm: SlurmBuild) -> None:
    """Build the image of the cluster `name`; cached layers make this a matter of seconds."""
    ensure_base_image()
    arguments = [f"--build-arg={key}" for key in BUILD_ARGS if key in os.environ]
    command = [
        "docker",
        "build",
        "-t",
        image_name(name),
        "--label",
        f"{LABEL}={name}",
        *arguments,
        "-",
    ]
    with task("image") as progress, tempfile.TemporaryFile() as context:
        context.write(build_context(slurm))
        context.seek(0)
        build = subprocess.Popen(
            command,
            stdin=context,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"BUILDKIT_PROGRESS": "plain"},
        )
        assert build.stdout is not None
        lines: list[str] = []
        step = None
        for line in build.stdout:
            lines.append(COLOUR.sub("", line).strip())
            if step and not step[3].startswith("FROM") and not CACHED.search(line):
                progress.detail(f"{step[1] or step[2]} {step[3][:70]}")
            step = STEP.match(line)
        if build.wait():
            raise ClusterError(f"the image does not build: {_reason(lines)}")


def _reason(lines: list[str]) -> str:
    """Return the last output line before the builder's own error message."""
    output = [line for line in lines if line and not line.startswith(("Removing", " --->"))]
    return " | ".join(output[-3:]) or "the builder printed nothing"


def prune_images(name: str) -> None:
    """Remove what earlier builds of this cluster's image left without a name."""
    attempt("docker", "image", "prune", "-f", "--filter", f"label={LABEL}={name}")
