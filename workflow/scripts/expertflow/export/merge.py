"""Write the model that people load: adapter merged in full precision, checked before it counts."""

import gc
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from expertflow.core.files import replacing, sha256_file, sha256_json
from expertflow.core.records import Record
from expertflow.data.records import Layout
from expertflow.evaluate.records import Published
from expertflow.export.merge_check import (
    ATTENTION,
    Comparison,
    ask,
    check,
    compare,
    sample_rows,
)
from expertflow.export.merge_files import (
    cast,
    check_weights,
    copy_texts,
    set_decoding,
    write_system_prompt,
    written_dtype,
)
from expertflow.export.records import ExportRecord, ExportSpec
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.engine import Engine
from expertflow.train.model.base import weight_files
from expertflow.train.model.load import load_base, load_for_export, mergeable
from expertflow.train.model.packed import causal_lm
from expertflow.train.records import ModelRecord, TrainingRecord

log = logging.getLogger(__name__)

MergedInto = Literal["base", "dequantised base"] | None
# Larger models are written as several files, which can be copied and read one by one.
MAX_SHARD = "5GB"
CARD = "README.md"


class Trained(Record, frozen=True, kw_only=True):
    """The weights to export, and what they were trained on.

    ``load`` gives the model in fp32, and ``folder`` holds its files; ``rows`` are held out.
    """

    load: Callable[[], Any]
    folder: Path
    published: Published
    base: Path
    layout: Layout
    rows: PackedRows

    @classmethod
    def of(
        cls,
        training: TrainingRecord,
        *,
        folder: Path,
        published: Published,
        model: ModelRecord,
        rows: PackedRows,
    ) -> "Trained":
        """Load the published weights as training had them."""
        load = partial(
            load_for_export,
            folder,
            base=model.path,
            method=training.method,
            precision=training.precision,
            attention_name=ATTENTION,
        )
        base = Path(model.path)
        return cls(
            load=load,
            folder=folder,
            published=published,
            base=base,
            layout=model.layout,
            rows=rows,
        )


@torch.no_grad()
def export_model(
    *,
    spec: ExportSpec,
    trained: Trained,
    card: Callable[[ExportRecord, Comparison, tuple[str, ...]], str],
    output: Path,
) -> ExportRecord:
    """Merge, write weights, tokenizer and card, and compare the files with the trained model.

    The trained model is let go before the files are loaded. ``card`` writes the model card; it is
    given the names of the base's licence files, too.

    Raises:
        TrainingError: these are not the weights that were scored, or merging moved the loss or the
            logits by more than rounding does. Nothing is left then.
    """
    dtype = written_dtype(spec.dtype, trained.base)
    with replacing(output) as folder:
        folder.mkdir(parents=True)
        merged_into, comparison = _write_weights(spec, trained, dtype, folder)
        licences = copy_texts(folder, tokenizer=trained.base, layout=trained.layout)
        write_system_prompt(folder, spec.system_prompt)
        weights = weight_files(folder)
        record = ExportRecord(
            expert=spec.expert,
            path=str(output),
            published_step=trained.published.step,
            dtype=str(dtype).removeprefix("torch."),
            merged_into=merged_into,
            loss_before_merge=comparison.loss_before,
            loss_after_merge=comparison.loss_after,
            n_rows_compared=comparison.n_rows,
            max_logit_difference=comparison.max_logit_difference,
            weights_sha256=sha256_json([sha256_file(path) for path in weights]),
            n_bytes=sum(path.stat().st_size for path in weights),
        )
        (folder / CARD).write_text(card(record, comparison, licences), encoding="utf-8")
    return record


def _write_weights(
    spec: ExportSpec, trained: Trained, dtype: torch.dtype, folder: Path
) -> tuple[MergedInto, Comparison]:
    """Write the merged weights and hold them against the trained model."""
    sample = sample_rows(trained.rows)
    model = trained.load()
    check_weights(model, trained.published, trained.folder)
    before = ask(model, sample)
    plain, merged_into = merge(model, trained.folder)
    engine, layout = Engine(trained.base), trained.layout
    text_end_id = engine.special_id(layout.text_end)
    end_id = engine.special_id(layout.turn_end or layout.text_end)
    set_decoding(plain, spec.decoding, end_id=end_id, text_end_id=text_end_id)
    cast(plain, dtype)
    plain.save_pretrained(folder, safe_serialization=True, max_shard_size=MAX_SHARD)
    # Only one of the two models is in memory at a time.
    del model, plain
    gc.collect()
    after = ask(load_written(folder), sample)
    name = str(dtype).removeprefix("torch.")
    comparison = compare(before, after, n_rows=len(sample), dtype=name)
    check(spec.expert, comparison, checkpoint=str(trained.folder))
    log.info(
        "held-out loss of the trained model %.6g, of the %s files %.6g (%d rows)",
        comparison.loss_before, name, comparison.loss_after, comparison.n_rows,
    )  # fmt: skip
    return merged_into, comparison


def load_written(folder: Path) -> Any:
    """Load the files as anyone does, computing in fp32: what is left is what the files lost."""
    return load_base(str(folder), dtype=torch.float32, attention_name=ATTENTION).eval()


def merge(model: Any, checkpoint: Path) -> tuple[Any, MergedInto]:
    """Give the plain model and what its adapter was merged into."""
    if not hasattr(model, "merge_and_unload"):
        return causal_lm(model), None
    whole = mergeable(model, checkpoint)
    return whole.merge_and_unload(), "base" if whole is model else "dequantised base"
