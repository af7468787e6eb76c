"""Settings of the data stages: sources, checks, deduplication."""

from decimal import Decimal
from typing import Any, Literal, Self

from msgspec import ValidationError, convert, field

from expertflow.core.errors import ConfigError
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


class SourceOptions(Record, frozen=True, kw_only=True):
    """Base of the ``options`` of a kind of source."""

    @classmethod
    def from_manifest(cls, options: dict[str, object]) -> Self:
        """Check a source's options; ConfigError for an unknown or unusable one."""
        known = cls.__struct_fields__
        if unknown := sorted(map(str, set(options) - set(known))):
            fix = f"use {', '.join(known)}" if known else "this kind of source has no options"
            raise ConfigError(f"options.{unknown[0]}: unknown; {fix}")
        try:
            return convert({k: value for k, value in options.items() if value is not None}, cls)
        except ValidationError as error:
            problem, _, place = str(error).replace("`", "").partition(" - at $.")
            key = place.partition("[")[0]
            raise ConfigError(
                f"options.{key}: {options[key]!r} is not valid: {problem[0].lower()}{problem[1:]}"
            ) from error


class ReadOptions(SourceOptions, frozen=True, kw_only=True):
    """Options of a local source. A null ``delimiter`` is a comma in .csv and a tab in .tsv."""

    text_records: Literal["file", "line"] = "file"
    delimiter: str | None = None

    def __post_init__(self) -> None:
        sign = self.delimiter
        if sign is not None and (len(sign) != 1 or not sign.isascii() or sign in '"\r\n\0'):
            raise ConfigError(f"options.delimiter: {sign!r} is not one character, such as ';'")

    @classmethod
    def select_known(cls, options: dict[str, object]) -> "ReadOptions":
        """Select the reading options; other kinds of source have different ones."""
        known = cls.__struct_fields__
        return cls.from_manifest({key: options[key] for key in options if key in known})


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
