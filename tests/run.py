"""Runs parts of the tests, and says at the end what the runs have in common.

    python -m tests.run [lint] [unit] [cluster] [pytest's options]

The image of the container cluster is built while the parts before `cluster` run. Each worker of
the cluster tests has a cluster of its own: they mostly wait. As real daemons on a shared machine
are late at times, a cluster test that fails is tried once more, after the others and alone. At
most `SECOND_TRIES` may need that; all are named at the end. Other tests have one try.

Exit code 0: all parts passed. 1: something failed, and what stood after it did not run.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.support.outcomes import Outcome, lacking, read

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "contrib" / "cluster" / "cluster"
NO_DOCKER = 3  # exit code of `cluster`
#: Clusters at once, on two cores: more of them would only slow each other down.
CLUSTERS = 4
SECOND_TRIES = 3
SLOWEST = 10
#: Exit code of pytest.
SOME_FAILED = 1


class Run:
    """One run of several parts.

    Args:
        options: for pytest, in every part.
        folder: for the outcomes of each part, and the log of the image's build.
    """

    def __init__(self, options: list[str], folder: Path) -> None:
        self.options, self.folder = options, folder
        self.outcomes: list[Outcome] = []
        self.second_tries: dict[str, str] = {}  # last line of the first failure, by test
        self.times: dict[str, float] = {}
        self._image: subprocess.Popen[bytes] | None = None
        self._image_log = folder / "image.log"

    def build_image(self) -> None:
        """Begin to build the image of the container cluster."""
        with self._image_log.open("wb") as log:
            self._image = subprocess.Popen([CLUSTER, "build"], stdout=log, stderr=log)

    def lint(self) -> bool:
        """Check style, types and imports; tell whether all is well."""
        return subprocess.run(["make", "--no-print-directory", "lint"], check=False).returncode == 0

    def unit(self) -> bool:
        """Run the tests that need no cluster."""
        code, outcomes = self._pytest("unit", "-n", "2", "tests/unit", "tests/property")
        self.outcomes += outcomes
        return code == 0

    def cluster(self) -> bool:
        """Run the tests on container clusters; what failed, twice."""
        if not self._image_is_built():
            return False
        workers = ("-n", str(CLUSTERS), "--dist", "worksteal")
        code, outcomes = self._pytest("cluster", *workers, "tests/cluster")
        self.outcomes += outcomes
        failed = {outcome.test: outcome for outcome in outcomes if outcome.result == "failed"}
        if code != SOME_FAILED or not failed:
            return code == 0
        if len(failed) > SECOND_TRIES:
            print(f"tests: {len(failed)} cluster tests failed: too many for a second try")
            return False
        self.second_tries = {test: outcome.reason for test, outcome in failed.items()}
        print(f"tests: second try of {len(failed)} cluster tests", flush=True)
        code, outcomes = self._pytest("second try", *failed)
        for again in outcomes:
            failed[again.test].result = again.result
            failed[again.test].seconds += again.seconds
        return code == 0

    def summary(self) -> None:
        """Print what the parts have in common."""
        results = Counter(outcome.result for outcome in self.outcomes)
        counts = ", ".join(f"{count} {result}" for result, count in sorted(results.items()))
        times = ", ".join(f"{part} {clock(seconds)}" for part, seconds in self.times.items())
        print(f"\ntests: {counts or 'none run'}; {times}")
        print(f"tests: the {SLOWEST} slowest")
        slowest = sorted(self.outcomes, key=lambda outcome: outcome.seconds, reverse=True)
        for outcome in slowest[:SLOWEST]:
            print(f"  {outcome.seconds:6.1f} s  {outcome.test}")
        for test, reason in self.second_tries.items():
            print(f"tests: needed a second try: {test}: {reason}")
        for line in lacking(self.outcomes):
            print(f"tests: {line}")

    def close(self) -> None:
        """Leave no build behind."""
        if self._image and self._image.poll() is None:
            self._image.terminate()
            self._image.wait()

    def _pytest(self, part: str, *words: str) -> tuple[int, list[Outcome]]:
        path = self.folder / part
        command = [sys.executable, "-m", "pytest", f"--outcomes={path}", *words, *self.options]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return code, read(path)

    def _image_is_built(self) -> bool:
        """Wait for it. Without Docker the tests say themselves that they cannot run."""
        if self._image is None:
            self.build_image()
        assert self._image is not None
        began = time.monotonic()
        code = self._image.wait()
        self.times["waiting for the image"] = time.monotonic() - began
        if code not in (0, NO_DOCKER):
            print(self._image_log.read_text("utf-8", "replace"))
        return code in (0, NO_DOCKER)


def clock(seconds: float) -> str:
    """Return minutes and seconds as people write them."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def main() -> int:
    """Run the parts in their order until one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=("lint", "unit", "cluster"))
    arguments, options = parser.parse_known_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, Path(folder))
        parts: dict[str, Callable[[], bool]] = {
            "lint": run.lint, "unit": run.unit, "cluster": run.cluster,
        }  # fmt: skip
        if "cluster" in arguments.parts:
            run.build_image()
        passed = False
        try:
            for part in arguments.parts:
                began = time.monotonic()
                passed = parts[part]()
                run.times[part] = time.monotonic() - began
                if not passed:
                    print(f"tests: {part} failed")
                    break
        finally:
            run.close()
            if arguments.parts != ["lint"]:
                run.summary()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
