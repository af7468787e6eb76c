"""Records of the data stages: locks, data sets, shards of documents, the split.

A *record* is one raw item of a source. A *document* is what a record becomes: turns of a chat, or
plain text. Documents live in shards; every shard has a small JSON record that carries its hash, and
later stages depend on that.
"""

from typing import Any, Literal, NamedTuple

from expertflow.core.records import Record
from expertflow.data.settings import SourceKind

FileFormat = Literal["jsonl", "json", "csv", "tsv", "text", "parquet", "arrow"]
Compression = Literal["gzip", "zstd"]


class LockedFile(Record, frozen=True, kw_only=True):
    path: str
    format: FileFormat
    compression: Compression | None
    n_bytes: int
    sha256: str


class SourceLock(Record, frozen=True, kw_only=True):
    """What pins a source's content. ``revision`` is null for a hub source not yet resolved."""

    name: str
    kind: SourceKind
    n_shards: int
    revision: str | None
    identity: dict[str, Any]
    files: tuple[LockedFile, ...]


class ExpertLock(Record, frozen=True, kw_only=True):
    expert: str
    sources: tuple[SourceLock, ...]


class DataFile(LockedFile, frozen=True, kw_only=True):
    """A file of raw records on this machine.

    ``n_records`` is null where counting would mean reading it all once more. Of uncompressed JSONL
    ``n_newlines`` counts the line ends in each block of ``data.read.BLOCK_BYTES``, so that any
    shard knows the number of its first line. ``notes`` say what is unusual about the file.
    """

    n_records: int | None
    n_newlines: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class Artefact(Record, frozen=True, kw_only=True):
    path: str
    sha256: str


class SourceRecord(Record, frozen=True, kw_only=True):
    """A source whose records are on this disk. ``artefacts`` are files that scoring needs.

    ``card_licence`` is what the data set's own card says. The manifest's licence is not here: it
    decides nothing that is trained on.
    """

    name: str
    preset: str
    kind: SourceKind
    revision: str | None
    card_licence: str | None
    n_shards: int
    files: tuple[DataFile, ...]
    artefacts: dict[str, Artefact]


class ShardPlan(Record, frozen=True, kw_only=True):
    source: str
    shard: str
    index: int
    n_shards: int


class DatasetSource(Record, frozen=True, kw_only=True):
    name: str
    kind: SourceKind
    revision: str | None
    licence: str | None
    n_files: int
    n_bytes: int
    n_records: int | None
    sha256: str
    notes: tuple[str, ...]


class DatasetManifest(Record, frozen=True, kw_only=True):
    expert: str
    preset: str
    sources: tuple[DatasetSource, ...]
    shards: tuple[ShardPlan, ...]


class ToolCall(Record, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Turn(Record, frozen=True, kw_only=True):
    """``learned`` turns are what the model learns to write; a tool answers ``tool_call_id``."""

    role: str
    content: str
    learned: bool
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Body(Record, frozen=True, kw_only=True):
    """What a document says: the turns of a chat with the tools it may call, or plain text."""

    turns: tuple[Turn, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str | None = None


class Segment(NamedTuple):
    """A stretch of a rendered document that is tokenised as one.

    ``special`` segments are one special token, spliced by id. ``learned`` are the characters
    [start, end) that the model learns to write, in order.
    """

    text: str
    special: bool = False
    learned: tuple[tuple[int, int], ...] = ()


class Layout(Record, frozen=True, kw_only=True):
    """How a model writes chats and texts.

    ``chat_template`` is Jinja; null where the model has none. ``problem`` says why chats cannot be
    written with it; plain texts still can. ``turn_end`` ends an assistant's turn, ``text_end`` a
    plain text. ``added_tokens`` are those that are not special: the tokenizer takes them out of any
    text. Special tokens in ``strip_after`` and ``strip_before`` swallow the blanks beside them.
    ``text_special_tokens`` says what becomes of a special token's name inside a text: plain
    characters, a reason to reject, or the token.
    """

    chat_template: str | None
    chat_template_origin: Literal["tokenizer", "manifest", "chatml", "none"]
    problem: str | None = None
    special_tokens: tuple[str, ...]
    added_tokens: tuple[str, ...] = ()
    strip_after: tuple[str, ...] = ()
    strip_before: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None
    text_start: str | None = None
    text_end: str
    turn_end: str | None = None
    text_special_tokens: Literal["plain", "reject", "allow"] = "plain"


class ShardRecord(Record, frozen=True, kw_only=True):
    """A shard of documents.

    Rejected are records that are no document: a fault of the data, which has its limit. Filtered
    are documents that a check, the secret scanner or the overlap with a benchmark kept out.
    """

    source: str
    shard: str
    path: str
    sha256: str
    n_records: int
    n_documents: int
    n_bytes: int
    n_rejected_by_reason: dict[str, int]
    n_filtered_by_reason: dict[str, int]
    rejected_examples: tuple[str, ...]


class DuplicateExample(Record, frozen=True, kw_only=True):
    dropped: str
    kept: str
    reason: str
    similarity: float


class RecordCounts(Record, frozen=True, kw_only=True):
    """What became of some records. ``n_train`` counts documents, not their repeats."""

    n_records: int
    n_rejected: int
    n_filtered: int
    n_dropped: int
    n_train: int
    n_held_out: int

    @property
    def n_documents(self) -> int:
        return self.n_train + self.n_held_out


class SourceCounts(RecordCounts, frozen=True, kw_only=True):
    source: str


class DocumentsRecord(RecordCounts, frozen=True, kw_only=True):
    """``sha256`` is the keep-list's; ``n_train_copies`` counts training documents with repeats."""

    expert: str
    sha256: str
    n_train_copies: int
    n_dropped_by_reason: dict[str, int]
    n_rejected_by_reason: dict[str, int]
    n_filtered_by_reason: dict[str, int]
    n_kept_by_category: dict[str, int]
    duplicate_examples: tuple[DuplicateExample, ...]
    sources: tuple[SourceCounts, ...]
