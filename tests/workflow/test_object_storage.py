"""Bundle and outcome through object storage: a server on loopback stands in for S3."""

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundle_boxes import BUNDLE, Box, make_box, make_bundle
from workflow_space import Workspace

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: make s3")
pytest.importorskip(
    "snakemake_storage_plugin_s3", reason="the S3 storage plugin is not installed; see make s3"
)
moto_server = pytest.importorskip("moto.server", reason="moto is not installed: make test-long")

pytestmark = [pytest.mark.chain, pytest.mark.long]
# What the server on loopback takes, whoever asks.
SECRET = "not-a-secret-of-anybody"
BUCKET = "expertflow-test"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a client of an empty bucket; credentials come by the environment."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("SNAKEMAKE_STORAGE_S3_ENDPOINT_URL", endpoint)
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=BUCKET)
    yield client
    server.stop()


def remote(box: Box, *arguments: str) -> str:
    place = ("--default-storage-provider", "s3", "--default-storage-prefix", f"s3://{BUCKET}/work")
    out = box.run("-s", "workflow/remote.smk", *place, "results/tiny/outcome.tar", *arguments)
    assert SECRET not in out
    return out


def test_a_bundle_goes_through_a_bucket(finished: Workspace, storage: Any, tmp_path: Path) -> None:
    cheap = finished.copy(tmp_path / "cheap")
    storage.upload_file(str(make_bundle(cheap)), BUCKET, f"work/{BUNDLE}")
    box = make_box(tmp_path / "box", cheap)
    kept = tmp_path / "kept"
    remote(box, "--config", f"guard=--idle-minutes 0 --push {shlex.quote(str(kept))}")
    assert [path.name for path in kept.iterdir()] == ["tiny"]
    assert "Nothing to be done" in remote(make_box(tmp_path / "another", cheap), "-n")

    storage.download_file(BUCKET, "work/results/tiny/outcome.tar", str(tmp_path / "outcome.tar"))
    home = Box(cheap.copy(tmp_path / "home").root)
    shutil.rmtree(home.root / "results")
    home.open(tmp_path / "outcome.tar", "--outcome")
    results = home.root / "results" / "tiny"
    assert "<html" in (results / "report.html").read_text()
    assert (results / "merged" / "model.safetensors").is_file()
    assert SECRET not in "".join(path.read_text() for path in results.glob("logs/*.log"))
