"""The picture of the dashboard, from the answers of a server in place of Prometheus."""

import http.server
import json
import math
import threading
import urllib.parse

import pytest

from contrib.grafana import draw_dashboard
from tests.support.needs import require


@pytest.fixture
def prometheus():
    """Yield a server that answers each query with two series, or refuses it, and its queries."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            query = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)["query"][0]
            self.server.asked.append(query)
            refused = self.server.refuses
            values = [[1000 + 5 * i, str(i)] for i in range(5)] + [[1025, "NaN"]]
            rows = [{"metric": {"use": use}, "values": values} for use in ("idle", "rigid")]
            body = {"error": "parse error"} if refused else {"data": {"result": rows}}
            self.send_response(400 if refused else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.refuses = [], False
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def source(server):
    return draw_dashboard.Source(f"http://127.0.0.1:{server.server_port}", "site", 1000, 1200)


def test_every_panel_is_drawn_from_its_own_queries(prometheus, tmp_path):
    require("python/matplotlib")
    panels = json.loads(draw_dashboard.DASHBOARD.read_text())["panels"]
    assert draw_dashboard.draw(panels, source(prometheus), tmp_path / "x.png") == []
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert len(prometheus.asked) == sum(len(p["targets"]) for p in panels)
    assert not [query for query in prometheus.asked if "$" in query]


def test_legends_are_filled_and_missing_values_left_out(prometheus):
    (idle, _) = source(prometheus).series('x{job="$job"}', "{{use}} GPUs")
    assert idle[0] == "idle GPUs"
    assert idle[1][:5] == [0, 1, 2, 3, 4]
    assert all(math.isnan(value) for value in idle[1][5:])
    assert len(idle[1]) == 1 + 200 / 5
    assert prometheus.asked == ['x{job="site"}']


def test_a_query_that_is_refused_is_named(prometheus):
    prometheus.refuses = True
    with pytest.raises(ValueError, match=r"x\{: .*parse error"):
        source(prometheus).series("x{", "")
