"""Content to stage: a set of files under a key that follows from their hashes."""

from collections.abc import Iterator
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.records import Record
from expertflow.stage.records import Kind

SPLITS = ("train", "held_out")
WEIGHTS, ROWS = ".safetensors", ".arrow"
# What transformers reads of a model besides its weights.
BESIDE = (".json", ".jinja", ".txt", ".model")
N_KEY = 20


class Content(Record, frozen=True, kw_only=True):
    """Files below ``source`` by relative name, with their sizes. Links are followed."""

    kind: Kind
    key: str
    source: Path
    sizes: dict[str, int]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def largest(self) -> Path:
        """The largest file where it really lies: a hub's cache holds links to it."""
        return (self.source / max(self.sizes, key=lambda name: self.sizes[name])).resolve()


def rows_key(train_sha256: str, held_out_sha256: str) -> str:
    """Name packed rows by the hashes of their manifest."""
    return sha256_json([train_sha256, held_out_sha256])[:N_KEY]


def weights_key(source: Path, weights_sha256: str) -> str:
    """Name a model by the hash of its weights and by the small files that lie beside them.

    Raises:
        DataError: one of its files is a link to what is gone.
    """
    beside = {name: sha256_file(source / name) for name in _names("weights", source)
              if not name.endswith(WEIGHTS)}  # fmt: skip
    return sha256_json([weights_sha256, beside])[:N_KEY]


def key_of(kind: Kind, sha256s: dict[str, str]) -> str:
    """Return the key of files with these hashes; other content has another key."""
    if kind == "rows":
        data = [sha256s[name] for split in SPLITS for name in sorted(sha256s)
                if name.startswith(f"{split}/") and name.endswith(ROWS)]  # fmt: skip
        return sha256_json(data)[:N_KEY]
    weights = [sha256s[name] for name in sorted(sha256s) if name.endswith(WEIGHTS)]
    beside = {name: value for name, value in sha256s.items() if not name.endswith(WEIGHTS)}
    return sha256_json([sha256_json(weights), beside])[:N_KEY]


def read_content(kind: Kind, source: Path, key: str) -> Content:
    """Look up the files to stage.

    Raises:
        DataError: there are none, or one is a link to what is gone.
    """
    sizes = {name: (source / name).stat().st_size for name in _names(kind, source)}
    if not sizes:
        raise DataError(f"{source}: no {kind} there; run the stage that writes them")
    return Content(kind=kind, key=key, source=source, sizes=sizes)


def _names(kind: Kind, source: Path) -> Iterator[str]:
    if kind == "rows":
        for path in sorted(source.rglob("*")):
            if _is_file(path):
                yield path.relative_to(source).as_posix()
        return
    for path in sorted(source.glob("*")):
        weights = path.suffix == WEIGHTS and not path.name.startswith("consolidated")
        if (weights or path.suffix in BESIDE) and _is_file(path):
            yield path.name


def _is_file(path: Path) -> bool:
    if path.is_symlink() and not path.exists():
        # Passed over, it would give a smaller model that looks whole.
        raise DataError(f"{path}: a link to {path.readlink()}, which is gone; put it back")
    return path.is_file()
