"""Runs parts of the tests, and says at the end what the runs have in common.

    python -m tests.run [lint] [docs] [unit] [cluster] [pytest's options]

The image of the container cluster is built, the first cluster started, and the tests compiled,
while `lint` runs. Then `unit` and `cluster` run beside each other, as cluster tests often wait, and
`docs` builds the documentation; the output of `unit` is printed at its end. Each worker of the
cluster tests, and each trial of a release of Slurm, has a cluster of its own. Beside them the
releases are tried, and packages of one release of Debian built and tried.
Pure computations are the last unit tests, and get what all other tests leave of the cores. Cluster
tests that measure times (mark `alone`) come last, two at once, and beside them only cluster tests
whose jobs sleep (mark `sleeping`), and what is left of these computations. As processes on a shared
machine are late at times, a test that fails is tried once more at the end, when nothing runs beside
it. At most `SECOND_TRIES` may need that; all are named.

Exit code 0: all parts passed. 1: something failed; if it was `lint`, nothing else ran.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from tests.support.outcomes import Outcome, lacking, read

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "contrib" / "cluster" / "cluster"
BUILD_PACKAGES = ROOT / "contrib" / "packaging" / "build"
#: Pure computations, in which no time matters: they come last.
COMPUTATIONS = (
    "tests/property", "tests/unit/cli", "tests/unit/core", "tests/unit/models",
    "tests/unit/placement", "tests/unit/policies", "tests/unit/simulator",
    "tests/unit/training/pipeline", "tests/unit/training/spatial", "tests/unit/training/tensor",
    "tests/unit/training/test_layout_changes.py", "tests/unit/training/test_tensor_training.py",
)  # fmt: skip
UNIT_TESTS = "tests/unit"
CLUSTER_TESTS = "tests/cluster"
RELEASE_TESTS = "tests/releases"
#: Packages that are built and tried, those of one release of Debian; the rest: make test-packages.
PACKAGES = "trixie"
PACKAGE_TESTS = (
    "tests/packages/test_packages.py::test_a_site_installs_uses_and_removes_the_packages"
    f"[{PACKAGES}]"
)
NO_DOCKER = 3  # exit code of `cluster`
#: Processes of the unit tests, for two cores: some wait for programs that they start.
PROCESSES = 3
#: Processes of the computations: they never wait.
COMPUTING = 2
#: Clusters at once: their tests mostly wait. With four, two cores were idle a third of the time.
CLUSTERS = 6
#: The same where the cores read fewer than so many millions of scattered objects a second: there,
#: with five, jobs and nodes were too late for the controller, and for the limits of tests.
CLUSTERS_ON_SLOW_MEMORY, SLOW_MEMORY = 4, 3.5
#: Cluster tests that come last. Two of those that measure times leave half of two cores idle.
LAST_TESTS = "alone or sleeping"
#: Trials of releases of Slurm beside them: jobs that sleep, which need little of a core.
TRIALS = 2
#: Before parts that run beside the cluster tests and do not depend on time. All containers together
#: weigh as much as one process of the same priority: without it daemons would wait for their turn.
#: Cluster tests take longest and wait most, so they come first; the others get what they leave.
YIELDING = ("nice", "-n", "19")
#: Before computations: whatever else wants a core gets it at once, so that they run beside tests
#: that measure times, too.
IDLE = ("chrt", "--idle", "0")
SECOND_TRIES = 3
#: pytest's limit for a test of the parts that yield, seconds: they may wait long for their turn.
YIELDING_LIMIT = "--timeout=2400"
SLOWEST = 10
#: Exit codes of pytest.
SOME_FAILED, NOTHING_SELECTED = 1, 5


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
        self.core_speeds = core_speeds()
        self._began = time.monotonic()
        self.broken = False  # something else than a test failed
        self._adding = threading.Lock()
        #: No unit tests but pure computations are left.
        self.cores_are_free = threading.Event()
        self._has_docker = True
        self._up: subprocess.Popen[bytes] | None = None
        self._up_log = folder / "up.log"

    def start_cluster(self) -> None:
        """Begin to bring up the first container cluster, for which the image is built."""
        with self._up_log.open("wb") as log:
            self._up = subprocess.Popen([CLUSTER, "up"], stdout=log, stderr=log)

    def compile_tests(self) -> None:
        """Compile the tests, which pytest rewrites: one process does it for all others."""
        command = [*YIELDING, sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)

    def lint(self) -> bool:
        """Check style, types and imports; tell whether all is well."""
        return subprocess.run(["make", "--no-print-directory", "lint"], check=False).returncode == 0

    def docs(self) -> bool:
        """Build the documentation; its warnings are errors."""
        return self._printed_if_failed("docs", self._build_docs)

    def _build_docs(self, log: IO[bytes]) -> bool:
        began = time.monotonic()
        command = [*YIELDING, "make", "--no-print-directory", "docs"]
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
        self.times["docs"] = time.monotonic() - began
        self.broken |= code != 0
        return code == 0

    def unit(self) -> bool:
        """Run the tests that need no cluster, and print then how they went."""
        path = self.folder / "unit.log"
        with path.open("wb") as log:
            try:
                others = [f"--ignore={folder}" for folder in COMPUTATIONS]
                words = ("-n", str(PROCESSES), YIELDING_LIMIT, UNIT_TESTS, *others)
                passed = self._pytest("unit", *words, log=log, before=YIELDING)
            finally:
                self.cores_are_free.set()
            words = ("-n", str(COMPUTING), YIELDING_LIMIT, *COMPUTATIONS)
            passed &= self._pytest("computations", *words, log=log, before=IDLE)
        print(path.read_text("utf-8", "replace"))
        return passed

    def cluster(self) -> bool:
        """Run the tests on container clusters."""
        is_slow = self.core_speeds[1] < SLOW_MEMORY
        clusters = ("-n", str(CLUSTERS_ON_SLOW_MEMORY if is_slow else CLUSTERS))
        if not self._is_up():
            self.broken = True
            return False
        with ThreadPoolExecutor(2) as pool:
            others = pool.submit(self._packages), pool.submit(self._releases)
            others_first = ("-m", f"not ({LAST_TESTS})", CLUSTER_TESTS)
            passed = self._pytest("cluster", *clusters, *others_first)
            passed &= all(other.result() for other in others)
        self.cores_are_free.wait()
        last = ("-m", LAST_TESTS, CLUSTER_TESTS)
        return passed & self._pytest("cluster, alone", *clusters, *last)

    def _releases(self) -> bool:
        """Try the releases of Slurm."""
        return self._printed_if_failed(
            "releases",
            lambda log: self._pytest("releases", "-n", str(TRIALS), RELEASE_TESTS, log=log),
        )

    def _packages(self) -> bool:
        """Build packages, and install, use and remove them."""
        return self._printed_if_failed("packages", self._build_and_try_packages)

    def _build_and_try_packages(self, log: IO[bytes]) -> bool:
        if self._has_docker:
            command = [*YIELDING, sys.executable, str(BUILD_PACKAGES), PACKAGES, "--quick"]
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
            if code:
                self.broken = True
                return False
        return self._pytest("packages", PACKAGE_TESTS, log=log, before=YIELDING)

    def _printed_if_failed(self, name: str, work: Callable[[IO[bytes]], bool]) -> bool:
        """Do work that writes to a log, and print that only if it fails."""
        path = self.folder / f"{name}.log"
        with path.open("wb") as log:
            passed = work(log)
        if not passed:
            print(path.read_text("utf-8", "replace"))
        return passed

    def second_try(self) -> bool:
        """Run the tests that failed once more; tell whether all pass now."""
        failed = {o.test: o.reason for o in self.outcomes if o.result == "failed"}
        if self.broken or not 0 < len(failed) <= SECOND_TRIES:
            print(f"tests: {len(failed)} failed: there is no second try")
            return False
        print(f"tests: second try of {len(failed)}")
        self.second_tries = failed
        self.outcomes = [o for o in self.outcomes if o.test not in failed]
        return self._pytest("second try", *failed) and all(
            o.result == "passed" for o in self.outcomes if o.test in failed
        )

    def summary(self) -> None:
        """Print what the parts have in common."""
        results = Counter(outcome.result for outcome in self.outcomes)
        counts = ", ".join(f"{count} {result}" for result, count in sorted(results.items()))
        times = ", ".join(f"{part} {clock(seconds)}" for part, seconds in self.times.items())
        in_all = clock(time.monotonic() - self._began)
        print(f"\ntests: {counts or 'none run'} in {in_all}; {times}")
        speeds = zip(self.core_speeds, core_speeds(), strict=True)
        loop, memory = (f"{before:.0f} ({after:.0f} at the end)" for before, after in speeds)
        print(f"tests: million rounds of a loop per second: {loop}; reads of memory: {memory}")
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
        if self._up and self._up.poll() is None:
            self._up.terminate()
            self._up.wait()

    def _pytest(
        self,
        name: str,
        *words: str,
        log: IO[bytes] | None = None,
        before: tuple[str, ...] = (),
    ) -> bool:
        """Run pytest, after other words, and keep the outcomes; tell whether all is well.

        Args:
            name: of the part.
            words: options of pytest, and tests.
            log: for its output; None: it is printed.
            before: words of the command before those of pytest.
        """
        path = self.folder / name
        pytest = [sys.executable, "-m", "pytest"]
        command = [*before, *pytest, *words, *self.options, f"--outcomes={path}"]
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
        self.times[name] = time.monotonic() - began
        with self._adding:
            self.outcomes += read(path)
        self.broken |= code not in (0, SOME_FAILED, NOTHING_SELECTED)
        return code in (0, NOTHING_SELECTED)

    def _is_up(self) -> bool:
        """Wait for the first cluster. Without Docker the tests say that they cannot run."""
        if self._up is None:
            self.start_cluster()
        assert self._up is not None
        began = time.monotonic()
        code = self._up.wait()
        self._has_docker = code != NO_DOCKER
        self.times["wait for the image"] = time.monotonic() - began
        if code not in (0, NO_DOCKER):
            print(self._up_log.read_text("utf-8", "replace"))
        return code in (0, NO_DOCKER)


def core_speeds() -> tuple[float, float]:
    """Return millions of rounds of an empty loop, and of reads of scattered objects, per second.

    The minutes of two runs can be compared by them: on shared machines either changes by two within
    hours. They count seconds of CPU time; the fastest of three times counts.
    """
    # One cycle of all objects, each far from the one before (Hull and Dobell, SIAM Review 1962).
    following = [(314_161 * place + 1) % 500_000 for place in range(500_000)]

    def rounds() -> None:
        for _ in range(500_000):
            pass

    def reads() -> None:
        at = 0
        for _ in range(500_000):
            at = following[at]

    def fastest(work: Callable[[], None]) -> float:
        times = []
        for _ in range(3):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
        return 0.5 / min(times)

    return fastest(rounds), fastest(reads)


def clock(seconds: float) -> str:
    """Return minutes and seconds as people write them."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def main() -> int:
    """Run `lint`, then the other parts beside each other."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=("lint", "docs", "unit", "cluster"))
    arguments, options = parser.parse_known_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Thousands of processes import the project or its tests: each would compile them.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Threads of OpenBLAS and OpenMP that wait for others keep a core busy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, Path(folder))
        parts: dict[str, Callable[[], bool]] = {
            "lint": run.lint, "docs": run.docs, "unit": run.unit, "cluster": run.cluster,
        }  # fmt: skip
        if "cluster" in arguments.parts:
            run.start_cluster()

        def passes(part: str) -> bool:
            passed = parts[part]()
            if not passed:
                print(f"tests: {part} failed")
            return passed

        try:
            tests = [part for part in arguments.parts if part != "lint"]
            if "unit" not in tests:
                run.cores_are_free.set()
            passed = True
            if "lint" in arguments.parts:
                with ThreadPoolExecutor(1) as pool:
                    if tests:
                        pool.submit(run.compile_tests)
                    began = time.monotonic()
                    passed = passes("lint")
                    run.times["lint"] = time.monotonic() - began
            if passed and tests:
                with ThreadPoolExecutor(len(tests)) as pool:
                    passed = all(list(pool.map(passes, tests)))
                passed = passed or run.second_try()
        finally:
            run.close()
            if arguments.parts != ["lint"]:
                run.summary()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
