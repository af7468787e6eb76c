"""What the data stages say: locks, data sets, shards of documents, the split.

A *record* is one raw item of a source. A *document* is a record after rendering: the text a model
reads. Documents live in shards; every shard has a small JSON record that carries its hash, and
later stages depend on that.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

SourceKind = Literal["local", "hub", "git", "generated"]
FileFormat = Literal["jsonl", "parquet", "arrow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """One source of an expert's manifest; which keys a kind needs is checked by the schema."""

    name: str
    kind: SourceKind
    licence: str | None = None
    n_shards: int | None = None
    # local: files; git: a repository or bundle
    path: str | None = None
    # hub
    id: str | None = None
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    # generated
    generator: str | None = None
    n_documents: int | None = None
    seed: int | None = None
    # how a record becomes a document
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    messages: str | None = None
    group: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LockedFile:
    """A raw file as it was when the lock was taken."""

    path: str
    format: FileFormat
    n_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLock:
    """What pins a source's content. ``revision`` is null for a hub source not yet resolved."""

    name: str
    kind: SourceKind
    n_shards: int
    revision: str | None
    identity: dict[str, Any]
    files: tuple[LockedFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLock:
    """All of an expert's sources, pinned when Snakemake parsed the workflow."""

    expert: str
    sources: tuple[SourceLock, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """A file of raw records on this machine."""

    path: str
    format: FileFormat
    n_bytes: int
    n_records: int | None
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Artefact:
    """A file or repository that a generator made beside its records, pinned by its content."""

    path: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """A source whose records are on this disk. ``artefacts`` are files that scoring needs."""

    name: str
    kind: SourceKind
    revision: str | None
    licence: str | None
    n_shards: int
    files: tuple[DataFile, ...]
    artefacts: dict[str, Artefact]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """Which part of a source one job prepares: part ``index`` of ``n_shards``."""

    source: str
    shard: str
    index: int
    n_shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSource:
    """One line of the table of data sets."""

    name: str
    kind: SourceKind
    revision: str | None
    licence: str | None
    n_files: int
    n_bytes: int
    n_records: int | None
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetManifest:
    """An expert's data before preparation, and the jobs that will prepare it."""

    expert: str
    preset: str
    sources: tuple[DatasetSource, ...]
    shards: tuple[ShardPlan, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareSpec:
    """Settings of ``prepare_shard``."""

    source: SourceSpec
    system_prompt: str | None
    supervise: Literal["completion", "all"]
    evaluation_fields: tuple[str, ...]
    max_rejected_fraction: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of a document that is tokenised as one.

    ``special`` segments are one special token, spliced by id. Of a supervised segment the first
    ``n_header_chars`` characters are context and the rest is what the model learns to write.
    """

    text: str
    special: bool = False
    supervised: bool = False
    n_header_chars: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """A shard of rendered documents."""

    source: str
    shard: str
    path: str
    sha256: str
    n_records: int
    n_documents: int
    n_bytes: int
    n_rejected_by_reason: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeduplicateSpec:
    """Settings of ``deduplicate_documents``. Null ``max_documents`` keeps all."""

    eval_fraction: float
    max_documents: int | None
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentsRecord:
    """What became of every document: kept for training, held out, or dropped with a reason.

    ``keep_path`` is an Arrow table (source, shard, row, held_out) in the order of the manifest.
    """

    expert: str
    keep_path: str
    sha256: str
    n_records: int
    n_rejected: int
    n_documents: int
    n_train: int
    n_held_out: int
    n_dropped_by_reason: dict[str, int]
    n_rejected_by_reason: dict[str, int]
