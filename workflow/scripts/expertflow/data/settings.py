"""What the data stages are told: sources, checks, and when two documents count as one."""

from typing import Any, Literal

from msgspec import field

from expertflow.core.records import Record

SourceKind = Literal["local", "hub", "git", "generated"]
CheckName = Literal["sql", "json", "json_schema", "cypher", "typescript", "length", "language"]


class FieldCheck(Record, frozen=True, kw_only=True):
    """One check of one field of a source's records; which keys a check reads is in its name."""

    field: str
    check: CheckName
    # sql: names as sqlglot has them; with transpile_to the field is rewritten in that dialect
    dialect: str | None = None
    transpile_to: str | None = None
    # json_schema: the field that holds the schema
    schema_field: str | None = None
    # length
    min_chars: int | None = None
    max_chars: int | None = None
    # language: ISO 639-1 codes
    languages: tuple[str, ...] = ()


class SourceSpec(Record, frozen=True, kw_only=True):
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
    tools: str | None = None
    role_key: str | None = None
    content_key: str | None = None
    roles: dict[str, str] = field(default_factory=dict)
    group: str | None = None
    duplicate_fields: tuple[str, ...] = ()
    category: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    # what is let through, and how much of it
    checks: tuple[FieldCheck, ...] = ()
    scan_secrets: bool = False
    pseudonymise_emails: bool = False
    weight: float = 1.0
    max_documents: int | None = None


class FetchSpec(Record, frozen=True, kw_only=True):
    source: SourceSpec
    preset: str


class SignatureSpec(Record, frozen=True, kw_only=True):
    n_words: int
    n_permutations: int


class NearSpec(SignatureSpec, frozen=True, kw_only=True):
    """``threshold`` is the share of runs that two near documents have in common, 0-1 (Jaccard)."""

    threshold: float


class BenchmarkSpec(Record, frozen=True, kw_only=True):
    """A file that must not be trained on.

    ``text`` is the template of what must not occur, ``n_words`` the length of a run of words that
    counts as overlap, ``sha256`` the file's content when the lock was taken.
    """

    path: str
    text: str
    n_words: int
    sha256: str


class PrepareSpec(Record, frozen=True, kw_only=True):
    source: SourceSpec
    system_prompt: str | None
    supervise: Literal["completion", "all"]
    evaluation_fields: tuple[str, ...]
    on_reject: Literal["skip", "stop"]
    near: SignatureSpec | None
    benchmarks: tuple[BenchmarkSpec, ...]


class DeduplicateSpec(Record, frozen=True, kw_only=True):
    """Settings of ``deduplicate_documents``. Null limits keep all.

    ``weights`` by source: the share of its documents that is kept, or how often training sees them.
    ``category_caps`` win over ``max_per_category``.
    """

    eval_fraction: float
    max_documents: int | None
    seed: int
    max_rejected_fraction: float
    near: NearSpec | None
    weights: dict[str, float]
    max_per_source: dict[str, int]
    max_per_category: int | None
    category_caps: dict[str, int]


def category_name(value: str | float) -> str:
    """Name a category by its value: a whole number is the same however it is written."""
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if is_whole else value)
