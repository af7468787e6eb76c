"""Which micro-batch is chosen, and what the reason says."""

from pathlib import Path

import pytest
import yaml
from plan_fixtures import QWEN_06B, card, draft_of, plan, seq
from support import ROOT, plan_spec

from expertflow.core.errors import HardwareError
from expertflow.plan.draft import PlanDraft
from expertflow.plan.micro_batch import BUSY_TOKENS, choose_micro_batch
from expertflow.plan.records import USABLE_FRACTION, MemoryLine, MemoryTrace, TrainPlan
from expertflow.plan.settings import LoraSpec

GIB = 1 << 30
RTX_2060 = card("RTX 2060")


def traced(kept: int, checkpointed: int, n_tokens: int = 1024) -> MemoryTrace:
    """Give a trace in which so many bytes come with each row of ``n_tokens``."""
    lines = tuple(
        MemoryLine(
            checkpoint_activations=on, model_bytes=GIB, gradient_bytes=0,
            n_tokens=(n_tokens, 16 * n_tokens), step_bytes=(row, 16 * row),
        )
        for on, row in ((False, kept), (True, checkpointed))
    )  # fmt: skip
    return MemoryTrace(precision="bf16", lines=lines)


def chosen(
    trace: MemoryTrace, length: int = 1024, **changes: object
) -> tuple[int, bool, PlanDraft]:
    settings = {"batch_size": None, "optim": "adamw_8bit", **changes}
    draft = draft_of(RTX_2060, packing=seq(length), n_params=0, trace=trace, **settings)
    micro, checkpoint = choose_micro_batch(draft)
    return micro, checkpoint, draft


def because(draft: PlanDraft, setting: str = "batch_size") -> str:
    return draft.reasons[setting].because


def repository_on_a_2060(**changes: object) -> TrainPlan:
    """Plan what config/experts/repository.yaml says for the card that it had before."""
    text = (ROOT / "config" / "experts" / "repository.yaml").read_text()
    training = yaml.safe_load(text)["training"]
    lora = LoraSpec(
        **training["lora"], use_dora=False, use_rslora=False,
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
    )  # fmt: skip
    assert training["batch_size"] == "auto"
    packing = seq(training["max_seq_length"])
    accumulation = training["gradient_accumulation_steps"]
    return plan(RTX_2060, packing, lora=lora, gradient_accumulation_steps=accumulation, **changes)


def test_a_6_gb_card_gets_four_rows_in_system_bs_setting() -> None:
    made = repository_on_a_2060()
    assert (made.batch_size, made.gradient_checkpointing) == (4, True)
    assert made.global_batch_sequences == 8


def test_a_6_gb_card_gets_four_rows_by_a_traced_step(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    from expertflow.train.trace.memory import trace_memory

    shape = QWEN_06B
    Qwen3Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    lora = repository_on_a_2060().lora
    spec = plan_spec(method="lora", lora=lora, batch_size=None)
    trace = trace_memory(
        tmp_path, spec, gpu=RTX_2060, attention="packed", sequence_length_tokens=1024,
        supervised_fraction=0.3,
    )  # fmt: skip
    settings = {"method": "lora", "lora": lora, "batch_size": None}
    draft = draft_of(RTX_2060, packing=seq(1024), trace=trace, **settings)
    assert choose_micro_batch(draft) == (4, True)


def test_without_checkpointing_the_most_rows_are_taken() -> None:
    micro, checkpoint, draft = chosen(traced(kept=GIB // 3, checkpointed=GIB // 100))
    assert (micro, checkpoint) == (8, False)
    assert "most rows that fit without" in because(draft)


def test_a_card_that_would_idle_checkpoints_just_enough() -> None:
    micro, checkpoint, draft = chosen(traced(kept=GIB, checkpointed=GIB // 100))
    assert (micro * 1024, checkpoint) == (BUSY_TOKENS, True)
    assert "judgement" in because(draft)


def test_checkpointing_that_brings_no_more_rows_stays_off() -> None:
    assert chosen(traced(kept=GIB, checkpointed=GIB))[:2] == (2, False)


def test_the_reason_names_the_bytes_of_this_and_the_next_micro_batch() -> None:
    """1 GiB of model, 8 x 1/3 GiB of step, 8 % and 1 GiB of reserve; twice the step."""
    draft = chosen(traced(kept=GIB // 3, checkpointed=GIB // 100))[2]
    assert "predicted 5.0 of 5.6 GiB, and 7.8 with 16 rows" in because(draft)


@pytest.mark.parametrize("on", [False, True])
def test_the_manifests_checkpointing_is_kept(on: bool) -> None:
    trace = traced(kept=GIB, checkpointed=GIB // 100)
    assert chosen(trace, gradient_checkpointing=on)[1] is on


def test_a_given_micro_batch_is_kept_and_checkpointed_if_need_be() -> None:
    trace = traced(kept=GIB, checkpointed=GIB // 100)
    assert chosen(trace, batch_size=2)[:2] == (2, False)
    assert chosen(trace, batch_size=12)[:2] == (12, True)


def test_a_given_micro_batch_beyond_the_card_is_refused_with_the_most_rows_that_fit() -> None:
    """Model and reserve take 2 GiB of 5.6, each row 1.08."""
    ways = "to auto, or to 2 or less with gradient_accumulation_steps 6 times as many"
    with pytest.raises(HardwareError, match=f"batch_size 12 needs .* has 5.6; set it {ways}"):
        chosen(traced(GIB, GIB), batch_size=12)
    # 3 rows of 1 GiB and 1 of model: 5.32 GiB of 5.59, above 92 % and below all of it.
    assert "to the brim" in because(chosen(traced(GIB, GIB), batch_size=3)[2])
    with pytest.raises(HardwareError, match="one row of 1024 tokens"):
        chosen(traced(9 * GIB, 9 * GIB), batch_size=2)


def test_what_is_chosen_fits() -> None:
    for name in ("RTX 2060", "RTX 4090", "H100 SXM"):
        for length in (256, 1024, 4096):
            gpu = card(name)
            made = plan(gpu, seq(length))
            assert made.predicted_peak_bytes is not None and gpu.memory_total_bytes is not None
            assert made.predicted_peak_bytes <= USABLE_FRACTION * gpu.memory_total_bytes


def test_a_row_that_does_not_fit_names_the_way_out() -> None:
    with pytest.raises(HardwareError, match="set gradient_checkpointing to auto, or use a larger"):
        chosen(traced(kept=9 * GIB, checkpointed=GIB), gradient_checkpointing=False)


def test_the_cpu_has_its_default() -> None:
    assert choose_micro_batch(draft_of(None, batch_size=None)) == (8, False)


@pytest.mark.parametrize(
    ("kept", "advice"),
    [
        (GIB // 2, "; batch_size 4 with gradient_accumulation_steps 4 times as many fits without"),
        (3 * GIB, ""),  # one row fits without, which leaves the card idle
    ],
)
def test_a_smaller_micro_batch_that_spares_the_recomputation_is_named(
    kept: int, advice: str
) -> None:
    micro, checkpoint, draft = chosen(traced(kept, 16 << 20), batch_size=16)
    assert (micro, checkpoint) == (16, True)
    reason = because(draft, "gradient_checkpointing")
    assert ("fits without" in reason) is bool(advice) and reason.endswith(advice)
