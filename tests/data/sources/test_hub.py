"""The hub source against a small hub on loopback: first with it, then offline from the cache."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support import SCRIPTS

COMMIT = "c" * 40
FILES = {
    "README.md": b"---\nlicense: cc0-1.0\n---\n# Sums\n",
    "train.jsonl": b"".join(
        json.dumps({"q": f"{i} + 1", "a": str(i + 1)}).encode() + b"\n" for i in range(30)
    ),
}
FETCH = """
import json, sys
from pathlib import Path
from expertflow.data.records import SourceSpec
from expertflow.data.read import iter_shard
from expertflow.data.sources import hub
revision, files = hub.fetch(SourceSpec(name="s", kind="hub", id="someone/sums"))
rows = [r.value for i in range(2) for r in iter_shard(tuple(files), index=i, n_shards=2)]
print(json.dumps([revision, [f.n_records for f in files], rows]))
"""


class Hub(BaseHTTPRequestHandler):
    """Serve one data set, as much of the hub's interface as its client asks for."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        asked = json.loads(self.rfile.read(length) or b"{}")
        paths = [path for path in asked.get("paths", []) if path in FILES]
        self.send_json([entry(path) for path in paths])

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/datasets/someone/sums/tree/"):
            self.send_json([entry(name) for name in FILES])
        elif path.startswith("/api/datasets/someone/sums"):
            siblings = [{"rfilename": name} for name in FILES]
            self.send_json({"id": "someone/sums", "sha": COMMIT, "siblings": siblings})
        elif path.rpartition("/")[2] in FILES and "/resolve/" in path:
            self.send(FILES[path.rpartition("/")[2]], body=body)
        else:
            self.send(b'{"error": "not here"}', status=404, body=body)

    def send_json(self, value: Any) -> None:
        self.send(json.dumps(value).encode(), kind="application/json")

    def send(
        self, content: bytes, *, status: int = 200, kind: str = "text/plain", body: bool = True
    ) -> None:
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


def entry(path: str) -> dict[str, Any]:
    content = FILES[path]
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid}


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def fetch(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", FETCH],
        env={**clean, "HF_HOME": str(home), "PYTHONPATH": str(SCRIPTS), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_data_set_is_pinned_fetched_and_then_read_offline(endpoint: str, tmp_path: Path) -> None:
    online = fetch(tmp_path, HF_ENDPOINT=endpoint)
    assert online.returncode == 0, online.stderr[-3000:]
    revision, counts, rows = json.loads(online.stdout)
    assert revision == COMMIT
    assert sum(counts) == 30
    assert rows == [json.loads(line) for line in FILES["train.jsonl"].splitlines()]
    offline = fetch(tmp_path, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr[-3000:]
    assert json.loads(offline.stdout) == [revision, counts, rows]
