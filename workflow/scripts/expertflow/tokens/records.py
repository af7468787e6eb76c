"""Settings and records of the token stages: shards of tokens and packed rows.

A *sequence* is one packed row of ``sequence_length_tokens`` ids: complete documents, or parts of
longer ones.
"""

from typing import Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.data.records import Layout

# The files of a tokenizer folder that determine tokens and chat layout.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
# fastokens cannot be required: it is used only where its ids match those of ``tokenizers``.
EngineChoice = Literal["auto", "tokenizers"]
# Why a document is not in the rows, besides the reasons of its template.
TOO_LONG = "longer_than_row"


class TokenizerSpec(Record, frozen=True, kw_only=True):
    """Settings of ``prepare_tokenizer``; ``content`` are hashes of local files.

    ``tokenizer`` is a folder, for a builtin model only; null learns ``vocab_size`` tokens instead.
    ``added_tokens`` are new tokens found in texts.
    """

    model: str
    revision: str | None
    tokenizer: str | None
    vocab_size: int
    chat_template: str
    text_special_tokens: Literal["plain", "reject", "allow"]
    content: dict[str, str]
    added_tokens: tuple[str, ...] = ()


class TokenizerRecord(Record, frozen=True, kw_only=True):
    """A tokenizer on disk and how its model writes chats; depends only on content.

    ``sha256`` is of tokenizer.json, ``vocab_size`` one above the highest token id.
    """

    path: str
    sha256: str
    vocab_size: int
    layout: Layout


class TokenSpec(Record, frozen=True, kw_only=True):
    """Settings of ``pretokenize_shard``, with the ``versions`` of the installed engines.

    ``auto`` is fastokens if its ids match those of ``tokenizers``.
    """

    engine: EngineChoice
    versions: dict[str, str]


class DecodedPiece(Record, frozen=True, kw_only=True):
    text: str
    learned: bool


class DecodedSample(Record, frozen=True, kw_only=True):
    document_id: str
    n_tokens: int
    n_supervised_tokens: int
    pieces: tuple[DecodedPiece, ...]


class StoredTokens(Record, frozen=True, kw_only=True):
    """The tokens in a store folder, for any expert.

    A dropped document has no tokens: the chat template cannot write it, or the policy on special
    tokens in texts rejects it. ``samples`` are (row, document).
    """

    n_documents: int
    n_tokens: int
    n_dropped: int
    dropped_examples: tuple[str, ...]
    samples: tuple[tuple[int, DecodedSample], ...]
    engine: str
    engine_version: str
    engine_reason: str
    tokenizer_sha256: str


class TokenShardRecord(StoredTokens, frozen=True, kw_only=True):
    """Token ids of all documents of some document shards, kept or not.

    ``path`` contains the ids, ``index_path`` lengths and supervised spans in document order.
    ``key`` identifies all inputs, and thus the content.
    """

    source: str
    shard: str
    document_shards: tuple[str, ...]
    # One index covers all document shards; these counts map a shard's row to the index's.
    n_documents_by_shard: tuple[int, ...]
    path: str
    index_path: str
    key: str


class PackingSpec(Record, frozen=True, kw_only=True):
    """Settings of ``pack_sequences``. Null ``sequence_length_tokens`` lets packing choose.

    ``max_rejected_fraction`` limits the documents per source that the chat template cannot write.
    """

    sequence_length_tokens: int | None
    packing: Literal["bfd", "concat", "none"]
    overflow: Literal["split", "truncate", "drop"]
    # Shuffles the rows; which documents share a row is not random.
    seed: int
    max_rejected_fraction: float


class LengthChoice(Record, frozen=True, kw_only=True):
    """What rows of another length would contain; a repeated document counts each time."""

    sequence_length_tokens: int
    n_over_long_documents: int
    n_over_long_tokens: int
    n_sequences: int
    fill_fraction: float


class LengthHistogram(Record, frozen=True, kw_only=True):
    """Document lengths in tokens: ``counts[i]`` lie in [edges[i], edges[i + 1]).

    Covers both splits and counts a document as often as the rows contain it.
    """

    edges: tuple[int, ...]
    counts: tuple[int, ...]
    p50: int
    p90: int
    p99: int
    max: int


class PackedSplit(Record, frozen=True, kw_only=True):
    """Rows of one split. ``sum_len_sq`` is the sum of squared document lengths after packing."""

    path: str
    sha256: str
    n_documents: int
    n_tokens_in: int
    n_tokens: int
    n_tokens_dropped: int
    n_target_tokens: int
    n_padding_tokens: int
    n_sequences: int
    sum_len_sq: int

    @property
    def mean_context_tokens(self) -> float:
        # On average, a token sees half of its document; long ones have more of the tokens.
        return self.sum_len_sq / (2 * self.n_tokens)


class LengthSuggestion(Record, frozen=True, kw_only=True):
    sequence_length_tokens: int
    reason: str


class PackingRecord(Record, frozen=True, kw_only=True):
    """Both packed splits of an expert, with their row length and the reason for it.

    ``engines`` counts shards by engine; ``engine_fallbacks`` say why some could not use the fast
    one. ``n_dropped_by_source`` counts training and held-out documents.
    """

    expert: str
    packing: str
    overflow: str
    sequence_length_tokens: int
    length_reason: str
    seed: int
    engines: dict[str, int]
    engine_fallbacks: tuple[str, ...]
    tokenizer_sha256: str
    n_special_text_documents: int
    n_dropped_held_out: int
    n_dropped_by_reason: dict[str, int]
    samples: tuple[DecodedSample, ...]
    train: PackedSplit
    held_out: PackedSplit
    histogram: LengthHistogram
    choices: tuple[LengthChoice, ...]
    suggestion: LengthSuggestion
    n_dropped_by_source: dict[str, tuple[int, int]] = field(default_factory=dict)
