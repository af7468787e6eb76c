"""Tiny models to export: a base with its tokenizer, adapters, and training records."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from support import LORA, tiny_qwen3

from expertflow.data.layout import chatml_layout
from expertflow.evaluate.records import Decoding, Published
from expertflow.export.merge import Trained, export_model
from expertflow.export.records import ExportRecord, ExportSpec
from expertflow.plan.settings import LoraSpec
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer
from expertflow.train.model.load import add_adapter, load_base, load_for_export
from expertflow.train.model.weights import weights_sha256

ATTENTION = "sdpa"
VOCAB_SIZE = 300
LAYOUT = chatml_layout()
TARGETS = ("q_proj", "v_proj", "down_proj")


def write_base(folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a random model with a tokenizer and a chat model's sampling settings."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(["some text"], vocab_size=VOCAB_SIZE), folder)
    settings = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": True, **changes}
    model = tiny_qwen3(**settings).to(dtype)
    # Larger than usual, so that a wrong one shows.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    model.save_pretrained(folder)
    return folder


def held_out_rows(n: int = 5) -> PackedRows:
    """Return rows, the first without targets."""
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (n, 24)).astype(np.int32)
    return PackedRows.from_lists(
        ids, [[24], *[[14, 10]] * (n - 1)], [[], *[[2, 14, 16, 24]] * (n - 1)]
    )


def load(what: Trained, method: str | None = None) -> Any:
    """Load as the export does, or as if trained by another method."""
    return load_for_export(
        what.folder, base=str(what.base), method=method or what.method, precision=what.precision,
        attention_name=ATTENTION,
    )  # fmt: skip


def trained(
    folder: Path, base: Path, sha256: str, *, method: str = "lora", precision: str = "fp32"
) -> Trained:
    published = Published(
        step=3, path=".", weights_sha256=sha256, reason="r", n_questions=0, candidates=()
    )
    return Trained(
        folder=folder, published=published, base=base, layout=LAYOUT, rows=held_out_rows(),
        method=method, precision=precision,
    )  # fmt: skip


def train_adapter(
    base: Path,
    folder: Path,
    *,
    method: str = "lora",
    precision: str = "fp32",
    lora: LoraSpec | None = None,
) -> Trained:
    """Save an adapter with random weights, as training does."""
    model = load_base(
        str(base), dtype=torch.float32, attention_name=ATTENTION, quantized=method == "qlora"
    )
    wrapped = add_adapter(model, lora or replace(LORA, targets=TARGETS))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    wrapped.save_pretrained(folder)
    return trained(folder, base, weights_sha256(wrapped), method=method, precision=precision)


def export(what: Trained, output: Path, **changes: Any) -> ExportRecord:
    own = {"description": "d", "decoding": Decoding(), "dtype": "auto", **changes}
    spec = ExportSpec(expert="e", **own)
    return export_model(spec=spec, trained=what, card=lambda *_: "card\n", output=output)
