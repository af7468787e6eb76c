"""Write the model that people load: adapter merged in full precision, checked before it counts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import GenerationConfig

from expertflow.core.errors import TrainingError
from expertflow.core.files import replacing, sha256_file, sha256_json
from expertflow.core.records import to_json
from expertflow.data.records import Layout
from expertflow.export.card import model_card
from expertflow.export.records import ExportRecord
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.engine import Engine
from expertflow.train.heldout import held_out_loss
from expertflow.train.load import load_base, mergeable
from expertflow.train.model import PackedLoss, causal_lm

# Attention of the comparison: it takes plain text as well as packed rows.
ATTENTION = "sdpa"
N_ROWS = 4
PROBE_TOKENS = 64
# Merging changes the order of fp32 sums and nothing else; more than this is a damaged merge.
MAX_LOSS_DIFFERENCE = 1e-3  # nats a target
MAX_LOGIT_DIFFERENCE = 1e-2  # of the largest logit


@dataclass(frozen=True, slots=True)
class Said:
    """What a model says to the same rows and tokens."""

    loss: float
    logits: torch.Tensor


@torch.no_grad()
def export_model(
    *,
    expert: str,
    load_model: Callable[[], Any],
    checkpoint: Path,
    rows: PackedRows,
    tokenizer: Path,
    layout: Layout,
    decoding: dict[str, Any],
    card: dict[str, Any],
    output: Path,
) -> ExportRecord:
    """Merge, write weights, tokenizer and card, and compare the files with the trained model.

    ``load_model`` gives the trained model in fp32; it is let go before the files are loaded.

    Raises:
        TrainingError: merging moved the loss or the logits by more than rounding does.
    """
    sample = first_rows(rows, N_ROWS)
    model = load_model()
    trained = ask(model, sample)
    plain, merged_into = merge(model, checkpoint)
    end_id = Engine(tokenizer).special_id(layout.turn_end or layout.text_end)
    set_decoding(plain, decoding, end_id=end_id)
    dtype = str(plain.dtype).removeprefix("torch.")
    with replacing(output) as partial:
        partial.mkdir(parents=True)
        plain.save_pretrained(partial, safe_serialization=True)
        del model, plain
        written = ask(load_written(partial), sample)
        weights = sorted(partial.glob("*.safetensors"))
        record = ExportRecord(
            expert=expert,
            path=str(output),
            dtype=dtype,
            merged_into=merged_into,
            loss_before_merge=trained.loss,
            loss_after_merge=written.loss,
            n_rows_compared=len(sample),
            max_logit_difference=compare(expert, trained, written),
            weights_sha256=sha256_json([sha256_file(path) for path in weights]),
            n_bytes=sum(path.stat().st_size for path in weights),
        )
        copy_texts(partial, tokenizer=tokenizer, layout=layout)
        text = model_card({**card, "export": to_json(record)})
        (partial / "README.md").write_text(text, encoding="utf-8")
    return record


def load_written(folder: Path) -> Any:
    """Load the files as anyone does, in fp32."""
    return load_base(str(folder), dtype=torch.float32, attention_name=ATTENTION)


def merge(model: Any, checkpoint: Path) -> tuple[Any, Literal["base", "dequantised base"] | None]:
    """Give the plain model and what its adapter was merged into."""
    if not hasattr(model, "merge_and_unload"):
        return causal_lm(model), None
    whole = mergeable(model, checkpoint)
    return whole.merge_and_unload(), "base" if whole is model else "dequantised base"


def first_rows(rows: PackedRows, n: int) -> PackedRows:
    """Take the first ``n`` rows that hold something to predict."""
    chosen = np.flatnonzero(rows.spans.lengths)[:n]
    return PackedRows(
        (rows.take_ids(chosen),), rows.seq_lengths.take(chosen), rows.spans.take(chosen)
    )


def ask(model: Any, rows: PackedRows) -> Said:
    """Take the loss on some rows, and the logits of a fixed string of tokens."""
    vocab_size = causal_lm(model).config.vocab_size
    probe = torch.arange(PROBE_TOKENS)[None] % vocab_size
    loss, _ = held_out_loss(PackedLoss(model).eval(), rows, micro_batch_size=1)
    return Said(loss, model(input_ids=probe, use_cache=False).logits)


def compare(expert: str, trained: Said, written: Said) -> float:
    """Give the largest difference of logits.

    Raises:
        TrainingError: it, or that of the losses, is more than rounding.
    """
    difference = float((written.logits - trained.logits).abs().max())
    allowed = MAX_LOGIT_DIFFERENCE * max(1.0, float(trained.logits.abs().max()))
    # Written so that a loss that is not a number fails as well.
    if abs(written.loss - trained.loss) <= MAX_LOSS_DIFFERENCE and difference <= allowed:
        return difference
    raise TrainingError(
        f"{expert}: merging moved the held-out loss from {trained.loss:.6g} to {written.loss:.6g}"
        f" and the logits by {difference:.3g}; the adapter stays unmerged in"
        f" results/{expert}/checkpoint"
    )


def copy_texts(folder: Path, *, tokenizer: Path, layout: Layout) -> None:
    """Put the tokenizer and the chat template beside the weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).is_file():
            (folder / name).write_bytes((tokenizer / name).read_bytes())
    if layout.chat_template is not None:
        # The template of training, which a manifest may have set; it wins over the settings'.
        (folder / "chat_template.jinja").write_text(layout.chat_template, encoding="utf-8")


def set_decoding(model: Any, decoding: dict[str, Any], *, end_id: int) -> None:
    """Let the manifest's decoding settings travel with the model; temperature 0 is greedy.

    They replace those of the base model, which would not be valid beside a greedy setting.
    """
    sampled = decoding if decoding["temperature"] > 0 else {}
    model.generation_config = GenerationConfig(
        eos_token_id=end_id, do_sample=bool(sampled), **sampled
    )
