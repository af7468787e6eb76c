"""The interface of a source kind: modules with the functions of ``SourceModule``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from msgspec import Struct, field

from expertflow.data.records import Artifact, DataFile, LockedFile, SourceLock
from expertflow.data.settings import SourceSpec


class Pins(NamedTuple):
    hash_file: Callable[[Path], str]
    digest_generator: Callable[[str], str]


class Pinned(Struct, frozen=True):
    n_shards: int = 1
    revision: str | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    files: tuple[LockedFile, ...] = ()


class Fetched(Struct, frozen=True):
    files: tuple[DataFile, ...]
    revision: str | None = None
    card_license: str | None = None
    artifacts: dict[str, Artifact] = field(default_factory=dict)


class Found(NamedTuple):
    status: Literal["prepared", "downloaded", "found", "missing", "generated"]
    n_bytes: int | None = None
    n_records: int | None = None


class SourceModule(Protocol):
    """A kind of source; callers prefix errors of ``pin`` with the source's name."""

    def look_up(self, source: SourceSpec) -> Found: ...

    def pin(self, source: SourceSpec, pins: Pins) -> Pinned: ...

    def fetch(self, source: SourceSpec, lock: SourceLock, directory: Path) -> Fetched: ...
