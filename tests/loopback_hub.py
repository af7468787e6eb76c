"""A small hub on loopback: as much of the real one's interface as its client needs."""

import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct, field
from support import SCRIPTS

COMMIT = "c" * 40
RUN = """
import json, logging, sys, time
from expertflow.core.errors import ExpertflowError
from expertflow.core.progress import break_silence
from expertflow.data.settings import SourceSpec
from expertflow.data.sources import hub
logging.basicConfig(level=logging.INFO, format="%(message)s")
waited = []
time.sleep = waited.append

def rows(files):
    import pyarrow as pa
    for file in files:
        with pa.memory_map(file.path) as stream:
            yield from pa.ipc.open_stream(stream).read_all().to_pylist()

def result(source):
    try:
        spec = SourceSpec(name="s", kind="hub", **source)
        fetched = hub.HubDataset(spec).fetch(None, None)
    except ExpertflowError as error:
        return {"error": str(error)}
    files = fetched.files
    return {
        "revision": fetched.revision, "card_license": fetched.card_license,
        "rows": list(rows(files)),
        "n_records": [f.n_records for f in files], "sha256": [f.sha256 for f in files],
        "notes": sorted({note for f in files for note in f.notes}),
        "libraries": sorted({"datasets", "huggingface_hub"} & set(sys.modules)),
    }

with break_silence(every_s=0.05):
    for source in json.loads(sys.argv[1]):
        print(json.dumps({**result(source), "waited_s": sum(waited)}))
        waited.clear()
"""


def jsonl(n: int, **extra: Any) -> bytes:
    rows = ({"q": f"{i} + 1", "a": str(i + 1), **extra} for i in range(n))
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


class Repository(Struct):
    """A data set on the hub, and its misbehavior.

    ``refused`` is the status and error code of every answer, or with ``is_listed`` only of those
    about files: a gated data set lists its content. The files in ``cut`` are truncated once, after
    that many bytes. The first ``n_failures`` answers have status 500. Files in
    ``sent`` are sent with that content, whatever is listed.
    """

    files: dict[str, bytes]
    refused: tuple[int, str | None] | None = None
    is_listed: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    before_cut: Callable[[], object] = bool
    n_failures: int = 0
    stated_sizes: dict[str, int] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def ranges(self, name: str) -> list[str | None]:
        return [span for verb, path, span in self.requests if verb == "GET" and path == name]


class Hub(Struct):
    repositories: dict[str, Repository]
    endpoint: str = ""


class JsonHandler(BaseHTTPRequestHandler):
    """Answers with JSON, and logs nothing."""

    def send_json(self, value: Any, *, status: int = 200, code: str | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def listening(
    handler: type[BaseHTTPRequestHandler], certificate: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve on loopback; yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if certificate is not None:
        server.socket = certificate.wrap_socket(server.socket, server_side=True)
    # A stop waits for the end of an interval.
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Handler(JsonHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        place = re.fullmatch(
            r"(?:/api)?/datasets/(?P<id>[^/]+/[^/]+)"
            r"(?:/(?P<what>tree|revision|resolve)/(?P<revision>[^/]+)/?(?P<name>.*))?",
            path,
        )
        repository = self.hub.repositories.get(place["id"]) if place else None
        if place is None or repository is None:
            self.send_json({}, status=404, code="RepoNotFound")
            return
        repository.requests.append((self.command, place["name"] or "", self.headers.get("Range")))
        if repository.n_failures > 0:
            repository.n_failures -= 1
            self.send_json({}, status=500)
        elif repository.refused and (place["what"] == "resolve" or not repository.is_listed):
            self.send_json({}, status=repository.refused[0], code=repository.refused[1])
        elif (place["revision"] or "main") not in ("main", COMMIT):
            self.send_json({}, status=404, code="RevisionNotFound")
        elif place["what"] == "tree":
            listed = [entry(n, content) for n, content in repository.files.items()]
            sizes = repository.stated_sizes
            self.send_json([{**e, "size": sizes.get(e["path"], e["size"])} for e in listed])
        elif place["what"] != "resolve":
            self.send_json({"id": place["id"], "sha": COMMIT, "siblings": []})
        elif place["name"] in repository.files:
            self.send_file(repository, place["name"])
        else:
            self.send_json({}, status=404, code="EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Describe the requested paths, like ``paths-info``."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
        name = unquote(urlsplit(self.path).path).split("/datasets/")[1].split("/paths-info/")[0]
        files = self.hub.repositories[name].files
        self.send_json([entry(path, files[path]) for path in asked if path in files])

    def send_file(self, repository: Repository, name: str) -> None:
        listed = repository.files[name]
        content = repository.sent.get(name, listed)
        span = self.headers.get("Range")
        begin, _, end = span.removeprefix("bytes=").partition("-") if span else ("0", "", "")
        first, last = int(begin), min(int(end or len(content)), len(content) - 1)
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        if span:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("ETag", f'"{git_hash(listed)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = repository.cut.pop(name, last + 1)
        self.wfile.write(content[first:stop])
        if stop <= last:
            repository.before_cut()
            self.close_connection = True


def entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


class ModelHandler(Handler):
    """Serve models with the interface of data sets."""

    def do_GET(self) -> None:
        path = self.path.replace("/api/models/", "/api/datasets/")
        self.path = path if path.startswith("/api/") else f"/datasets{path}"
        super().do_GET()

    do_HEAD = do_GET


def serving_models(hub: Hub) -> AbstractContextManager[str]:
    """Serve the repositories as models; the context is the address."""
    return listening(type("Bound", (ModelHandler,), {"hub": hub}))


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    with listening(type("Bound", (Handler,), {"hub": hub})) as hub.endpoint:
        yield hub


class Fetched(Struct):
    results: list[dict[str, Any]]
    log: str


def fetch(
    home: Path, endpoint: str | None, *sources: dict[str, Any], **environment: str
) -> Fetched:
    """Fetch data sets with a cache at ``home``; without an endpoint nothing listens."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    own = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint or "http://127.0.0.1:9"}
    # The log is a file, so that a test can read it while it grows.
    with NamedTemporaryFile("w+", dir=home, suffix=".log") as log:
        done = subprocess.run(
            [sys.executable, "-c", RUN, json.dumps(sources)],
            env={**clean, "PYTHONPATH": str(SCRIPTS), **own, **environment},
            stdout=subprocess.PIPE, stderr=log, text=True, timeout=600,
        )  # fmt: skip
        log.seek(0)
        output = log.read()
    assert done.returncode == 0, output[-3000:]
    return Fetched([json.loads(line) for line in done.stdout.splitlines()], output)


def write_hub_cache(home: Path, files: dict[str, bytes], *, repository: str, commit: str) -> Path:
    """Write downloaded files in the layout of the hub's client; return the data set's folder."""
    folder = home / "hub" / f"datasets--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "blobs").mkdir()
    for name, content in files.items():
        blob = folder / "blobs" / git_hash(content)
        blob.write_bytes(content)
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        depth = "../" * (2 + name.count("/"))
        link.symlink_to(f"{depth}blobs/{blob.name}")
    return folder


def write_prepared_cache(
    home: Path, n_records: int, *, repository: str, commit: str, config: str = "default"
) -> Path:
    """Write a prepared data set in the layout of ``datasets``; return its Arrow files' folder."""
    import pyarrow as pa

    owner, name = repository.split("/")
    folder = home / "datasets" / f"{owner}___{name}" / config / "0.0.0" / commit
    folder.mkdir(parents=True)
    table = pa.table({"q": [f"{i} + 1" for i in range(n_records)]})
    with pa.OSFile(str(folder / f"{name}-train.arrow"), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    splits = {"train": {"name": "train", "num_examples": n_records}}
    info = {"config_name": config, "dataset_name": name, "splits": splits}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder
