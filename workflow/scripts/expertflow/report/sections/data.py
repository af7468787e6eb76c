"""The report's ``data`` section: what the model was trained on, and what was kept from it."""

from typing import Any

from expertflow.core.records import to_json
from expertflow.report.inputs import ReportInputs


def data_section(inputs: ReportInputs) -> dict[str, Any]:
    """Join what the data and token stages counted."""
    documents, packing, training = inputs.documents, inputs.packing, inputs.training
    rows = packing.train
    n_cells = rows.n_tokens + rows.n_padding_tokens
    n_seen = training.n_tokens + training.n_padding_tokens
    n_refused = sum(packing.n_dropped_by_reason.values())
    counts = {source.source: source for source in documents.sources}
    return {
        "records": documents.n_records,
        "documents": documents.n_documents - n_refused,
        "documents_train": documents.n_train - n_refused + packing.n_dropped_held_out,
        "documents_train_copies": documents.n_train_copies,
        "documents_held_out": documents.n_held_out - packing.n_dropped_held_out,
        "documents_with_special_text": packing.n_special_text_documents,
        "rejected_by_reason": documents.n_rejected_by_reason,
        "filtered_by_reason": documents.n_filtered_by_reason,
        "dropped_by_reason": _added(documents.n_dropped_by_reason, packing.n_dropped_by_reason),
        "kept_by_category": documents.n_kept_by_category,
        "duplicate_examples": to_json(documents.duplicate_examples),
        "chat_template": inputs.model.layout.chat_template_origin,
        "samples": to_json(packing.samples),
        "sources": [
            {
                **to_json(source),
                "n_train": counts[source.name].n_train,
                "n_held_out": counts[source.name].n_held_out,
                "n_left_out": counts[source.name].n_rejected
                + counts[source.name].n_filtered
                + counts[source.name].n_dropped,
            }
            for source in inputs.datasets.sources
        ],
        "packing": packing.packing,
        "overflow": packing.overflow,
        "seq_len": packing.sequence_length_tokens,
        "seq_len_reason": packing.length_reason,
        "seq_len_suggestion": packing.suggestion.reason,
        "tokenizer_engines": packing.engines,
        "tokenizer_fallbacks": list(packing.engine_fallbacks),
        "sequences": rows.n_sequences,
        "useful_tokens": rows.n_tokens,
        "trained_tokens": training.n_tokens,
        "target_tokens": training.n_target_tokens,
        "padding_fraction": _share(training.n_padding_tokens, n_seen),
        "fill_fraction": _share(rows.n_tokens, n_cells),
        "truncated_fraction": _share(rows.n_tokens_dropped, rows.n_tokens_in),
        "sum_len_sq": rows.sum_len_sq,
        "length_histogram": to_json(packing.histogram),
    }


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {reason: one.get(reason, 0) + other.get(reason, 0) for reason in sorted({*one, *other})}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
