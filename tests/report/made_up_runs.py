"""The made-up run in two variants: a rented GPU (simulated) and a laptop CPU (demo preset)."""

import made_up_evaluation as learned
import made_up_records as pieces
import made_up_series as series
from made_up_series import make_profile, not_profiled
from msgspec.structs import replace

from expertflow.plan.records import CostPlan, TrainPlan
from expertflow.report.inputs import ReportInputs
from expertflow.report.records import ChainLink
from expertflow.tokens.records import PackingRecord
from expertflow.train import records as t

PROVENANCE = {
    "git": "3f9c2ab0d1 (clean)",
    "lockfile_sha256": "9d" * 32,
    "input_sha256": {"documents.json": "1a" * 32, "packing.json": "2b" * 32},
    "command": "snakemake --cores 8 results/expert-sql/report.json",
    "host_hash": "c0ffee",
    "chain": tuple(
        ChainLink(stage=stage, record=f"{record}.json", sha256=digest * 32, code=digest * 8)
        for stage, record, digest in (
            ("find_datasets", "datasets", "0a"),
            ("deduplicate_documents", "documents", "1a"),
            ("prepare_model", "model", "1b"),
            ("pack_sequences", "packing", "2b"),
            ("plan_training", "plan", "2c"),
            ("stage_to_nvme", "staging", "2d"),
            ("train_expert", "training", "3a"),
            ("evaluate_expert", "evaluation", "3b"),
            ("export_model", "export", "3c"),
        )
    ),
}


def make_gpu_inputs() -> ReportInputs:
    evaluation = learned.make_evaluation(
        before=(9, 1.874),
        after=(122, 0.566),
        baselines={"constant": 2, "template": 48, "nearest": 62},
    )
    staging = pieces.make_staging()
    return ReportInputs(
        spec=pieces.make_spec("full"),
        datasets=pieces.make_datasets("full"),
        documents=pieces.make_documents("full"),
        model=pieces.make_model(),
        packing=pieces.make_packing(),
        plan=pieces.make_plan(),
        staging=staging,
        training=pieces.make_training(),
        monitor=series.make_monitor(),
        evaluation=replace(
            evaluation,
            earlier=learned.earlier(0.02, "no measurable change"),
            judge=learned.judge(n_wins=31, n_losses=7, n_ties=12),
            lm_eval=learned.LM_EVAL,
            n_questions_shared_with_training=3,
        ),
        export=pieces.make_export(),
        steps=series.make_steps(
            n_steps=pieces.N_STEPS, step_s=pieces.STEP_S, tokens=pieces.TOKENS_PER_STEP, seed=1
        ),
        samples=series.make_gpu_samples(),
        profile=make_profile(),
        preflight={
            "machine": series.make_machine(),
            "n_cpus": 8,
            "staging": pieces.make_used(staging),
        },
    )


def make_cpu_inputs() -> ReportInputs:
    """The same expert from the demo preset: 60 steps on two cores, no price, no GPU."""
    gpu = make_gpu_inputs()
    return replace(
        gpu,
        spec=pieces.make_spec("demo"),
        datasets=pieces.make_datasets("demo"),
        documents=pieces.make_documents("demo"),
        model=replace(gpu.model, name="builtin:tiny-qwen3", kind="builtin", revision=None,
                      license=None),
        plan=_cpu_plan(gpu.plan),
        training=_cpu_training(gpu.training),
        packing=_cpu_packing(gpu.packing),
        preflight={"n_cpus": 2},
        profile=not_profiled(),
        staging=replace(gpu.staging, rows=pieces.read_in_place(gpu.staging.rows),
                        weights=pieces.read_in_place(gpu.staging.weights)),
        monitor=series.make_cpu_monitor(),
        evaluation=replace(
            learned.make_evaluation(
                before=(0, 6.203), after=(37, 2.11), baselines={"constant": 1, "nearest": 18}
            ),
            published=learned.published_by_training(60),
        ),
        export=replace(gpu.export, published_step=60),
        steps=series.make_steps(n_steps=60, step_s=1.35, tokens=7_900, seed=2),
        samples=series.make_cpu_samples(),
    )  # fmt: skip


def _cpu_packing(gpu: PackingRecord) -> PackingRecord:
    train = replace(
        gpu.train,
        n_sequences=480, n_tokens_in=237_000, n_tokens=237_000, n_padding_tokens=8_760,
        n_supervised_tokens=78_000, n_target_tokens=78_000,
    )  # fmt: skip
    return replace(gpu, sequence_length_tokens=512, train=train)


def _cpu_training(training: t.TrainingRecord) -> t.TrainingRecord:
    time = t.TimeSpent(
        wall_s=96.0, startup_s=6.1, data_wait_s=0.3, h2d_s=None, train_s=81.2, forward_s=27.4,
        backward_s=50.1, optimizer_s=3.7, checkpoint_s=0.9, eval_s=5.2, other_s=2.3,
        gpu_idle_s=None,
    )  # fmt: skip
    return replace(
        training,
        base_model="builtin:tiny-qwen3", device="cpu", gpu_name=None, precision="fp32",
        attention="sdpa", activated=("packing", "sdpa"), n_threads=2, method="full",
        n_params_total=1_312_640, n_params_trainable=1_312_640, n_steps=60, n_epochs=2.0,
        n_tokens=60 * 7_900, n_target_tokens=60 * 2_600, n_padding_tokens=60 * 292,
        published_step=60, micro_batch_size=8, sampled_steps=None,
        candidates=(replace(training.candidates[0], step=60, held_out_loss=2.11, path="."),),
        checkpoint_write_s=0.4, loss_first=6.21, loss_last=1.92, time=time, n_sessions=1,
        resumed_at_steps=(), n_saves=1,
        eval_points=(
            t.EvalPoint(step=30, loss=3.05, n_target_tokens=9_100, eval_s=2.6),
            t.EvalPoint(step=60, loss=2.11, n_target_tokens=9_100, eval_s=2.6),
        ),
        save_points=(t.SavePoint(step=60, elapsed_s=94.0, save_s=0.4),),
        epoch_summaries=(
            t.EpochSummary(epoch=1, steps=30, loss_mean=4.4, eval_loss=3.05, tokens=237_000,
                         seconds=44.1, tokens_per_s=5_374.1),
            t.EpochSummary(epoch=2, steps=30, loss_mean=2.5, eval_loss=2.11, tokens=237_000,
                         seconds=43.5, tokens_per_s=5_448.3),
        ),
        peak_memory_allocated_bytes=None, peak_memory_reserved_bytes=None,
        peak_host_rss_bytes=1_210_000_000,
        measured_peak_flops_per_s=None,
        unavailable={
            "sampled_steps": "the run had too few steps for one to be timed",
            "h2d_s": t.NOT_ON_CPU, "gpu_idle_s": t.NOT_ON_CPU,
            "peak_memory_allocated_bytes": t.NOT_ON_CPU, "peak_memory_reserved_bytes": t.NOT_ON_CPU,
        },
    )  # fmt: skip


def _cpu_plan(gpu: TrainPlan) -> TrainPlan:
    return replace(
        gpu,
        method="full", lora=None, hardware="cpu", gpu=None, n_steps=60, n_steps_per_epoch=30,
        n_warmup_steps=6, n_epochs=2.0, precision="fp32", use_tf32=False, bf16=False, batch_size=8,
        gradient_accumulation_steps=2, global_batch_sequences=16, sequence_length_tokens=512,
        n_params_total=1_312_640, n_params_trainable=1_312_640, flops_per_token_model=8.4e6,
        flops_per_token_hardware=8.4e6, predicted_tokens=474_000, predicted_peak_bytes=None,
        predicted_peak_reason="memory is predicted for CUDA devices only",
        cost=CostPlan(reason="no speed is known for this CPU"),
        memory=None, options=(), claims=(),
    )  # fmt: skip
