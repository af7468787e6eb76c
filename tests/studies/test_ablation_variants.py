"""Variants become plans: changes, consequences, impossible ones; and rows of single documents."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import made_up_rows

from expertflow.core.records import read_part, read_record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import ModelFacts, TrainPlan
from expertflow.studies import variants
from expertflow.studies.records import Variant
from expertflow.tokens.arrow import PackedRows, read_rows
from expertflow.tokens.records import PackingRecord
from expertflow.train.feed.batches import Collator, targets_per_row

Setup = Callable[..., variants.VariantSetup]
OLD = GpuFacts(name="Old", compute_capability="7.5", source="not in the table")


@pytest.fixture
def first(full: Path, base: TrainPlan) -> variants.FirstRows:
    return variants.first_rows(base, read_rows(full / "packed" / "train"), n_steps=5)


@pytest.fixture
def records(full: Path) -> dict[str, Any]:
    facts = read_part(ModelFacts, full / "model.json", "facts")
    return {"packing": read_record(PackingRecord, full / "packing.json"), "facts": facts}


@pytest.fixture
def set_up(base: TrainPlan, first: variants.FirstRows, records: dict[str, Any]) -> Setup:
    def setup(rows: Any = "packed", gpu: GpuFacts | None = None, **training: Any) -> Any:
        return variants.set_up_variant(
            base if gpu is None else replace(base, gpu=gpu, hardware=gpu.name),
            Variant(name="v", label="v", rows=rows, training=training), first=first,
            is_unpacked=False, n_timed_steps=10, **records,
        )  # fmt: skip

    return setup


def test_a_micro_batch_keeps_the_global_batch(base: TrainPlan, set_up: Setup) -> None:
    setup = set_up(batch_size=2)
    assert (setup.plan.batch_size, setup.plan.gradient_accumulation_steps) == (2, 4)
    assert setup.plan.global_batch_sequences == base.global_batch_sequences == 8
    assert setup.plan.n_steps == base.n_steps and setup.n_timed_steps == 10


def test_a_variant_without_an_effect_is_the_plan(set_up: Setup) -> None:
    for training in ({}, {"bf16": False, "fp16": False}, {"batch_size": 4}):
        with pytest.raises(variants.IsThePlanError, match="nothing would change"):
            set_up(**training)


def test_impossible_variants_are_reported(set_up: Setup) -> None:
    for training, match in (
        ({"batch_size": 3}, r"of 3 rows do not divide .* of 8"),
        ({"use_tf32": True}, "trains on a CPU"),
        ({"gpu": OLD, "bf16": True}, "Old does not support bf16"),
        ({"gpu": OLD, "use_tf32": True}, "Old lacks TF32"),
        ({"lora_r": 8}, "adapter"),
        ({"attention": "varlen"}, "CUDA"),
    ):
        with pytest.raises(variants.NotMeasurableError, match=match) as caught:
            set_up(**training)
        assert caught.value.outcome == "not measurable"


def test_unpacked_rows_have_the_same_texts(
    base: TrainPlan, first: variants.FirstRows, set_up: Setup
) -> None:
    setup = set_up(rows="unpacked")
    plan, wanted = setup.plan, base.global_batch_sequences * first.documents_per_row
    assert plan.global_batch_sequences == round(wanted)
    assert plan.n_steps == pytest.approx(base.n_steps, abs=1)
    # The longest row has 39 tokens, padded to 40: 4 rows of 64 have room for 6 of them.
    padded = -(-first.longest_tokens // 8) * 8
    assert plan.batch_size == 4 * 64 // padded
    assert plan.gradient_accumulation_steps == -(-plan.global_batch_sequences // plan.batch_size)
    assert not plan.group_by_length and setup.n_timed_steps in (10, 11)


def test_a_variants_own_batch_counts_documents(first: variants.FirstRows, set_up: Setup) -> None:
    setup = set_up(rows="on_the_fly", batch_size=1, gradient_accumulation_steps=1)
    assert setup.plan.global_batch_sequences == setup.plan.batch_size == 1
    # 10 steps of 8 rows of several documents, one document per step.
    assert setup.n_timed_steps == pytest.approx(80 * first.documents_per_row, abs=1)
    assert setup.plan.n_warmup_steps < setup.plan.n_steps


def test_variants_that_run_the_same_have_one_digest(base: TrainPlan, set_up: Setup) -> None:
    plain = {"optim": "adamw_8bit"}
    digests = [
        set_up(**more, **plain).settings_sha256
        for more in ({}, {"use_tf32": base.use_tf32, "bf16": False}, {"attention": "sdpa"},
                     {"rows": "unpacked"})
    ]  # fmt: skip
    assert digests[0] == digests[1] and len(set(digests)) == 3


def documents_of(rows: PackedRows, chosen: Any) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels of every document, from the batches of training."""
    found, collator = [], Collator(rows)
    for i in chosen:
        batch, start = collator.batch(np.array([i])), 0
        for end in np.cumsum(rows.seq_lengths[i]).tolist():
            part = slice(start, end)
            found.append((batch.input_ids_BL[0, part].tolist(), batch.labels_BL[0, part].tolist()))
            start = end
    return found


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_added_or_relabeled(seed: int) -> None:
    rows = made_up_rows(40, 48, seed=seed)
    chosen = np.random.default_rng(seed).permutation(len(rows))[:17]
    loose = variants.split_documents(rows, chosen)
    assert len(loose.seq_lengths.values) == len(loose)
    assert documents_of(loose, range(len(loose))) == documents_of(rows, chosen)
    assert targets_per_row(loose).sum() == targets_per_row(rows)[chosen].sum()
