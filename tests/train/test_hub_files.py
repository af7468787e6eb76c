"""What is downloaded of a hub model: also what its licence asks to be handed on."""

import json
import os
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from loopback_hub import Handler, Hub, Repository
from support import SCRIPTS

from expertflow.train.model.base import prepare_model, wanted_files
from expertflow.train.records import ModelSpec

TEXTS = ("LICENSE", "LICENCE.md", "License-en", "NOTICE", "COPYING", "USE_POLICY.md")
FETCH = """
import sys
from expertflow.core.records import from_json, to_json
from expertflow.train.model.base import prepare_model
from expertflow.train.records import ModelSpec
from pathlib import Path
import json
spec = from_json(ModelSpec, json.loads(sys.argv[1]), where="spec")
print(prepare_model(spec, [], Path("made")).path)
"""


class ModelHandler(Handler):
    """Serve models by the interface of data sets."""

    def answer(self) -> None:
        path = self.path.replace("/api/models/", "/api/datasets/")
        self.path = path if path.startswith("/api/") else f"/datasets{path}"
        super().answer()


def spec(model: str) -> ModelSpec:
    return ModelSpec(
        model=model, revision=None, licence=None, vocab_size=300, n_layers=1, hidden_size=16,
        n_heads=2, n_kv_heads=1, head_dim=8, intermediate_size=32, tokenizer=None, content={},
        chat_template="auto", text_special_tokens="plain", seed=0,
    )  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Give the files of a tiny model, with terms, and with what is of no use."""
    prepare_model(spec("builtin:tiny-qwen3"), ["a b"], tmp_path / "model")
    found = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    others = dict.fromkeys(("README.md", "pytorch_model.bin", "tokenizer.model"), b"x")
    return {**found, **others, **{name: name.encode() for name in TEXTS}}


def test_licence_texts_and_tokenizer_models_are_downloaded_and_packed(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    from expertflow.core.records import to_json

    hub = Hub({"maker/model": Repository(files)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (ModelHandler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", FETCH, json.dumps(to_json(spec("maker/model")))],
            env={
                **clean, "HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300",
                "PYTHONPATH": str(SCRIPTS), "HF_HOME": str(tmp_path / "home"),
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            },
            capture_output=True, text=True, timeout=300, cwd=tmp_path,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(done.stdout.strip())
    wanted = files.keys() - {"README.md", "pytorch_model.bin"}
    assert {path.name for path in folder.iterdir()} == wanted
    # A bundle packs these.
    assert {path.name for path in wanted_files(folder)} == wanted
    assert (folder / "LICENSE").read_bytes() == b"LICENSE"
