"""The base class of source kinds, each a module in this folder, and its return types."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from msgspec import Struct, field

from expertflow.data.records import Artifact, DataFile, LockedFile, SourceLock
from expertflow.data.settings import SourceOptions, SourceSpec


class Pins(NamedTuple):
    hash_file: Callable[[Path], str]
    digest_generator: Callable[[str], str]


class Pinned(Struct, frozen=True):
    """What determines a source's records; ``identity`` is any JSON that changes with them."""

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
    license: str | None = None


class DataSource(ABC):
    """A source of an expert; subclasses are the kinds, called ``kind`` in a manifest.

    ``required`` and ``optional`` are the keys of a manifest's source that only some kinds read, and
    ``option_type`` declares its ``options``.
    """

    kind: ClassVar[str]
    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    option_type: ClassVar[type[SourceOptions]] = SourceOptions
    # Whether documents are scanned for credentials unless the manifest says otherwise.
    scan_secrets: ClassVar[bool] = False

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        # Checked immediately, so that a wrong option stops a dry run.
        self.options: Any = self.option_type.from_manifest(spec.options)

    @property
    def path(self) -> Path:
        return Path(str(self.spec.path)).expanduser()

    @abstractmethod
    def look_up(self) -> Found:
        """Return what is on this machine, without the network."""

    @abstractmethod
    def pin(self, pins: Pins) -> Pinned:
        """Pin the records when Snakemake parses the workflow; DataError if there are none."""

    @abstractmethod
    def fetch(self, lock: SourceLock, directory: Path) -> Fetched:
        """Describe the files of records; new files are written to ``directory``."""
