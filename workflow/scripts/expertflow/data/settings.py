"""Settings of the data stages: sources, checks, deduplication."""

from decimal import Decimal
from typing import Any, Literal

from msgspec import field

from expertflow.core.records import Record

CheckName = Literal["sql", "json", "json_schema", "cypher", "typescript", "length", "language"]


class FieldCheck(Record, frozen=True, kw_only=True):
    """One check of a source field; its name determines which keys apply."""

    field: str
    check: CheckName
    # sql: sqlglot's dialect names; transpile_to rewrites the field
    dialect: str | None = None
    transpile_to: str | None = None
    # json_schema: the field with the schema
    schema_field: str | None = None
    # length
    min_chars: int | None = None
    max_chars: int | None = None
    # language: ISO 639-1 codes
    languages: tuple[str, ...] = ()


class SourceSpec(Record, frozen=True, kw_only=True):
    """One source of a manifest; the schema checks which keys its kind needs."""

    name: str
    kind: str
    license: str | None = None
    n_shards: int | None = None
    # keys that only some kinds read
    path: str | None = None
    id: str | None = None
    revision: str | None = None
    config: str | None = None
    split: str | None = None
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
    # filters and limits
    checks: tuple[FieldCheck, ...] = ()
    scan_secrets: bool = False
    pseudonymize_emails: bool = False
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
    """A file that must not be trained on; ``text`` is the template of a question.

    ``n_words`` is the length of an overlapping run of words, ``sha256`` the hash when locked.
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

    ``weights`` are the share of a source to keep, or its copies; ``category_caps`` override
    ``max_per_category``.
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


def format_label(value: object) -> str:
    """Return the name of a category or a group; 1 and 1.0 are the same."""
    if isinstance(value, float | Decimal) and value == int(value):
        value = int(value)
    return str(value)
