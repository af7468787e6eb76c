"""Content to stage: a set of files under a key derived from their hashes."""

from collections.abc import Iterator
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file, sha256_json
from expertflow.core.records import REPAIR, Record
from expertflow.staging.records import Kind

SPLITS = ("train", "held_out")
WEIGHTS, ROWS = ".safetensors", ".arrow"
# Files that transformers reads besides a model's weights.
BESIDE = (".json", ".jinja", ".txt", ".model")
N_KEY = 20


class Content(Record, frozen=True, kw_only=True):
    """Files below ``source`` by relative path, with their sizes. Links are followed."""

    kind: Kind
    key: str
    source: Path
    sizes: dict[str, int]

    @property
    def n_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def largest(self) -> Path:
        """The largest file, with links resolved, because the hub cache contains links."""
        return (self.source / max(self.sizes, key=self.sizes.__getitem__)).resolve()


def rows_key(*sha256s: str) -> str:
    """Derive the key of packed rows from the hashes of train and held out, in this order."""
    return sha256_json(list(sha256s))[:N_KEY]


def weights_key(source: Path, weights_sha256: str) -> str:
    """Derive a model's key from its weights' hash and the small files next to them."""
    names = (name for name in _names("weights", source) if not name.endswith(WEIGHTS))
    beside = {name: sha256_file(source / name) for name in names}
    return sha256_json([weights_sha256, beside])[:N_KEY]


def key_of(kind: Kind, sha256s: dict[str, str]) -> str:
    """Derive the key from the hashes of the files themselves."""
    ordered = sorted(sha256s.items())
    if kind == "rows":
        data = [(name, value) for name, value in ordered if name.endswith(ROWS)]
        return rows_key(*(v for split in SPLITS for n, v in data if n.startswith(f"{split}/")))
    weights = [value for name, value in ordered if name.endswith(WEIGHTS)]
    beside = {name: value for name, value in ordered if not name.endswith(WEIGHTS)}
    return sha256_json([sha256_json(weights), beside])[:N_KEY]


def read_content(kind: Kind, source: Path, key: str) -> Content:
    """Raise DataError if there are no files to stage, or one is a dangling link."""
    sizes = {name: (source / name).stat().st_size for name in _names(kind, source)}
    if not sizes:
        raise DataError(f"{source}: no {kind} found; {REPAIR}")
    return Content(kind=kind, key=key, source=source, sizes=sizes)


def _names(kind: Kind, source: Path) -> Iterator[str]:
    for path in sorted(source.glob("*") if kind == "weights" else source.rglob("*")):
        # Mistral's repositories contain the same weights a second time, under that name.
        is_weights = path.suffix == WEIGHTS and not path.name.startswith("consolidated")
        if kind == "weights" and not is_weights and path.suffix not in BESIDE:
            continue
        if path.is_symlink() and not path.exists():
            # Skipping it would stage a model that looks complete.
            raise DataError(f"{path}: a link to {path.readlink()}, which is missing; restore it")
        if path.is_file():
            yield path.relative_to(source).as_posix()
