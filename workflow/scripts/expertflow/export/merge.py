"""Export the model: merge the adapter in full precision and verify the written files."""

import gc
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expertflow.core.disk import check_space
from expertflow.core.errors import TrainingError
from expertflow.core.files import replacing, sha256_file, sha256_json
from expertflow.core.progress import show_activity
from expertflow.core.records import Record, fill_record
from expertflow.data.records import Layout
from expertflow.evaluate.generate import PromptCodec
from expertflow.evaluate.records import Published
from expertflow.export import model_files
from expertflow.export.records import (
    ADAPTER_CARD,
    CARD,
    ExportRecord,
    ExportSpec,
    MergeComparison,
    MergedInto,
)
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.engine import Engine
from expertflow.train.model.base import MAX_SHARD, weight_files
from expertflow.train.model.load import (
    load_base,
    load_for_export,
    make_mergeable,
    plain_attention,
)
from expertflow.train.model.packed import PackedLoss, causal_lm, compute_held_out_loss

log = logging.getLogger(__name__)

# Limits on the rows that are compared.
MAX_ROWS = 32
MAX_TOKENS = 4_096
# Logits are compared on the first tokens of this many documents, each separately.
N_PROBES = 4
PROBE_TOKENS = 64
# Merging only reorders fp32 sums; a larger difference means a faulty merge.
MAX_LOSS_DIFFERENCE = 1e-3  # nats per target
MAX_LOGIT_DIFFERENCE = 1e-2  # of the largest logit
# Casting to 16 bits changes weights by up to a relative 2^-9, and each target's loss in either
# direction. Spread per target and largest logit difference were measured on trained models with 2
# to 16 layers. Both bounds (docs/exporting.md) are several times the measured values.
ROUNDING_SPREAD = 0.1  # nats, over the square root of the number of targets
ROUNDING_LOGIT_DIFFERENCE = 0.1  # of the largest logit
HALF_TYPES = ("bfloat16", "float16")


class Trained(Record, frozen=True, kw_only=True):
    folder: Path
    published: Published
    base: Path
    layout: Layout
    rows: PackedRows
    method: str
    precision: str


class RowOutputs(Record, frozen=True):
    """A model's outputs on the same rows; one tensor of logits [T, V] per probe."""

    loss: float
    n_targets: int
    logits: tuple[torch.Tensor, ...]


@torch.no_grad()
def export_model(
    *,
    spec: ExportSpec,
    trained: Trained,
    card: Callable[[ExportRecord, MergeComparison, tuple[str, ...], bool], str],
    output: Path,
) -> ExportRecord:
    """Merge, write weights, tokenizer and card, and compare the files with the trained model.

    ``card`` renders the model card, or the adapter's if its last argument is true; its third
    argument lists the base's license files.
    Raises TrainingError, leaving nothing behind, if these are not the scored weights, or merging
    changed loss or logits by more than rounding does.
    """
    if not trained.folder.is_dir():
        raise TrainingError(f"{trained.folder}: no such weights; run train_expert again")
    dtype = model_files.find_dtype(spec.dtype, trained.base)
    with replacing(output) as folder:
        folder.mkdir(parents=True)
        merged_into, comparison = _write_weights(spec, trained, dtype, folder)
        licenses = model_files.copy_texts(folder, tokenizer=trained.base, layout=trained.layout)
        if spec.system_prompt is not None:
            (folder / model_files.SYSTEM_PROMPT).write_bytes(spec.system_prompt.encode())
        weights = weight_files(folder)
        record = fill_record(
            ExportRecord,
            spec,
            comparison,
            path=str(output),
            published_step=trained.published.step,
            dtype=str(dtype).removeprefix("torch."),
            merged_into=merged_into,
            weights_sha256=sha256_json([sha256_file(path) for path in weights]),
            n_bytes=sum(path.stat().st_size for path in weights),
        )
        for name in (CARD,) if merged_into is None else (CARD, ADAPTER_CARD):
            text = card(record, comparison, licenses, name == ADAPTER_CARD)
            (folder / name).write_text(text, encoding="utf-8")
    return record


def _write_weights(
    spec: ExportSpec, trained: Trained, dtype: torch.dtype, folder: Path
) -> tuple[MergedInto, MergeComparison]:
    sample = sample_rows(trained.rows)
    attention = plain_attention(trained.base)
    model = load_for_export(
        trained.folder,
        base=str(trained.base),
        method=trained.method,
        precision=trained.precision,
        attention_name=attention,
    )
    model_files.check_weights(model, trained.published, trained.folder)
    if trained.method == "full":
        model.float()  # compared in fp32, like the written files
    before = compute_outputs(model, sample)
    merged_into: MergedInto = None
    if hasattr(model, "merge_and_unload"):
        plain = make_mergeable(model, trained.folder)
        merged_into = "base" if plain is model else "dequantized base"
        with show_activity(lambda: "merging the adapter into its base"):
            plain = plain.merge_and_unload()
    else:
        plain = causal_lm(model)
    codec = PromptCodec(Engine(trained.base), trained.layout)
    model_files.set_decoding(plain, spec.decoding, end_id=codec.end_id, text_end_id=codec.pad_id)
    model_files.cast_weights(plain, dtype)
    n_bytes = sum(tensor.nbytes for tensor in plain.parameters())
    check_space([(folder.parents[1], n_bytes, "the merged model")])
    with show_activity(lambda: f"writing {folder}"):
        plain.save_pretrained(folder, safe_serialization=True, max_shard_size=MAX_SHARD)
    # Only one of the two models may be in memory at a time.
    del model, plain
    gc.collect()
    # The files as users load them, but in fp32, to measure only what the files lost.
    written = load_base(str(folder), dtype=torch.float32, attention_name=attention).eval()
    after = compute_outputs(written, sample)
    name = str(dtype).removeprefix("torch.")
    comparison = compare_outputs(before, after, n_rows=len(sample), dtype=name)
    if not comparison.holds:
        raise TrainingError(
            f"{spec.expert}: merging changed the held-out loss from"
            f" {comparison.loss_before_merge:.6g} to {comparison.loss_after_merge:.6g}"
            f" ({comparison.allowed_loss_difference:.2g} allowed) and the logits by"
            f" {comparison.max_logit_difference:.3g}"
            f" ({comparison.allowed_logit_difference:.2g} allowed); export.dtype fp32 avoids"
            f" rounding, and the unmerged adapter stays in {trained.folder}"
        )
    log.info(
        "held-out loss of the trained model %.6g, of the %s files %.6g (%d rows)",
        comparison.loss_before_merge, name, comparison.loss_after_merge, len(sample),
    )  # fmt: skip
    return merged_into, comparison


def sample_rows(rows: PackedRows) -> PackedRows:
    n = min(MAX_ROWS, max(1, MAX_TOKENS // rows.length))
    chosen = np.flatnonzero(rows.spans.lengths)[:n]  # rows with targets
    return PackedRows(
        (rows.take_ids(chosen),), rows.seq_lengths.take(chosen), rows.spans.take(chosen)
    )


def make_probes(rows: PackedRows) -> list[torch.Tensor]:
    """Return beginnings of documents, [1, T] each, those at the start of a row first."""
    ids_NL = rows.take_ids(np.arange(min(len(rows), N_PROBES)))
    places = []
    for i, ids in enumerate(ids_NL):
        lengths = [int(n) for n in rows.seq_lengths[i]][:N_PROBES]
        starts = np.cumsum([0, *lengths])
        for nth, n in enumerate(lengths):
            places.append((nth, i, ids[starts[nth] :][: min(n, PROBE_TOKENS)]))
    places.sort(key=lambda place: place[:2])
    return [torch.from_numpy(ids[None].astype(np.int64)) for _, _, ids in places[:N_PROBES]]


def compute_outputs(model: Any, rows: PackedRows) -> RowOutputs:
    loss, n_targets = compute_held_out_loss(PackedLoss(model).eval(), rows, micro_batch_size=1)
    logits = tuple(
        model(input_ids=ids, use_cache=False).logits[0].float() for ids in make_probes(rows)
    )
    return RowOutputs(loss, n_targets, logits)


def compare_outputs(
    trained: RowOutputs, written: RowOutputs, *, n_rows: int, dtype: str
) -> MergeComparison:
    loss, logits = MAX_LOSS_DIFFERENCE, MAX_LOGIT_DIFFERENCE
    if dtype in HALF_TYPES:
        loss += ROUNDING_SPREAD / math.sqrt(trained.n_targets)
        logits = ROUNDING_LOGIT_DIFFERENCE
    largest = max(float(tensor.abs().max()) for tensor in trained.logits)
    pairs = zip(trained.logits, written.logits, strict=True)
    differences = [(now - then).abs().max() for then, now in pairs]
    return MergeComparison(
        loss_before_merge=trained.loss,
        loss_after_merge=written.loss,
        n_rows_compared=n_rows,
        n_targets=trained.n_targets,
        allowed_loss_difference=loss,
        # torch's max propagates NaN, Python's may lose it.
        max_logit_difference=float(torch.stack(differences).max()),
        allowed_logit_difference=logits * max(1.0, largest),
    )
