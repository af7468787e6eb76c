"""Measure how fast a model is copied to another disk and verified, beside plain tools, in one run.

    python bench/staging.py --source DIR --target DIR [--gib 4] [--files 4] [--repeats 3]

Files of random bytes are made in ``source`` and copied to ``target``; both are removed at the end.
Give two disks: on one, reading and writing take turns. Ways:

- ours: several files at once, XXH3 and SHA-256 of what passes, flushed, dropped from the page
  cache, read again and compared (what lies on tmpfs cannot be dropped);
- copytree + sha256: ``shutil.copytree``, flushed, then both sides hashed one after the other;
- copytree: ``shutil.copytree`` and a flush, verified by nobody;
- reuse: what finding and verifying a copy takes that is there already.

Before each way the source is dropped from the page cache, and the copy before ``reuse``. Ways take
turns in every repeat. Prints medians; the last line is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))

from expertflow.core.files import remove, sha256_directory, sha256_file, sha256_json, sync
from expertflow.hardware.disk import file_system
from expertflow.stage import make
from expertflow.stage.content import Content, read_content, weights_key
from expertflow.stage.make import ensure_staged
from expertflow.stage.store import open_store

BLOCK_BYTES = 16 << 20


def make_model(folder: Path, *, n_files: int, n_bytes: int) -> Content:
    """Write files of weights that are as random as real ones to a disk that compresses."""
    folder.mkdir(parents=True)
    for number in range(n_files):
        with (folder / f"model-{number}.safetensors").open("wb") as stream:
            for _ in range(n_bytes // n_files // BLOCK_BYTES):
                stream.write(os.urandom(BLOCK_BYTES))
    (folder / "config.json").write_text("{}")
    sync(folder)
    hashes = [sha256_file(path) for path in sorted(folder.glob("*.safetensors"))]
    key = weights_key(folder, sha256_json(hashes))
    return read_content("weights", folder, key)


def forget(folder: Path) -> None:
    """Drop files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ways(content: Content, target: Path) -> dict[str, Callable[[], None]]:
    """Give what is measured; ``reuse`` needs the copy of ``ours`` and comes after it."""
    target.mkdir(parents=True)
    store, plain = open_store(target, None), target / "plain"

    def ours() -> None:
        remove(store.root / content.key)
        held = ensure_staged(content, store)
        assert held.origin == "copied"
        held.hold.close()

    def reuse() -> None:
        held = ensure_staged(content, store)
        assert held.origin == "reused"
        held.hold.close()

    def copytree() -> None:
        remove(plain)
        shutil.copytree(content.source, plain)
        sync(plain)

    def copytree_and_hash() -> None:
        copytree()
        assert sha256_directory(content.source) == sha256_directory(plain)

    return {
        "ours": ours,
        "reuse": reuse,
        "copytree + sha256": copytree_and_hash,
        "copytree": copytree,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="folder on the slow disk")
    parser.add_argument("--target", type=Path, required=True, help="folder on the fast disk")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the model")
    parser.add_argument("--files", type=int, default=4, help="files it is in")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    # On one disk bytes would be shared: this is about copying.
    make.can_share = lambda *_: False
    source, target = args.source / "staging-source", args.target / "staging-target"
    seconds: dict[str, list[float]] = {}
    try:
        content = make_model(source, n_files=args.files, n_bytes=int(args.gib * (1 << 30)))
        todo = ways(content, target)
        for _ in range(args.repeats):
            for name, way in todo.items():
                forget(target if name == "reuse" else source)
                start = time.perf_counter()
                way()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
        systems = [str(file_system(place.resolve())) for place in (source, target)]
    finally:
        remove(source)
        remove(target)
    speeds = {name: content.n_bytes / statistics.median(took) for name, took in seconds.items()}
    print(f"{content.n_bytes / 1e9:.2f} GB in {args.files} files, {' to '.join(systems)}")
    for name, speed in speeds.items():
        print(f"{name:20} {speed / 1e9:6.2f} GB/s   {content.n_bytes / speed:7.2f} s")
    facts = {"n_bytes": content.n_bytes, "n_files": args.files, "file_systems": systems}
    print(json.dumps({**facts, "bytes_per_s": speeds, "seconds": seconds}))


if __name__ == "__main__":
    main()
