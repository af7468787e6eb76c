"""The kit's models and data: random weights of known shapes, documents of realistic lengths."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from support import keep_list, token_shard

from expertflow.core.records import Record
from expertflow.data.layout import chatml_layout
from expertflow.plan.records import ModelFacts
from expertflow.tokens.arrow import INDEX, index_batch
from expertflow.tokens.pack import pack_sequences
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.records import PackingRecord, PackingSpec, TokenizerRecord
from expertflow.train.records import ModelRecord

# Shares, medians in tokens at rows of 2048, and sigmas of the lengths: most documents are short
# questions with their answers, some are long.
LENGTHS = ((0.75, 180, 0.7), (0.25, 700, 0.6))
LENGTHS_WORDS = (
    "seeded log-normal mixture, 75 % median 180 tokens sigma 0.7, 25 % median 700 sigma 0.6, from"
    " 1/128 of a row to a whole one; the last 20 to 80 % of a document are supervised"
)


class Size(Record, frozen=True, kw_only=True):
    """A model's shape, and the rows it is trained on."""

    facts: ModelFacts
    row_length: int = 2048
    n_documents: int = 6000


def make_size(
    h: int, intermediate: int, n_layers: int, n_heads: int, *, tied: bool = True, n_kv: int = 8,
    d: int = 128, vocab: int = 151_936, family: str = "qwen3", **rows: int,
) -> Size:  # fmt: skip
    facts = ModelFacts(
        n_layers=n_layers, hidden_size=h, n_heads=n_heads, n_kv_heads=n_kv, head_dim=d,
        intermediate_size=intermediate, vocab_size=vocab, tie_word_embeddings=tied,
        model_type=family,
    )  # fmt: skip
    return Size(facts=facts, **rows)


# Shapes of the published configs of Qwen3. The small ones have enough documents that no step of a
# comparison is in a second epoch.
SIZES = {
    "tiny": make_size(64, 128, 2, 4, n_kv=2, d=16, vocab=512, row_length=64),
    "small": make_size(256, 768, 4, 8, n_kv=4, d=32, vocab=8192, row_length=512, n_documents=2000),
    "0.6B": make_size(1024, 3072, 28, 16),
    "1.7B": make_size(2048, 6144, 28, 16),
    "4B": make_size(2560, 9728, 36, 32),
    "8B": make_size(4096, 12288, 36, 32, tied=False),
}
LLAMA_8B = make_size(4096, 14_336, 32, 32, tied=False, vocab=128_256, family="llama")


def make_model(folder: Path, name: str, *, device: str) -> dict[str, int]:
    """Draw random weights on a device and write them in bf16, as a model directory."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        config = model_config(SIZES[name].facts)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    n_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"n_parameters": model.num_parameters(), "n_weight_bytes": n_bytes}


def model_config(facts: ModelFacts) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        facts.model_type, vocab_size=facts.vocab_size, hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size, num_hidden_layers=facts.n_layers,
        num_attention_heads=facts.n_heads, num_key_value_heads=facts.n_kv_heads,
        head_dim=facts.head_dim, tie_word_embeddings=facts.tie_word_embeddings,
        max_position_embeddings=40_960,
    )  # fmt: skip


def model_record(folder: Path, name: str, sizes: dict[str, int]) -> ModelRecord:
    """Return the record for a training job."""
    return ModelRecord(
        name=f"random Qwen3 {name}", kind="local", revision=None, path=str(folder), license=None,
        facts=SIZES[name].facts, weights_sha256="",
        tokenizer=TokenizerRecord(
            path="", sha256="", vocab_size=SIZES[name].facts.vocab_size, layout=chatml_layout()
        ),
        **sizes,
    )  # fmt: skip


def document_lengths(rng: np.random.Generator, n: int, row_length: int) -> np.ndarray[Any, Any]:
    """Draw lengths from the mixture, scaled to the row length and capped at it."""
    which = rng.choice(len(LENGTHS), n, p=[share for share, _, _ in LENGTHS])
    medians = np.array([median for _, median, _ in LENGTHS])[which]
    sigmas = np.array([sigma for _, _, sigma in LENGTHS])[which]
    drawn = medians * np.exp(sigmas * rng.standard_normal(n)) * (row_length / 2048)
    return np.clip(drawn, max(4, row_length // 128), row_length).astype(np.int64)


def make_rows(folder: Path, name: str) -> PackingRecord:
    """Write documents of random ids in rows, with the project's own packing."""
    size = SIZES[name]
    rng = np.random.default_rng(0)
    lengths = document_lengths(rng, size.n_documents, size.row_length)
    documents: Any = [rng.integers(0, size.facts.vocab_size, n).astype(np.int32) for n in lengths]
    starts = lengths - np.ceil(lengths * rng.uniform(0.2, 0.8, len(lengths))).astype(np.int64)
    shard = token_shard(folder, documents)
    with pa.OSFile(shard.index_path, "wb") as sink, pa.ipc.new_stream(sink, INDEX) as writer:
        spans = Ragged.from_lists([[int(s), int(n)] for s, n in zip(starts, lengths, strict=True)])
        nothing: list[str | None] = [None] * len(lengths)
        writer.write_batch(index_batch(lengths, spans, [False] * len(lengths), nothing))
    keep = keep_list(folder, {"000": [i % 100 == 0 for i in range(len(lengths))]})
    spec: Any = PackingSpec(
        sequence_length_tokens=size.row_length, packing="bfd", overflow="split", seed=0,
        max_rejected_fraction=0.01,
    )  # fmt: skip
    output = folder / "packed"
    return pack_sequences(expert="kit", spec=spec, shards=[shard], keep=keep, directory=output)
