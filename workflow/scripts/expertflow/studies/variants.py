"""Turn a variant into a plan and rows that can be timed, or explain why that is impossible.

Rows of one document each are unpacked from packed rows without tokenizing or cutting again, so a
run sees the tokens and targets of the plan's own steps, in another order and with padding.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from expertflow.core.errors import ConfigError
from expertflow.core.files import sha256_json
from expertflow.core.records import Record, to_json
from expertflow.core.settings import list_settings, name_of
from expertflow.plan.override import override
from expertflow.plan.records import ModelFacts, TrainPlan
from expertflow.plan.settings import Training
from expertflow.studies.records import Rows, Variant
from expertflow.tokens.arrow import PAD_ID, PackedRows, read_rows, write_rows
from expertflow.tokens.packing import clip_spans
from expertflow.tokens.ragged import Ragged, offsets_of, run_indices
from expertflow.tokens.records import PackingRecord

# Settings that a variant may change; all other differences between plans follow from them.
MOVABLE = tuple(setting.name for setting in list_settings(Training) if "speed" in setting.affects)
# The trainer cuts rows of one document to a multiple of this.
MULTIPLE = 8
# Packed rows unpacked at a time.
BLOCK_ROWS = 256


class FirstRows(Record, frozen=True, kw_only=True):
    """The rows of a plan's first steps, each once."""

    chosen: NDArray[np.int64]
    n_documents: int
    n_tokens: int
    longest_tokens: int

    @property
    def documents_per_row(self) -> float:
        return self.n_documents / len(self.chosen)

    @property
    def tokens_per_row(self) -> float:
        return self.n_tokens / len(self.chosen)


class VariantSetup(Record, frozen=True, kw_only=True):
    """How to run a variant; ``forced`` lists changes that its rows require beyond its settings."""

    plan: TrainPlan
    rows: Rows
    n_timed_steps: int
    settings_sha256: str
    forced: str | None = None


class NotMeasurableError(Exception):
    """A variant requires something that this machine or model cannot do."""

    outcome = "not measurable"


class IsThePlanError(NotMeasurableError):
    outcome = "is the plan"


def with_one_process(plan: TrainPlan, *, packing: PackingRecord, facts: ModelFacts) -> TrainPlan:
    if plan.world_size == 1:
        return plan
    return override(plan, {name_of(Training.world_size): 1}, packing=packing, facts=facts)


def set_up_variant(
    base: TrainPlan,
    variant: Variant,
    *,
    first: FirstRows,
    is_unpacked: bool,
    n_timed_steps: int,
    packing: PackingRecord,
    facts: ModelFacts,
) -> VariantSetup:
    """Resolve a variant; ``is_unpacked``: the plan's own rows have one document each.

    Raises IsThePlanError if nothing would change, NotMeasurableError if the plan, card or model
    does not support it.
    """
    changes: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in variant.training.items()
    }
    micro = changes.get(name_of(Training.batch_size))
    own_batch = variant.rows != "packed" and micro is not None
    accumulation = name_of(Training.gradient_accumulation_steps)
    if micro is not None and accumulation not in changes and not own_batch:
        n_rows = base.global_batch_sequences
        if n_rows % micro:
            raise NotMeasurableError(
                f"micro-batches of {micro} rows do not divide the plan's global batch of {n_rows}"
            )
        changes[accumulation] = n_rows // micro
    try:
        plan = override(base, changes, packing=packing, facts=facts)
    except ConfigError as error:
        raise NotMeasurableError(str(error)) from error
    unlike_rows = variant.rows == "on_the_fly" or (variant.rows == "unpacked" and not is_unpacked)
    if not list_changes(base, plan) and not unlike_rows:
        raise IsThePlanError("nothing would change")
    if base.gpu is None and plan.precision == "fp16":
        raise NotMeasurableError("fp16 needs a CUDA card, and this plan trains on a CPU")
    per_row, forced = first.tokens_per_row, None
    rows: Rows = variant.rows if unlike_rows else "packed"
    if unlike_rows:
        plan = documents_as_rows(base, plan, first, own_batch=own_batch)
        forced = None if own_batch else f"micro-batch {plan.batch_size} of one document each"
        if plan.torch_compile and not variant.training.get(name_of(Training.torch_compile)):
            # Rows have many lengths, each compiled separately; a plan would not compile either.
            plan = replace(plan, torch_compile=False)
            forced = f"not compiled, {forced}" if forced else "not compiled"
        per_row = first.n_tokens / first.n_documents
    per_step = per_row * min(plan.global_batch_sequences, plan.n_sequences)
    of_plan = first.tokens_per_row * min(base.global_batch_sequences, base.n_sequences)
    # As many tokens as in the plan's timed steps; 1e-6 absorbs rounding in the quotient.
    n_steps = max(3, math.ceil(n_timed_steps * of_plan / per_step - 1e-6))
    settings = to_json({name: getattr(plan, name) for name in sorted(list_changes(base, plan))})
    return VariantSetup(
        plan=plan,
        rows=rows,
        n_timed_steps=n_steps,
        settings_sha256=sha256_json({"rows": rows, **settings}),
        forced=forced,
    )


def list_changes(base: TrainPlan, plan: TrainPlan) -> set[str]:
    return {name for name in MOVABLE if getattr(base, name) != getattr(plan, name)}


def documents_as_rows(
    base: TrainPlan, plan: TrainPlan, first: FirstRows, *, own_batch: bool
) -> TrainPlan:
    """Return the plan for rows of one document each: the same documents in as many steps.

    Padded to equal length, the micro-batch would fill the plan's; with ``own_batch`` it is the
    variant's.
    """
    per_step = base.global_batch_sequences * first.documents_per_row
    if own_batch:
        micro = plan.batch_size
        in_all = micro * plan.gradient_accumulation_steps
    else:
        in_all = max(1, round(per_step))
        padded = math.ceil(first.longest_tokens / MULTIPLE) * MULTIPLE  # of the longest document
        micro = min(in_all, max(1, plan.batch_size * base.sequence_length_tokens // padded))
    # A step has a whole number of documents, so the number of steps changes slightly.
    scale = per_step / in_all
    n_steps = max(1, round(base.n_steps * scale))
    n_warmup = min(round(base.n_warmup_steps * scale), n_steps - 1)
    per_epoch = max(1, math.ceil(first.n_documents / in_all))
    return replace(
        plan,
        batch_size=micro,
        gradient_accumulation_steps=math.ceil(in_all / micro),
        global_batch_sequences=in_all,
        n_sequences=first.n_documents,
        n_steps=n_steps,
        n_steps_per_epoch=per_epoch,
        n_epochs=n_steps / per_epoch,
        n_warmup_steps=n_warmup,
        n_decay_steps=min(round(base.n_decay_steps * scale), n_steps - n_warmup),
        group_by_length=False,
    )


def first_rows(plan: TrainPlan, rows: PackedRows, *, n_steps: int) -> FirstRows:
    from expertflow.train.feed.loader import make_feed  # imports torch

    order = make_feed(plan, rows).order
    taken = np.concatenate([order.rows_of_step(step) for step in range(n_steps)])
    _, first = np.unique(taken, return_index=True)  # epochs repeat rows
    chosen = taken[np.sort(first)].astype(np.int64)
    documents = rows.seq_lengths.take(chosen)
    return FirstRows(
        chosen=chosen,
        n_documents=len(documents.values),
        n_tokens=int(documents.values.sum()),
        longest_tokens=int(documents.values.max()),
    )


def write_unpacked(packed: Path, folder: Path, first: FirstRows) -> None:
    rows = read_rows(packed / "train")
    folder.mkdir(parents=True)
    starts = range(0, len(first.chosen), BLOCK_ROWS)
    blocks = (split_documents(rows, first.chosen[i : i + BLOCK_ROWS]) for i in starts)
    write_rows(folder / "train", blocks, length=rows.length)
    (folder / "held_out").symlink_to((packed / "held_out").resolve())


def split_documents(rows: PackedRows, chosen: NDArray[np.int64]) -> PackedRows:
    documents = rows.seq_lengths.take(chosen)
    lengths = documents.values.astype(np.int64)
    per_row = documents.lengths
    owner = np.repeat(np.arange(len(chosen)), per_row)
    # A row's documents are contiguous from its beginning.
    ends = offsets_of(lengths)
    starts = ends[:-1] - np.repeat(ends[documents.offsets[:-1]], per_row)  # [N] within the row
    packed_BL = rows.take_ids(chosen).reshape(-1)  # [B * L], flat
    ids_NL = np.full((len(lengths), rows.length), PAD_ID, np.int32)
    to = run_indices(np.arange(len(lengths)) * rows.length, lengths)
    ids_NL.reshape(-1)[to] = packed_BL[run_indices(owner * rows.length + starts, lengths)]
    nowhere = np.zeros(len(lengths), np.int64)
    spans = clip_spans(rows.spans.take(chosen[owner]), starts, lengths, nowhere)
    one_each = Ragged(documents.values, np.arange(len(lengths) + 1))
    return PackedRows((ids_NL,), one_each, spans)
