"""Places to copy to, all on this machine: a folder, another machine by rsync, object storage."""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import wait_for

from expertflow.core.records import Record
from expertflow.rental.sync.store import Store
from expertflow.rental.sync.stores import open_store

S3 = pytest.param("s3", marks=pytest.mark.extra("s3"))
every_kind = pytest.mark.parametrize("place", ["local", "rsync", "daemon", S3], indirect=True)
# States are pushed and pulled the same way for any store; one may leave empty folders.
every_store = pytest.mark.parametrize("place", ["local", "rsync"], indirect=True)
s3, rsync = (pytest.mark.parametrize("place", [kind], indirect=True) for kind in (S3, "rsync"))
BUCKET = "expertflow-tests"


class Place(Record, frozen=True, kw_only=True):
    """A destination, with direct access to its content, bypassing the store."""

    destination: str
    folder: Path | None

    def open(self) -> Store:
        return open_store(self.destination, threading.Event())

    def read(self, key: str) -> bytes:
        if self.folder is not None:
            return (self.folder / key).read_bytes()
        body: bytes = _client().get_object(Bucket=BUCKET, Key=f"run/{key}")["Body"].read()
        return body

    def write(self, key: str, content: bytes) -> None:
        """Change a file like an accident would, keeping the size and time of an existing one."""
        if self.folder is None:
            _client().put_object(Bucket=BUCKET, Key=f"run/{key}", Body=content)
            return
        path = self.folder / key
        times = path.stat().st_mtime_ns
        path.write_bytes(content)
        os.utime(path, ns=(times, times))


def _client() -> Any:
    import boto3

    return boto3.client("s3")


def fake_rsync(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace rsync with a script."""
    folder.mkdir(exist_ok=True)
    (folder / "rsync").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@contextmanager
def daemon(tmp_path: Path, folder: Path) -> Iterator[str]:
    """Run rsync's daemon on loopback; yield its address."""
    folder.mkdir(parents=True)
    settings = tmp_path / "rsyncd.conf"
    own = f"uid={os.getuid()}\ngid={os.getgid()}\n" if os.getuid() == 0 else ""
    # The name of the client is not looked up, which would take long on a machine without a network.
    head = f"use chroot=no\nreverse lookup=no\n{own}"
    settings.write_text(f"{head}[m]\npath={folder}\nread only=no\n")
    with socket.socket() as free:
        # The port stays bound, so that nobody else gets it; the daemon may bind it again.
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        where = ["--address=127.0.0.1", f"--port={port}", f"--config={settings}"]
        process = subprocess.Popen(["rsync", "--daemon", "--no-detach", *where])
        try:
            wait_for(lambda: _listens(port), message="rsync's daemon did not start", during=process)
            yield f"rsync://127.0.0.1:{port}/m"
        finally:
            process.terminate()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def object_storage() -> Iterator[str]:
    """Run object storage on loopback; yield its address."""
    server_module = pytest.importorskip(
        "moto.server", reason="moto is not installed: make test-long"
    )
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """Yield an empty place of the kind a test is parametrized with, by default a folder."""
    kind, folder = getattr(request, "param", "local"), tmp_path / "elsewhere" / "a place"
    if kind == "s3":
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        # Ignore the machine's own settings.
        for name, value in {
            "ENDPOINT_URL": request.getfixturevalue("object_storage"),
            "DEFAULT_REGION": "us-east-1",
            "ACCESS_KEY_ID": "test",
            "SECRET_ACCESS_KEY": "test",
            "CONFIG_FILE": os.devnull,
            "SHARED_CREDENTIALS_FILE": os.devnull,
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        client = _client()
        client.create_bucket(Bucket=BUCKET)
        yield Place(destination=f"s3://{BUCKET}/run", folder=None)
        for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=entry["Key"])
        return
    if kind in ("rsync", "daemon") and shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    if kind == "daemon":
        with daemon(tmp_path, folder) as address:
            yield Place(destination=f"{address}/run", folder=folder / "run")
        return
    if kind == "rsync":
        # Called in place of ssh: this machine is also the remote one.
        shell = tmp_path / "shell"
        shell.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
        shell.chmod(0o755)
        monkeypatch.setenv("RSYNC_RSH", str(shell))
        yield Place(destination=f"elsewhere:{folder}", folder=folder)
        return
    yield Place(destination=str(folder), folder=folder)
