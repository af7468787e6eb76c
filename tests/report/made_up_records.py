"""Records of a made-up but consistent run on a rented GPU, and series for any run."""

import math
from typing import Any

from made_up_evaluation import PUBLISHED_STEP
from made_up_series import EVAL_EVERY, GPU, N_STEPS, STEP_S
from msgspec.structs import replace
from support import tokenizer_record

from expertflow.core.files import sha256_json
from expertflow.core.records import to_json
from expertflow.data import records as d
from expertflow.export.records import ExportRecord
from expertflow.hardware.records import GpuFacts
from expertflow.plan import records as p
from expertflow.plan.settings import LoraSpec
from expertflow.report.records import AcceptanceRule, ReportSpec
from expertflow.staging.records import Staged, StageSpec, StagingRecord
from expertflow.tokens import records as k
from expertflow.train import records as t

STEPS_PER_EPOCH, EVAL_S = 900, 12.6
FASTER = "it is on nfs4, read at 0.24 GB/s, and /scratch (usual place) at 2.90 GB/s"
SAMPLE = k.DecodedSample(
    document_id="text-to-sql/14", n_tokens=31, n_supervised_tokens=9,
    pieces=(
        k.DecodedPiece(text="<|im_start|>user\nHow many shops?<|im_end|>\n<|im_start|>assistant\n",
                       learned=False),
        k.DecodedPiece(text="SELECT count(*) FROM shops<|im_end|>", learned=True),
        k.DecodedPiece(text="\n", learned=False),
    ),
)  # fmt: skip


SPEC = ReportSpec(
    expert="expert-sql",
    preset="full",
    description="Turns a question about a database into the SQL that answers it.",
    acceptance=(
        AcceptanceRule(path="evaluation.delta.value_fraction", op=">", value=0.1),
        AcceptanceRule(path="throughput.mfu_fraction", op=">=", value=0.25),
        AcceptanceRule(path="cost.usd", op="<=", value=3.0),
    ),
)
DATASETS = d.DatasetManifest(
    expert="expert-sql",
    preset="full",
    sources=(
        d.DatasetSource(
            name="text-to-sql", kind="hub", revision="8f2c1d77a0", license="CC-BY-4.0", n_files=4,
            n_bytes=31_400_000, n_records=18_000, n_shards=1, sha256="ab" * 32,
            notes=("the data set card says cc-by-4.0",),
        ),
        d.DatasetSource(
            name="generated-shops", kind="generated", revision=None, license="CC0-1.0", n_files=1,
            n_bytes=5_200_000, n_records=None, n_shards=1, sha256="cd" * 32, notes=(),
        ),
    ),
)  # fmt: skip
DOCUMENTS = d.DocumentsRecord(
    expert="expert-sql", sha256="1a" * 32,
    n_records=22_000, n_rejected=412, n_filtered=88, n_dropped=1_500, n_train=19_800,
    n_train_copies=19_800, n_held_out=200,
    n_dropped_by_reason={"duplicate": 1_283, "near_duplicate": 217},
    n_rejected_by_reason={"empty_field": 380, "not_utf8": 32},
    n_filtered_by_reason={"secret": 3, "sql_unparsable": 85},
    n_noted_by_reason={"empty_system_turn": 7}, n_kept_by_category={},
    duplicate_examples=(
        d.DuplicateExample(dropped="text-to-sql/91", kept="text-to-sql/14",
                           reason="near_duplicate", similarity=0.91),
    ),
    sources=(
        d.SourceCounts(
            source="text-to-sql", n_records=18_000, n_rejected=412, n_filtered=88, n_dropped=1_500,
            n_train=15_840, n_held_out=160,
        ),
        d.SourceCounts(
            source="generated-shops", n_records=4_000, n_rejected=0, n_filtered=0, n_dropped=0,
            n_train=3_960, n_held_out=40,
        ),
    ),
)  # fmt: skip
EXPORT = ExportRecord(
    expert="expert-sql", path="results/expert-sql/merged", published_step=PUBLISHED_STEP,
    dtype="float32", merged_into="base",
    loss_before_merge=0.5312, loss_after_merge=0.5312, n_rows_compared=4,
    max_logit_difference=0.0078, weights_sha256="9e" * 32, n_bytes=1_192_400_000,
)  # fmt: skip


def make_model() -> t.ModelRecord:
    facts = p.ModelFacts(
        n_layers=28, hidden_size=1024, n_heads=16, n_kv_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151_936, tie_word_embeddings=True, model_type="qwen3",
    )  # fmt: skip
    return t.ModelRecord(
        name="Qwen/Qwen3-0.6B", kind="hub", revision="c1899de289", path="results/models/qwen3",
        license="apache-2.0", facts=facts, n_parameters=596_049_920, n_weight_bytes=1_192_099_840,
        weights_sha256="4d" * 32,
        tokenizer=tokenizer_record(path="results/expert-sql/tokenizer", sha256="3c" * 32),
    )  # fmt: skip


def make_packing() -> k.PackingRecord:
    edges = tuple(range(0, 1_601, 64))
    shape = [math.exp(-(math.log((e + 32) / 330) ** 2) / 0.55) for e in edges[:-1]]
    counts = tuple(round(19_800 * s / sum(shape)) for s in shape)
    train = k.PackedSplit(
        path="packed/train.arrow", sha256="5e" * 32, n_documents=19_800,
        n_tokens_in=43_200_000, n_tokens=43_200_000, n_tokens_dropped=0,
        n_target_tokens=14_300_000, n_padding_tokens=1_036_800, n_sequences=28_800,
        sum_len_sq=22_032_000_000,
    )  # fmt: skip
    return k.PackingRecord(
        expert="expert-sql", packing="bfd", overflow="split", sequence_length_tokens=1_536,
        length_reason="the shortest of the choices that holds 99 % of documents whole", seed=1,
        engines={"fastokens 0.3.5": 7, "tokenizers 0.23.3": 1},
        engine_fallbacks=("fastokens gives other ids for 'a b'",), tokenizer_sha256="3c" * 32,
        n_special_text_documents=2, n_dropped_held_out=0, n_dropped_by_reason={},
        samples=(SAMPLE,), train=train,
        held_out=replace(train, path="packed/held_out.arrow", sha256="5f" * 32, n_documents=200),
        histogram=k.LengthHistogram(
            edges=edges, counts=counts, p50=341, p90=796, p99=1_388, max=1_591
        ),
        choices=(
            k.LengthChoice(sequence_length_tokens=1_536, n_over_long_documents=99,
                           n_over_long_tokens=4_100, n_sequences=28_800, fill_fraction=0.977),
        ),
        suggestion=k.LengthSuggestion(
            sequence_length_tokens=1_536,
            reason="rows of 1536 tokens are too short for 0.50 % of the documents and filled to"
            " 97.66 %",
        ),
    )  # fmt: skip


def make_plan() -> p.TrainPlan:
    gpu = GpuFacts(
        name=GPU, memory_total_bytes=80_000_000_000, compute_capability="9.0",
        peak_bf16_flops_per_s=989.5e12, peak_fp16_flops_per_s=989.5e12,
        peak_tf32_flops_per_s=494.5e12, peak_bandwidth_bytes_per_s=3.35e12, power_limit_w=700.0,
        source="NVIDIA H100 datasheet",
        sources={"peak_bf16_flops_per_s": "NVIDIA datasheet, dense"},
    )  # fmt: skip
    return p.TrainPlan(
        expert="expert-sql", origins={}, group_by_length=False, loader="thread",
        dataloader_prefetch_factor=4, lora=LoraSpec(targets=("q_proj", "v_proj")),
        hardware="h100-sxm", gpu=gpu, batch_size=16, gradient_accumulation_steps=2,
        global_batch_sequences=32, sequence_length_tokens=1_536, n_sequences=28_800,
        n_steps=N_STEPS, n_steps_per_epoch=STEPS_PER_EPOCH, n_epochs=2.0, n_warmup_steps=180,
        n_decay_steps=180, weight_decay=0.01, torch_compile=True, may_halve_micro_batch=True,
        precision="bf16", attention="packed", gradient_checkpointing=False, save_steps=300,
        eval_steps=EVAL_EVERY, collection_interval_seconds=1.0,
        n_params_total=600_637_440, n_params_trainable=4_587_520, flops_per_token_model=2.62e9,
        flops_per_token_hardware=2.62e9,
        flops_convention="useful tokens; causal block-diagonal attention; embedding lookup 0",
        predicted_tokens=86_400_000, predicted_peak_bytes=63_000_000_000,
        predicted_peak_reason="weights + optimizer + activations without checkpointing + 8 %",
        cost=p.CostPlan(
            price_usd_per_hour=2.49, price_as_of="2026-05", predicted_hours=0.73,
            predicted_hours_low=0.71, predicted_hours_high=0.77, predicted_usd=1.8177,
            predicted_usd_low=1.7679, predicted_usd_high=1.9173,
            reason="calibrated: 30 timed steps, one save, one evaluation",
            calibrated=True, mfu_fraction=0.094, step_hours=0.675, save_hours=0.015,
            eval_hours=0.021, startup_hours=0.019, bound="bandwidth",
            step=p.StepSeconds(
                products_s=0.5, attention_s=0.05, layers_s=0.6, loss_s=0.1, weights_s=0.0,
                optimizer_s=0.1, launches_s=0.0, total_s=1.35,
            ),
        ),
        memory=p.MemoryParts(
            model_bytes=1_200_000_000, optimizer_bytes=55_000_000, step_bytes=56_006_000_000,
            reserve_bytes=5_739_000_000,
        ),
        next_micro_batch_peak_bytes=123_600_000_000, options=OPTIONS, claims=CLAIMS,
        reasons=(
            p.Reason(setting="batch_size", value="16", because="predicted peak 63 GB fits 80 GB",
                   source_value="16"),
            p.Reason(setting="warmup_steps", value="180", because="10 % of 1,800 steps"),
        ),
    )  # fmt: skip


CLAIMS = (
    p.ClaimCheck(text="takes 47 hours", holds=False,
               finding="3,558 steps at 1.25 a second are 47 minutes, not 47 hours"),
    p.ClaimCheck(text="costs about two dollars", holds=True, finding="0.78 h at $2.49 are $1.94"),
)  # fmt: skip
OPTIONS = (
    p.HardwareOption(
        name="H100 SXM", n_gpus=1, fits=True, micro_batch_size=16,
        checkpoint_activations=False, hours=0.73, hours_low=0.71, hours_high=0.77,
        usd_per_hour=2.49, price_as_of="2026-05", usd=1.8177, usd_low=1.7679,
        usd_high=1.9173, remark="as planned",
    ),
    p.HardwareOption(
        name="RTX 2060", n_gpus=1, fits=False, remark="needs 7.1 GB for one row, has 6 GB"
    ),
)  # fmt: skip


def make_staging() -> StagingRecord:
    rows = Staged(
        kind="rows", key="6f" * 10, source="results/expert-sql/packed", action="copied",
        reason=FASTER, target=f"/scratch/expertflow/{'6f' * 10}/files",
        n_files=6, n_bytes=391_000_000, n_bytes_copied=391_000_000, copy_bytes_per_s=1.1e9,
        source_file_system="nfs4", source_read_bytes_per_s=2.4e8,
        source_read_method="64 MiB in order, past the page cache",
        target_read_bytes_per_s=2.9e9, target_read_method="256 MiB in order, past the page cache",
    )  # fmt: skip
    weights = replace(
        rows, kind="weights", key="7e" * 10, source="/home/user/.cache/hub/abc", n_files=5,
        target=f"/scratch/expertflow/{'7e' * 10}/files", n_bytes=1_192_000_000,
        n_bytes_copied=1_192_000_000,
    )  # fmt: skip
    return StagingRecord(expert="expert-sql", spec=StageSpec(), rows=rows, weights=weights)


def make_used(staging: StagingRecord) -> dict[str, Any]:
    same = {"action": "reused", "n_bytes_copied": 0, "copy_bytes_per_s": None}
    return {note.kind: to_json(replace(note, **same)) for note in (staging.rows, staging.weights)}


def read_in_place(note: Staged) -> Staged:
    not_needed = "not measured: it has no effect here"
    return replace(
        note, action="read_in_place", reason="it is on a local disk already (ext4)", target=None,
        n_bytes_copied=None, copy_bytes_per_s=None, source_file_system="ext4",
        source_read_bytes_per_s=None, source_read_method=not_needed,
        target_read_bytes_per_s=None, target_read_method=not_needed,
    )  # fmt: skip


def make_training() -> t.TrainingRecord:
    time = t.TimeSpent(
        wall_s=2_712.0, startup_s=61.0, data_wait_s=21.4, h2d_s=None, train_s=2_494.1,
        forward_s=None, backward_s=None, optimizer_s=None, checkpoint_s=56.9, eval_s=75.6,
        other_s=3.0, gpu_idle_s=None,
    )  # fmt: skip
    points = tuple(
        t.EvalPoint(step=s, loss=0.53 + 1.2 * math.exp(-s / 420), n_target_tokens=161_000,
                  eval_s=EVAL_S)
        for s in range(0, N_STEPS + 1, EVAL_EVERY)
    )  # fmt: skip
    saves = tuple(
        t.SavePoint(step=s, elapsed_s=61.0 + STEP_S * s, save_s=9.5) for s in range(300, 1801, 300)
    )
    epochs = (
        t.EpochSummary(epoch=1, steps=900, loss_mean=0.86, eval_loss=points[3].loss,
                       tokens=43_200_000, seconds=1_258.0, tokens_per_s=34_340.2),
        t.EpochSummary(epoch=2, steps=900, loss_mean=0.54, eval_loss=points[6].loss,
                       tokens=43_200_000, seconds=1_257.0, tokens_per_s=34_367.5),
    )  # fmt: skip
    return t.TrainingRecord(
        expert="expert-sql", fingerprint="7a" * 32,
        started_at="2026-06-14T09:12:44Z", method="lora",
        device="cuda", gpu_name=GPU, precision="bf16", attention="flash",
        activated=("packing", "bf16", "flash attention", "fused loss"), world_size=1, n_threads=8,
        seed=42, n_params_total=600_637_440, n_params_trainable=4_587_520, n_steps=N_STEPS,
        n_epochs=2.0, stopped_early_at_step=None, published_step=N_STEPS,
        candidates=tuple(
            t.KeptWeights(step=point.step, held_out_loss=point.loss, weights_sha256="7c" * 32,
                        path=f"candidates/step-{point.step}") for point in points[2::2]
        ),
        micro_batch_size=16,
        n_accumulation_steps=2, memory_retries=(), on_the_fly=False, checkpoint_write_s=31.0,
        sampled_steps=t.SampledSteps(n_steps=90, h2d_s=0.003, forward_s=0.45, backward_s=0.86,
                                     optimizer_s=0.07),
        n_tokens=86_400_000, n_target_tokens=28_600_000, n_padding_tokens=2_073_600,
        loss_first=2.10, loss_last=0.53, eval_points=points, save_points=saves,
        epoch_summaries=epochs, time=time,
        n_sessions=2, resumed_at_steps=(600,), n_saves=6,
        peak_memory_allocated_bytes=58_900_000_000, peak_memory_reserved_bytes=61_500_000_000,
        peak_host_rss_bytes=9_800_000_000, measured_peak_flops_per_s=None,
        packing_sha256=sha256_json(["5e" * 32, "5f" * 32]), weights_sha256="8b" * 32,
        steps_path="results/expert-sql/steps.jsonl",
        versions={"torch": "2.9.1+cu128", "transformers": "5.23.0", "peft": "0.18.0"},
        unavailable=dict.fromkeys(
            ("time.h2d_s", "time.forward_s", "time.backward_s", "time.optimizer_s",
             "time.gpu_idle_s"),
            "the device runs behind the host",
        ),
    )  # fmt: skip
