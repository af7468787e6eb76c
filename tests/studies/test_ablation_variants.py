"""Variants become plans: changes, consequences, and impossible variants."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import write_tiny_run

from expertflow.core.records import read_part, read_record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import ModelFacts, TrainPlan
from expertflow.studies.records import Variant
from expertflow.studies.variants import (
    FirstRows,
    IsThePlanError,
    NotMeasurableError,
    VariantSetup,
    first_rows,
    set_up_variant,
    with_one_process,
)
from expertflow.tokens.arrow import read_rows
from expertflow.tokens.records import PackingRecord

CARD = GpuFacts(
    name="Old", memory_total_bytes=None, compute_capability="7.5", peak_bf16_flops_per_s=None,
    peak_fp16_flops_per_s=1e12, peak_tf32_flops_per_s=None, peak_bandwidth_bytes_per_s=None,
    power_limit_w=None, source="a test",
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_run(folder, n_steps=40, gradient_accumulation_steps=2)
    return folder


def plan_of(folder: Path) -> TrainPlan:
    return read_record(TrainPlan, folder / "plan.json")


def first_of(folder: Path) -> FirstRows:
    return first_rows(plan_of(folder), read_rows(folder / "packed" / "train"), n_steps=5)


def resolved(folder: Path, base: TrainPlan | None = None, **variant: Any) -> VariantSetup:
    settings: dict[str, Any] = {"name": "v", "label": "v", "rows": "packed", "training": {}}
    return set_up_variant(
        base or plan_of(folder),
        Variant(**{**settings, **variant}),
        first=first_of(folder),
        is_unpacked=False,
        n_timed_steps=10,
        packing=read_record(PackingRecord, folder / "packing.json"),
        facts=read_part(ModelFacts, folder / "model.json", "facts"),
    )


def test_a_micro_batch_keeps_the_global_batch(tiny: Path) -> None:
    base = plan_of(tiny)
    setup = resolved(tiny, training={"batch_size": 2})
    assert (setup.plan.batch_size, setup.plan.gradient_accumulation_steps) == (2, 4)
    assert setup.plan.global_batch_sequences == base.global_batch_sequences == 8
    assert setup.plan.n_steps == base.n_steps and setup.n_timed_steps == 10
    with pytest.raises(NotMeasurableError, match=r"of 3 rows do not make up .* of 8"):
        resolved(tiny, training={"batch_size": 3})


def test_what_changes_nothing_is_the_plan(tiny: Path) -> None:
    for training in ({}, {"bf16": False, "fp16": False}, {"batch_size": 4}):
        with pytest.raises(IsThePlanError, match="nothing would change"):
            resolved(tiny, training=training)


def test_tf32_means_nothing_to_a_cpu(tiny: Path) -> None:
    assert not plan_of(tiny).use_tf32
    for more in ({}, {"bf16": False}):
        with pytest.raises(NotMeasurableError, match="trains on a CPU"):
            resolved(tiny, training={"use_tf32": True, **more})


def test_an_old_card_has_no_bf16(tiny: Path) -> None:
    base = replace(plan_of(tiny), gpu=CARD, hardware="Old")
    with pytest.raises(NotMeasurableError, match="Old has no"):
        resolved(tiny, base, training={"bf16": True})
    with pytest.raises(NotMeasurableError, match="Old has no TF32"):
        resolved(tiny, base, training={"use_tf32": True})


def test_what_contradicts_itself_is_not_measurable(tiny: Path) -> None:
    with pytest.raises(NotMeasurableError, match="adapter"):
        resolved(tiny, training={"lora_r": 8})
    with pytest.raises(NotMeasurableError, match="CUDA"):
        resolved(tiny, training={"attention": "varlen"})


def test_loose_rows_are_the_same_documents_in_as_many_steps(tiny: Path) -> None:
    base, first = plan_of(tiny), first_of(tiny)
    setup = resolved(tiny, rows="unpacked")
    plan, wanted = setup.plan, base.global_batch_sequences * first.documents_per_row
    assert plan.global_batch_sequences == round(wanted)
    assert plan.n_steps == pytest.approx(base.n_steps, abs=1)
    # The longest row has 39 tokens, padded to 40: 4 rows of 64 have room for 6 of them.
    padded = -(-first.longest_tokens // 8) * 8
    assert plan.batch_size == 4 * 64 // padded
    assert plan.gradient_accumulation_steps == -(-plan.global_batch_sequences // plan.batch_size)
    assert not plan.group_by_length and setup.n_timed_steps in (10, 11)


def test_a_variants_own_batch_counts_documents(tiny: Path) -> None:
    first = first_of(tiny)
    setup = resolved(
        tiny, rows="on_the_fly", training={"batch_size": 1, "gradient_accumulation_steps": 1}
    )
    assert setup.plan.global_batch_sequences == setup.plan.batch_size == 1
    # 10 steps of 8 rows of several documents, one document a step.
    assert setup.n_timed_steps == pytest.approx(80 * first.documents_per_row, abs=1)
    assert setup.plan.n_warmup_steps < setup.plan.n_steps


def test_variants_that_are_run_alike_have_one_digest(tiny: Path) -> None:
    base = plan_of(tiny)
    plain, sdpa = {"optim": "adamw_8bit"}, {"optim": "adamw_8bit", "attention": "sdpa"}
    idle = {**plain, "use_tf32": base.use_tf32, "bf16": False}
    one, same, other = (resolved(tiny, training=t).settings_sha256 for t in (plain, idle, sdpa))
    assert one == same != other
    assert resolved(tiny, rows="unpacked", training=plain).settings_sha256 != one


def test_several_processes_become_one(tiny: Path) -> None:
    packing = read_record(PackingRecord, tiny / "packing.json")
    facts = read_part(ModelFacts, tiny / "model.json", "facts")
    base = plan_of(tiny)
    two = replace(base, world_size=2, global_batch_sequences=16)
    one = with_one_process(two, packing=packing, facts=facts)
    assert (one.world_size, one.global_batch_sequences, one.batch_size) == (1, 8, 4)
    assert with_one_process(base, packing=packing, facts=facts) is base
