"""The made-up run in two variants: a rented GPU (simulated) and a laptop CPU (demo preset)."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import made_up_evaluation as learned
import made_up_records as pieces
import made_up_series as series
from made_up_series import make_profile
from msgspec.structs import replace

from expertflow.core.attempts import Attempt
from expertflow.hardware.nvml import NO_DRIVER
from expertflow.hardware.summary import no_card, summarize
from expertflow.plan.records import CostPlan, Ledger
from expertflow.report.build import build_report
from expertflow.report.inputs import ReportInputs
from expertflow.report.page import render_page
from expertflow.report.records import ChainLink, Report
from expertflow.train.profiler import NOT_ASKED
from expertflow.train.records import NOT_ON_CPU, KernelProfile

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
            ("generate_answers", "generations", "3d"),
            ("evaluate_expert", "evaluation", "3b"),
            ("export_model", "export", "3c"),
        )
    ),
}


Times = dict[str, list[list[tuple[float, float]]]]
START_S = 1_781_428_000.0  # of the first job
# Start and end of each attempt, in seconds from there, job after job; card jobs last.
ATTEMPTS: Times = {
    "fetch_source": [[(0.0, 42.0)]],
    "prepare_shard": [[(43.0, 80.0)], [(44.0, 95.0)]],
    "plan_training": [[(97.0, 100.0)]],
    "train_expert": [[(101.0, 701.0), (705.0, 3_481.0)]],
    "generate_answers": [[(3_483.0, 3_983.0)]],
    "evaluate_expert": [[(3_983.0, 4_083.0)]],
    "build_report": [[(4_085.0, 4_087.0)]],
}


def make_attempts(times: Times = ATTEMPTS) -> dict[str, tuple[tuple[Attempt, ...], ...]]:
    """Make the jobs of a run on one machine; the last attempt of each job succeeded."""
    return {
        stage: tuple(
            tuple(
                Attempt(
                    start_s=START_S + start_s, end_s=START_S + end_s, machine="c0ffee",
                    code=0 if end_s == job[-1][1] else None,
                    n_cards=int(stage in ("train_expert", "generate_answers")),
                )
                for start_s, end_s in job
            )
            for job in jobs
        )
        for stage, jobs in times.items()
    }  # fmt: skip


def make_gpu_inputs() -> ReportInputs:
    evaluation = learned.make_evaluation(
        before=(9, 1.874),
        after=(122, 0.566),
        baselines={"constant": 2, "template": 48, "nearest": 62},
    )
    staging = pieces.make_staging()
    return ReportInputs(
        spec=pieces.SPEC,
        datasets=pieces.DATASETS,
        documents=pieces.DOCUMENTS,
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
        export=pieces.EXPORT,
        steps=series.make_steps(),
        samples=series.make_gpu_samples(),
        profile=make_profile(),
        attempts=make_attempts(),
        ledger=Ledger(),
        preflight={
            "machine": series.make_machine(),
            "n_cpus": 8,
            "staging": pieces.make_used(staging),
        },
    )


def make_cpu_inputs() -> ReportInputs:
    """The same run with the demo preset: no card, no price, steps timed directly."""
    gpu = make_gpu_inputs()
    samples = series.make_cpu_samples()
    clock = replace(gpu.training.time, forward_s=830.0, backward_s=1_560.0, optimizer_s=104.1)
    return replace(
        gpu,
        spec=replace(gpu.spec, preset="demo"),
        datasets=replace(gpu.datasets, preset="demo", sources=gpu.datasets.sources[1:]),
        documents=replace(gpu.documents, sources=gpu.documents.sources[1:]),
        model=replace(gpu.model, name="builtin:tiny-qwen3", kind="builtin", revision=None),
        plan=replace(
            gpu.plan, hardware="cpu", gpu=None, precision="fp32", use_tf32=False, bf16=False,
            predicted_peak_bytes=None,
            predicted_peak_reason="memory is predicted for CUDA devices only",
            cost=CostPlan(reason="no speed is known for this CPU"),
            memory=None, options=(), claims=(),
        ),
        training=replace(
            gpu.training, device="cpu", gpu_name=None, precision="fp32", attention="sdpa",
            activated=("packing", "sdpa"), n_threads=2, time=clock, sampled_steps=None,
            candidates=gpu.training.candidates[-1:],
            peak_memory_allocated_bytes=None, peak_memory_reserved_bytes=None,
            unavailable={
                "sampled_steps": "the run had too few steps to time one",
                "h2d_s": NOT_ON_CPU, "gpu_idle_s": NOT_ON_CPU,
                "peak_memory_allocated_bytes": NOT_ON_CPU,
                "peak_memory_reserved_bytes": NOT_ON_CPU,
            },
        ),
        preflight={"n_cpus": 2},
        attempts=make_attempts(
            {"train_expert": [[(101.0, 2_813.0)]], "build_report": [[(2_813.0, 2_815.0)]]}
        ),
        profile=KernelProfile(device="cpu", reason=NOT_ASKED),
        staging=replace(gpu.staging, rows=pieces.read_in_place(gpu.staging.rows),
                        weights=pieces.read_in_place(gpu.staging.weights)),
        monitor=summarize(samples, card=no_card(NO_DRIVER), configured_s=1.0),
        evaluation=replace(
            learned.make_evaluation(
                before=(0, 6.203), after=(37, 2.11), baselines={"constant": 1, "nearest": 18}
            ),
            published=learned.published_by_training(series.N_STEPS),
        ),
        export=replace(gpu.export, published_step=series.N_STEPS),
        samples=samples,
    )  # fmt: skip


class Run:
    """A made-up run: its inputs, report and page, each made once."""

    def __init__(self, make: Callable[[], ReportInputs]) -> None:
        self._make = make

    @cached_property
    def inputs(self) -> ReportInputs:
        return self._make()

    @cached_property
    def short(self) -> ReportInputs:
        """Return the inputs without series: charts take most of a page's time."""
        return replace(self.inputs, steps=(), samples=())

    @cached_property
    def report(self) -> Report:
        return build_report(self.inputs, PROVENANCE)

    @cached_property
    def page(self) -> str:
        return render_page(self.report, self.inputs)

    def change(self, **records: Any) -> ReportInputs:
        """Return the inputs with other records; a dictionary changes fields of the existing one."""
        changed = {}
        for name, value in records.items():
            old = getattr(self.inputs, name)
            if isinstance(value, dict):
                value = old | value if isinstance(old, dict) else replace(old, **value)
            changed[name] = value
        return replace(self.inputs, **changed)

    def report_with(self, **records: Any) -> Report:
        return build_report(self.change(**records), {})


GPU, CPU = Run(make_gpu_inputs), Run(make_cpu_inputs)
