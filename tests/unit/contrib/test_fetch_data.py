"""contrib/fetch-data against a small mirror on this machine, and its table."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support import published_data
from tests.support.patience import PATIENCE_S

CONTRIB = Path(__file__).parents[3] / "contrib"
TABLE = tomllib.loads((CONTRIB / "published-data.toml").read_text("utf-8"))
JOBS = [
    {"job_id": "1", "user": "u", "arrival_time": "5", "model": "VGG", "total_iterations": "9",
     "time_per_iteration": "0.5", "max_parallelism": "16"},
    {"job_id": "2", "user": "u", "arrival_time": "7", "model": "BERT", "total_iterations": "8",
     "time_per_iteration": "0.25", "max_parallelism": "8"},
]  # fmt: skip
PUBLISHED = {
    "sim/a=1.csv": b"a,b\n1,2\n",
    "sim/deep/b.csv": b"x" * 200_000,
    "jobs.json": json.dumps(JOBS).encode(),
}
HEADER = b"job_id,arrival_time,model,total_iterations,time_per_iteration,max_parallelism\r\n"
GANGS = HEADER + b"1,5,VGG,9,0.5,16\r\n2,7,BERT,8,0.25,8\r\n"
SMALL_GANGS = HEADER + b"2,7,BERT,8,0.25,8\r\n"


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def lines_of_table():
    plain = {"a.csv": "sim/a=1.csv", "deep/b.csv": "sim/deep/b.csv"}
    yield "[one]\ntitle='t'\nrepository='owner/one'\ncommit='c1'\nlicence='MIT'\n[one.files]"
    for path, source in plain.items():
        yield f"'{path}' = {{ from = '{source}', sha256 = '{sha256(PUBLISHED[source])}' }}"
    yield "[one.unpublished]\n'reference' = 'made by hand'"
    yield "[two]\ntitle='t'\nrepository='owner/two'\ncommit='c2'\nlicence='MIT'\n[two.unpublished]"
    for path, content, more in (("all.csv", GANGS, ""), ("few.csv", SMALL_GANGS, "most_gpus = 8")):
        yield f"[two.files.'{path}']\nfrom = 'jobs.json'\nsha256 = '{sha256(content)}'"
        yield f"from_sha256 = '{sha256(PUBLISHED['jobs.json'])}'\nconvert = 'gangs'\n{more}"


class Mirror(ThreadingHTTPServer):
    """Serves PUBLISHED; `replies` replace the answers to a path, one request after the other."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: dict[str, list] = {}
        self.requests: list[str] = []
        self.stop = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        owner, commit, source = self.path.removeprefix("/owner/").split("/", 2)
        assert (owner, commit) in {("one", "c1"), ("two", "c2")}
        source = unquote(source)
        self.server.requests.append(source)
        content = PUBLISHED[source]
        planned = self.server.replies.get(source)
        reply = planned.pop(0) if planned else content
        if isinstance(reply, int):
            self.send_response(reply)
            self.send_header("Retry-After", "0")
            self.end_headers()
        elif reply == "silent":
            self.server.stop.wait(30)
        elif reply == "slow":
            self.send_response(200)
            self.end_headers()
            while not self.server.stop.wait(0.05):
                self.wfile.write(b"x")
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(reply)

    def log_message(self, *_):
        pass


@pytest.fixture
def mirror():
    with Mirror() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.stop.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def checkout(tmp_path):
    """The script with a small table beside it."""
    folder = tmp_path / "checkout" / "contrib"
    folder.mkdir(parents=True)
    shutil.copy(CONTRIB / "fetch-data", folder)
    (folder / "published-data.toml").write_text("\n".join(lines_of_table()))
    return folder.parent


def command(checkout, mirror, *words):
    url = mirror if isinstance(mirror, str) else mirror.url
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    words = [sys.executable, checkout / "contrib" / "fetch-data", "--mirror", url, *words]
    return {"args": [str(w) for w in words], "env": environment, "text": True}


@pytest.fixture
def fetch(checkout, mirror):
    def run(*words, url=None):
        call = command(checkout, url or mirror, *words)
        done = subprocess.run(**call, capture_output=True, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


ALL = {"one/a.csv", "one/deep/b.csv", "two/all.csv", "two/few.csv"}


def test_all_files_are_laid_out_and_converted(fetch, checkout, mirror):
    code, out, err = fetch()
    assert (code, err) == (0, "")
    data = checkout / "data"
    assert files(data) == ALL
    assert (data / "one" / "a.csv").read_bytes() == PUBLISHED["sim/a=1.csv"]
    assert (data / "two" / "all.csv").read_bytes() == GANGS
    assert (data / "two" / "few.csv").read_bytes() == SMALL_GANGS
    assert sorted(mirror.requests) == sorted(PUBLISHED), "one source of two files is fetched once"
    assert "one: 2 files, 0 there already\none: 2 files fetched, 0.2 MB" in out
    assert "one: reference is not published (made by hand)" in out
    assert "\r" not in out, "plain where there is no terminal"


def test_what_is_there_is_kept_and_the_rest_is_fetched(fetch, checkout, mirror):
    assert fetch("--only", "one")[0] == 0
    (checkout / "data" / "one" / "a.csv").unlink()
    mirror.requests.clear()
    code, out, _ = fetch("--only", "one")
    assert (code, mirror.requests) == (0, ["sim/a=1.csv"])
    assert "one: 2 files, 1 there already" in out
    mirror.requests.clear()
    assert fetch("--only", "one")[0] == 0
    assert mirror.requests == []


def test_another_folder(fetch, checkout, tmp_path):
    assert fetch("--only", "two", "--into", tmp_path / "there")[0] == 0
    assert files(tmp_path / "there") == {"two/all.csv", "two/few.csv"}
    assert not (checkout / "data").exists()


def one_line(answer, *parts):
    code, _, err = answer
    assert code == 1
    assert err.startswith("fetch-data: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_wrong_checksum_writes_nothing(fetch, checkout, mirror):
    mirror.replies["sim/deep/b.csv"] = [b"y" * 200_000]
    one_line(fetch(), "sim/deep/b.csv: SHA-256", "the file was not written", "--mirror")
    assert files(checkout / "data") <= {"one/a.csv"}
    assert fetch()[0] == 0
    assert files(checkout / "data") == ALL


def test_a_file_that_differs_is_not_overwritten(fetch, checkout, mirror):
    target = checkout / "data" / "one" / "a.csv"
    target.parent.mkdir(parents=True)
    target.write_text("mine")
    one_line(fetch(), f"{target}: differs from the published file", "move it away")
    assert target.read_text() == "mine"
    assert mirror.requests == []


def test_not_found(fetch, mirror):
    mirror.replies["sim/a=1.csv"] = [404]
    one_line(fetch(), "sim/a=1.csv: HTTP 404", "check --mirror")


def test_a_busy_server_is_asked_again(fetch, mirror):
    mirror.replies["sim/a=1.csv"] = [503, 429]
    assert fetch("--only", "one")[0] == 0
    mirror.replies["jobs.json"] = [429, 429, 429]
    one_line(fetch("--only", "two"), "HTTP 429", "run the command later")


def test_an_answer_that_ends_early_is_asked_for_again(fetch, mirror):
    mirror.replies["sim/deep/b.csv"] = [b"x" * 1000]
    assert fetch("--only", "one")[0] == 0
    mirror.replies["jobs.json"] = [b"["] * 3
    one_line(fetch("--only", "two"), "the connection ended early", "run the command again")


@pytest.mark.parametrize("reply", ["silent", "slow"])
def test_no_answer_in_time(fetch, checkout, mirror, reply):
    mirror.replies["sim/deep/b.csv"] = [reply] * 3
    answer = fetch("--only", "one", "--timeout", "0.3")
    one_line(answer, "not received within 0.3 s", "--timeout")
    assert files(checkout / "data") <= {"one/a.csv"}


def test_no_network(fetch):
    one_line(fetch(url="http://127.0.0.1:1"), "127.0.0.1:1: cannot be reached", "https_proxy")
    one_line(fetch(url="http://nowhere.invalid"), "nowhere.invalid: cannot be reached")


def test_a_folder_that_cannot_be_written(fetch, tmp_path):
    (tmp_path / "file").write_text("")
    one_line(fetch("--into", tmp_path / "file"), f"{tmp_path}/file/one", "--into")


def test_ctrl_c_ends_at_once_and_leaves_no_part(checkout, mirror):
    mirror.replies["sim/deep/b.csv"] = ["silent"]
    call = command(checkout, mirror, "--only", "one")
    with subprocess.Popen(**call, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        limit = time.monotonic() + PATIENCE_S
        while not (checkout / "data" / "one" / "a.csv").exists():
            assert time.monotonic() < limit
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 130
    assert err.endswith("fetch-data: stopped; run it again to fetch the rest\n")
    assert files(checkout / "data") == {"one/a.csv"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--only", "three"), "choose from"),
        (("--mirror", "ftp://x"), "'ftp://x' is invalid: expected http://"),
        (("--timeout", "0"), "'0' is invalid: expected seconds above 0"),
        (("--timeout", "soon"), "'soon' is invalid"),
    ],
)
def test_wrong_use(fetch, words, text):
    code, _, err = fetch(*words)
    assert code == 2
    assert text in err


def test_the_list_names_source_and_licence(fetch, mirror):
    code, out, _ = fetch("--list")
    assert (code, mirror.requests) == (0, [])
    assert "source: https://github.com/owner/one, commit c1\n  licence: MIT" in out


def test_the_page_names_sources_and_what_is_not_published():
    page = (CONTRIB.parent / "docs" / "data.md").read_text("utf-8")
    for name, entry in TABLE.items():
        assert f"https://github.com/{entry['repository']}), `{entry['commit']}`" in page
        for path in entry["unpublished"]:
            assert f"`{name}/{path}" in page
    count = sum(len(entry["files"]) for entry in TABLE.values())
    assert f"\n{count} files," in page


@pytest.mark.parametrize("name", TABLE)
def test_the_table_describes_the_data_folder(name):
    """Each published file has the table's checksum, and every other one is named as unpublished."""
    entry = TABLE[name]
    folder = published_data.require(name)
    assert len(entry["commit"]) == 40
    for path, source in entry["files"].items():
        assert sha256((folder / path).read_bytes()) == source["sha256"], path
    others = files(folder) - set(entry["files"]) - {"README.md"}
    assert {path for path in others if path.split("/")[0] not in entry["unpublished"]} == set()
