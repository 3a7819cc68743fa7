"""The pictures of the dashboards: drawn from what a Prometheus answers, with packages of fixed versions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.monitoring.files import DASHBOARDS, REPOSITORY, load, panels

PREVIEW = REPOSITORY / "grafana" / "preview"
PANELS = [panel for path in DASHBOARDS for panel in panels(load(path))]


def test_docs_say_which_panels_are_drawn_and_with_what() -> None:
    drawn = re.search(r"const KINDS = \{(.*?)\}", (PREVIEW / "page.jsx").read_text(encoding="utf-8"))
    assert drawn is not None
    kinds = set(re.findall(r"(\w+):", drawn[1]))
    number = sum(panel["type"] in kinds for panel in PANELS)
    docs = (REPOSITORY / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert f"{number} of the {len(PANELS)} panels are of these kinds" in docs
    assert f"histories, {len(PANELS) - number} panels, are parts of Grafana itself" in docs
    packages = load(PREVIEW / "package.json")["dependencies"]
    assert f"`@grafana/ui` {packages['@grafana/ui']}" in docs
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in packages.values())


class _Prometheus(BaseHTTPRequestHandler):
    """Answers every question with two clients that rise."""

    def do_GET(self) -> None:
        place, _, words = self.path.partition("?")
        asked = {key: values[0] for key, values in urllib.parse.parse_qs(words).items()}
        labels = [{"run": "night", "client": name} for name in ("one", "two")]
        if place.endswith("/values"):
            data: object = ["one", "two"]
        elif place.endswith("_range"):
            start, end, step = (float(asked[key]) for key in ("start", "end", "step"))
            times = [start + step * n for n in range(int((end - start) / step) + 1)]
            data = {"result": [{"metric": m, "values": [[t, str(t - start)] for t in times]} for m in labels]}
        else:
            data = {"result": [{"metric": m, "value": [1.0, "1"]} for m in labels]}
        body = json.dumps({"status": "success", "data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def prometheus() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Prometheus)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_every_dashboard_becomes_a_picture(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if shutil.which("npm") is None or chromium is None:
        pytest.skip("npm or chromium is missing")
    shutil.copytree(PREVIEW, tmp_path / "preview", ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(PREVIEW.parent / "dashboards", tmp_path / "dashboards")
    install = ["npm", "install", "--no-audit", "--no-fund"]
    done = subprocess.run(install, cwd=tmp_path / "preview", capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install Grafana's components here: {done.stderr[-300:]}")
    with prometheus() as address:
        draw = ["node", "draw.mjs", "--prometheus", address, "--out", "out", "--chromium", chromium]
        done = subprocess.run(draw, cwd=tmp_path / "preview", capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    assert "no data" not in done.stdout
    pictures = {path.stem: path.stat().st_size for path in (tmp_path / "preview" / "out").glob("*.png")}
    assert {path.stem for path in DASHBOARDS} == pictures.keys()
    assert min(pictures.values()) > 20_000, "an empty page is smaller"
