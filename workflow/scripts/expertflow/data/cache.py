"""Read the Hugging Face caches on this machine from disk, without the network.

The hub cache holds files as downloaded, by commit::

    hub/datasets--{org}--{name}/{refs/{branch},snapshots/{commit}/…,blobs/…}

The ``datasets`` cache holds them *prepared*, as one folder of Arrow files per config and commit::

    datasets/{org}___{name}/{config}/{version}/{commit}/{dataset_info.json,{name}-{split}.arrow}
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from expertflow.core.disk import describe_space, free_bytes
from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.core.hashes import HashCache
from expertflow.core.records import Record
from expertflow.data.settings import SourceSpec

log = logging.getLogger(__name__)
COMMIT, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
# The front matter of a repository's card.
Card = dict[str, Any]
CARD = "README.md"
CONFIGS = ".huggingface.yaml"
INFO = "dataset_info.json"
MOVE_CACHE = "free some, or set HF_HOME to another disk"
# Source options that select among a data set's files.
READ_OPTIONS = ("data_dir", "data_files")
# A long split has several files; a split name contains no hyphen.
ARROW = re.compile(r".+?-(?P<split>[^-]+?)(-\d{5}-of-\d{5})?\.arrow")


def hub_cache() -> Path:
    return _folder("HF_HUB_CACHE", _folder("HUGGINGFACE_HUB_CACHE", _home() / "hub"))


def find_prepared_cache() -> Path:
    return _folder("HF_DATASETS_CACHE", _home() / "datasets")


def describe_full_cache(needed: str = "") -> str:
    place = min((hub_cache(), find_prepared_cache()), key=free_bytes)
    space = f"{describe_space(place)}, {needed} needed" if needed else describe_space(place)
    return f"no space left for {place}: {space}; {MOVE_CACHE}"


def repository_folder(repository: str, kind: str = "datasets") -> Path:
    return hub_cache() / f"{kind}--{repository.replace('/', '--')}"


def snapshot_folder(repository: str, commit: str, kind: str = "datasets") -> Path:
    return repository_folder(repository, kind) / "snapshots" / commit


def find_revision(repository: str, revision: str | None, kind: str = "datasets") -> str | None:
    """Return the last cached commit of a branch or tag; None if unknown."""
    # A commit needs no lookup; a branch is what the hub last reported.
    wanted = revision or "main"
    if COMMIT.fullmatch(wanted):
        return wanted
    ref = repository_folder(repository, kind) / "refs" / wanted
    return ref.read_text(encoding="utf-8").strip() if ref.is_file() else None


def check_blobs(paths: Iterable[Path]) -> None:
    """Raise DataError if a file in the hub cache is not its commit's.

    Each is a link to a blob that the hub's client names by SHA-256, small ones as git does.
    """
    hashes = HashCache()
    for path in paths:
        blob = path.resolve()
        found = name = blob.name
        if SHA256.fullmatch(name):
            found = hashes.sha256(blob)
        elif COMMIT.fullmatch(name):
            content = blob.read_bytes()
            found = hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
        if found != name:
            raise DataError(
                f"{path}: is not its commit's file; it arrived damaged or was changed later; delete"
                f" {blob} and run again to refetch it"
            )
    hashes.save()


def card_data(repository: str, commit: str | None) -> Card:
    if commit is None:
        return {}
    path = snapshot_folder(repository, commit) / CARD
    return front_matter(path) if path.is_file() else {}


def front_matter(path: Path) -> Card:
    import yaml

    text = path.read_text(encoding="utf-8", errors="replace")
    # A card begins with YAML between two lines of three dashes.
    found = re.match(r"\ufeff?\s*---\r?\n(.*?)\r?\n---", text, flags=re.DOTALL)
    try:
        value = yaml.safe_load(found.group(1)) if found else {}
    except (yaml.YAMLError, ValueError):  # for a date like 2024-02-30
        log.warning("%s: its metadata is not YAML and was ignored", path)
        return {}
    return value if isinstance(value, dict) else {}


def read_configs(folder: Path) -> Iterator[Any]:
    """Yield the configs that a data set describes, read as ``datasets`` reads them."""
    import yaml
    from huggingface_hub import DatasetCard

    card, own = folder / CARD, folder / CONFIGS
    # Where the library cannot read them either, it explains why.
    with suppress(ValueError, yaml.YAMLError):
        if card.is_file():
            yield DatasetCard.load(card).data.to_dict().get("configs")
        if own.is_file():
            described = yaml.safe_load(own.read_text(encoding="utf-8"))
            yield described.get("configs") if isinstance(described, dict) else None


def card_license(card: Card) -> str | None:
    """Return a card's license; for "other" its name, for several all of them."""
    stated = card.get("license")
    names = [str(name) for name in (stated if isinstance(stated, list) else [stated]) if name]
    if names == ["other"] and card.get("license_name"):
        return str(card["license_name"])
    return ", ".join(names) or None


class Prepared(Record, frozen=True, kw_only=True):
    folder: Path
    config: str
    commit: str
    n_records_by_split: dict[str, int]
    n_bytes: int

    def files(self, split: str) -> list[Path]:
        return [path for name, path in _arrow_files(self.folder) if name == split]


def find_prepared_root(repository: str) -> Path:
    # org/MyData -> org___my_data
    *owner, name = repository.split("/")
    return find_prepared_cache() / "___".join([*owner, snake_case(name)])


def snake_case(name: str) -> str:
    """Convert a name to the ``datasets`` library's folder name; a test compares."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()


def config_folder(source: SourceSpec, config: str) -> str:
    """Return a prepared config's folder name; a hash distinguishes selections of files."""
    # A range of rows gets its own folder, too.
    chosen = {key: source.options[key] for key in READ_OPTIONS if source.options.get(key)}
    if "[" in (source.split or ""):
        chosen["split"] = source.split
    return f"{config}-{sha256_json(chosen)[:16]}" if chosen else config


def default_config(card: Card) -> str:
    stated = card.get("configs")
    rows = [c for c in stated if isinstance(c, dict)] if isinstance(stated, list) else []
    chosen = rows if len(rows) == 1 else [row for row in rows if row.get("default") is True]
    return str(chosen[0].get("config_name", "default")) if chosen else "default"


def find_source(source: SourceSpec) -> Prepared | None:
    """Find a source's prepared files; with no known commit, only if there is just one."""
    repository = str(source.id)
    commit = find_revision(repository, source.revision)
    if commit is None and source.revision is not None:
        return None
    config = config_folder(source, source.config or default_config(card_data(repository, commit)))
    found = [p for p in list_prepared(find_prepared_root(repository)) if p.config == config]
    found = [p for p in found if commit in (None, p.commit)]
    # With several commits here, it is unknown which one is meant.
    return found[0] if len({p.commit for p in found}) == 1 else None


def list_prepared(root: Path) -> list[Prepared]:
    found = []
    for info in sorted(root.glob(f"*/*/*/{INFO}")):
        try:
            found.append(read_prepared(info.parent))
        except DataError as error:
            log.warning("%s", error)
    return found


def read_prepared(folder: Path) -> Prepared:
    """Read a prepared folder; DataError if it is damaged or lacks files."""
    try:
        info = json.loads((folder / INFO).read_text(encoding="utf-8"))
        counts = {str(k): int(v["num_examples"]) for k, v in (info.get("splits") or {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / INFO}: damaged; delete its folder and fetch again") from error
    there = _arrow_files(folder)
    lost = sorted(set(counts) - {split for split, _ in there})
    if lost or not counts:
        what = f"split {lost[0]} has no Arrow file" if lost else "it lists no splits"
        raise DataError(f"{folder}: {what}; delete the folder and fetch again")
    return Prepared(
        folder=folder,
        config=folder.parent.parent.name,
        commit=folder.name,
        n_records_by_split=counts,
        n_bytes=sum(path.stat().st_size for _, path in there),
    )


def _arrow_files(folder: Path) -> list[tuple[str, Path]]:
    matches = [(ARROW.fullmatch(path.name), path) for path in sorted(folder.glob("*.arrow"))]
    return [(match["split"], path) for match, path in matches if match]


def _home() -> Path:
    return _folder("HF_HOME", _folder("XDG_CACHE_HOME", Path("~/.cache")) / "huggingface")


def _folder(variable: str, default: Path) -> Path:
    return Path(os.path.expandvars(os.environ.get(variable) or default)).expanduser()
