"""Small rows and models to stage, and a store to stage them in."""

import os
from pathlib import Path

from expertflow.core.files import sha256_file, sha256_json
from expertflow.staging.content import Content, read_content, rows_key, weights_key
from expertflow.staging.store import open_store


def make_rows(folder: Path, *, n_bytes: int = 3000, fill: bytes = b"x") -> Content:
    for split, n in (("train", n_bytes), ("held_out", 10)):
        (folder / split).mkdir(parents=True)
        (folder / split / "data-00000-of-00001.arrow").write_bytes(fill * n)
        (folder / split / "state.json").write_text("{}\n")
    hashes = [sha256_file(folder / s / "data-00000-of-00001.arrow") for s in ("train", "held_out")]
    return read_content("rows", folder, rows_key(*hashes))


def make_model(folder: Path) -> Content:
    """Write a model with two weight files, and the other files of a hub's folder."""
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes([number]) * 2000)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    return model_content(folder)


def model_content(folder: Path) -> Content:
    weights = sha256_json([sha256_file(path) for path in sorted(folder.glob("*.safetensors"))])
    return read_content("weights", folder, weights_key(folder, weights))


def make_store(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return open_store(folder)


def store_at(folder: Path) -> Path:
    return folder / f"expertflow-{os.geteuid()}"


def is_copy(content: Content, folder: Path) -> bool:
    """Compare files byte by byte, with none missing or added."""
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    return found == set(content.sizes) and all(
        (folder / name).read_bytes() == (content.source / name).read_bytes() for name in found
    )
