"""Runs with one planted problem, or none, and exactly the findings they must have."""

from typing import Any, NamedTuple

import made_up_evaluation as made
from made_up_records import make_used
from made_up_runs import CPU, GPU, Run
from made_up_series import N_STEPS
from msgspec.structs import replace

from expertflow.evaluate import records as e
from expertflow.report.inputs import ReportInputs
from expertflow.staging.records import NO_SCRATCH
from expertflow.train import records as t

Changes = dict[str, Any]
BY_TRAINING = made.published_by_training(N_STEPS)


def evaluated(
    before: int = 9, after: int = 122, nearest: int | None = 62, **changed: Any
) -> Changes:
    """Evaluate by correct answers of 200, also of the nearest question's; null: no baselines."""
    record = made.make_evaluation(
        before=(before, 1.874),
        after=(after, 0.566),
        baselines={} if nearest is None else {"constant": 2, "nearest": nearest},
    )
    record = replace(record, **{"published": BY_TRAINING, **changed})
    return {"evaluation": record, "export": {"published_step": record.published.step}}


def wrong(n_cut_off: int = 3, **kinds: int) -> Changes:
    """Evaluate answers with these numbers of wrong kinds; the others have a wrong result."""
    found = {"correct": 122, "wrong_result": 78 - sum(kinds.values()), **kinds}
    score = replace(made.score(122, made.N), n_by_kind=found)
    after = replace(made.side(122, 0.566), score=score, n_cut_off=n_cut_off)
    return {"evaluation": replace(evaluated()["evaluation"], after=after)}


def by_loss(before: float, after: float, *changes: e.PairedChange) -> Changes:
    bare = replace(made.make_bare(before=before, after=after), published=BY_TRAINING)
    record = replace(bare, changes=changes or bare.changes)
    return {"evaluation": record, "training": {"candidates": GPU.inputs.training.candidates[-1:]}}


def _spend(inputs: ReportInputs, **shares: float) -> t.TimeSpent:
    """Spend shares of the wall time on other parts, and less on steps."""
    time = inputs.training.time
    spent = {part: share * time.wall_s for part, share in shares.items()}
    train_s = time.train_s - sum(s - getattr(time, part) for part, s in spent.items())
    inside = {
        part: seconds * train_s / time.train_s
        for part in ("forward_s", "backward_s", "optimizer_s")
        if (seconds := getattr(time, part)) is not None
    }
    return replace(time, train_s=train_s, **spent, **inside)


def _make_clean(run: Run) -> ReportInputs:
    """Remove a made-up run's findings, and its series: no chart is drawn."""
    whole = run.inputs
    return run.change(
        training={"n_sessions": 1, "resumed_at_steps": (),
                  "time": _spend(whole, checkpoint_s=0.015)},
        packing={"engine_fallbacks": ()},
        plan={"claims": whole.plan.claims[1:]},
        **evaluated(),
        steps=(),
        samples=(),
    )  # fmt: skip


CARD, DEMO = Run(lambda: _make_clean(GPU)), Run(lambda: _make_clean(CPU))
TRAINING, MONITOR = CARD.inputs.training, CARD.inputs.monitor


def spent(run: Run = CARD, **shares: float) -> Changes:
    return {"training": {"time": _spend(run.inputs, **shares)}}


def read(**figures: float | None) -> Changes:
    """Replace readings of the card; a figure is both mean and median."""
    stats: Any = MONITOR.power_w
    of = {name: x and replace(stats, mean=x, p50=x, max=x) for name, x in figures.items()}
    return {"monitor": of}


def together(*changes: Changes) -> Changes:
    found: Changes = {}
    for record, fields in ((name, value) for change in changes for name, value in change.items()):
        old = found.get(record)
        found[record] = {**old, **fields} if isinstance(old, dict) else fields
    return found


def losses(*values: float) -> Changes:
    points = (
        t.EvalPoint(step=300 * i, loss=loss, n_target_tokens=161_000, eval_s=12.6)
        for i, loss in enumerate(values)
    )
    return {"training": {"eval_points": tuple(points)}}


def sized(n_rows: int, n_epochs: int, n_documents: int, fill: float = 0.98) -> Changes:
    """Train a demo on this many rows, 32 per step."""
    n_steps, n_tokens = -(-n_rows // 32) * n_epochs, int(n_rows * 1_536 * fill)
    time, n_padding = DEMO.inputs.training.time, n_rows * 1_536 - n_tokens
    parts = {name: getattr(time, name) for name in time.__struct_fields__}
    scaled = {name: s and s * n_steps / N_STEPS for name, s in parts.items()}
    epoch = t.EpochSummary(
        epoch=1, steps=n_steps // n_epochs, loss_mean=0.9, eval_loss=None, tokens=n_tokens,
        seconds=9.0, tokens_per_s=n_tokens / 9,
    )  # fmt: skip
    rows = replace(
        DEMO.inputs.packing.train, n_sequences=n_rows, n_documents=n_documents, n_tokens=n_tokens,
        n_padding_tokens=n_padding,
    )  # fmt: skip
    return {
        "packing": {"train": rows},
        "documents": {"n_train": n_documents},
        "plan": {"n_steps": n_steps, "n_warmup_steps": n_steps // 10, "n_sequences": n_rows},
        "training": {
            "n_steps": n_steps, "n_epochs": float(n_epochs), "published_step": n_steps,
            "n_tokens": n_tokens * n_epochs, "n_target_tokens": n_tokens * n_epochs // 3,
            "n_padding_tokens": n_padding * n_epochs, "time": t.TimeSpent(**scaled),
            "epoch_summaries": tuple(replace(epoch, epoch=i + 1) for i in range(n_epochs)),
        },
        **evaluated(published=made.published_by_training(n_steps)),
    }  # fmt: skip


def stopped_early() -> Changes:
    """Stop a run of two epochs after the first, by patience."""
    time = CARD.inputs.training.time
    names = ("train_s", "eval_s", "checkpoint_s")
    parts = {name: getattr(time, name) / 2 for name in names}
    half = replace(time, wall_s=time.wall_s - sum(parts.values()), **parts)
    return {
        "plan": {"patience": 2},
        "training": {
            "n_steps": 900, "n_epochs": 1.0, "stopped_early_at_step": 900, "published_step": 900,
            "n_tokens": 43_200_000, "epoch_summaries": TRAINING.epoch_summaries[:1],
            "eval_points": TRAINING.eval_points[:4], "candidates": TRAINING.candidates[:1],
            "time": half,
        },
        **evaluated(published=made.published_by_training(900)),
    }  # fmt: skip


def staged(kind: str, **changed: Any) -> Changes:
    used = make_used(CARD.inputs.staging)
    used[kind] = used[kind] | changed
    return {"preflight": {"staging": used}}


def lost(n_lost: int, **by_reason: int) -> Changes:
    """Lose documents of the second source, of 4,000."""
    first, second = CARD.inputs.documents.sources
    source = replace(second, n_dropped=n_lost, n_train=second.n_train - n_lost)
    return {"documents": {"sources": (first, source), "n_dropped_by_reason": by_reason}}


def costing(**changed: Any) -> Changes:
    return {"plan": {"cost": replace(CARD.inputs.plan.cost, **changed)}}


SHORT = replace(
    DEMO.inputs.training.time, wall_s=50.0, startup_s=20.0, data_wait_s=5.0, train_s=18.0,
    checkpoint_s=2.0, eval_s=4.0, other_s=1.0,
)  # fmt: skip
RECOMPUTED = {"gradient_checkpointing": True, "flops_per_token_hardware": 3.5e9}
RETRY = t.MemoryRetry(after_step=0, micro_batch_size=8, n_accumulation_steps=4, message="short")
PLAIN = t.Fallback(part="loss", planned="compiled", used="chunked", reason="NaN", after_step=0)
SMALLER = {"memory_retries": (RETRY,), "micro_batch_size": 8, "n_accumulation_steps": 4}
IN_PLACE = {"action": "read_in_place", "target": None, "reason": NO_SCRATCH}
RESUMED = {"n_sessions": 2, "resumed_at_steps": (600,)}
OFF = made.REASONS | {"baselines": "evaluation.baselines is false"}
ALIKE = (made.change("held_out_loss", 0.566 - 1.874, half=0.03, n=made.N),
         made.change(made.METRIC, 0.0, half=0.0, n=made.N))  # fmt: skip
ROWS = GPU.inputs.packing.train
CUT = replace(ROWS, n_tokens_dropped=ROWS.n_tokens_in // 10)
UNPACKED = {"packing": "none", "sequence_length_tokens": 1_536}
COOL = read(power_w=350.0, any_kernel_percent=95.0, temperature_c=41.0)
SOURCES = CARD.inputs.datasets.sources


class Planted(NamedTuple):
    """A planted problem, its findings, and words of the first one's evidence or advice."""

    name: str
    change: Changes
    must: str = ""
    words: str = ""
    run: Run = CARD


RUNS = (
    Planted("demo on a CPU", {}, run=DEMO),
    Planted("well-fed card", {}),
    Planted("QLoRA", {"plan": {"method": "qlora", **RECOMPUTED,
            "without_checkpointing_peak_bytes": 91e9}, "training": {"method": "qlora"},
            "export": {"merged_into": "dequantized base"}}),
    Planted("four cards", {"plan": {"world_size": 4}, "training": {"world_size": 4},
            "monitor": {"n_gpus": 4}}),
    Planted("resumed where it was saved", {"training": RESUMED}),
    Planted("all weights", {"plan": {"method": "full", "lora": None},
            "training": {"method": "full"}, "export": {"merged_into": None}}),
    Planted("loss alone", by_loss(6.2, 2.1)),
    Planted("run of 50 s", together(sized(1_600, 1, 2_000), {"training": {"time": SHORT}}),
            run=DEMO),
    Planted("no price", costing(price_usd_per_hour=None)),
    Planted("cool card, busy multiprocessors", COOL),
    Planted("stopped by patience", stopped_early()),
    Planted("no baselines wanted", evaluated(nearest=None, unavailable=OFF)),
    Planted("most of a source capped", lost(2_500, over_source_cap=2_500)),
    Planted("rows that are not packed", {"packing": UNPACKED}),
    Planted("no better than the run before", evaluated(earlier=made.earlier(-0.02,
            "no measurable change"))),
    Planted("held-out loss that rises by 1 %", losses(6.1, 0.70, 0.547, 0.552)),
    Planted("training that went up too", together(losses(6.1, 0.60, 0.70),
            {"training": {"loss_first": 1.0, "loss_last": 1.0}})),
    Planted("profile that was waited for", together(spent(other_s=0.12),
            {"profile": replace(CARD.inputs.profile, pause_s=0.12 * TRAINING.time.wall_s)})),
    Planted("throttled by its power limit", {"monitor": {"throttle_s": {"power": 900.0}}}),
    # Learning.
    Planted("worse than the run before", evaluated(earlier=made.earlier(-0.08, "worse")),
            "regression", "2026-05-30"),
    Planted("no Node", {"evaluation": made.not_scored(evaluated()["evaluation"],
            "Node is not installed")}, "task-not-scored", "Node is not installed"),
    Planted("baselines that failed", evaluated(nearest=None,
            unavailable=made.REASONS | {"baselines": "too few questions"}),
            "no-baseline", "too few questions"),
    Planted("as good as the nearest", evaluated(nearest=118),
            "baseline-not-beaten", "is not measurably better"),
    Planted("worse than the nearest", evaluated(nearest=160),
            "baseline-not-beaten", "is worse than answering"),
    Planted("no gain", evaluated(before=110), "no-measurable-change", "more held-out questions"),
    Planted("the same answers", evaluated(before=122, changes=ALIKE),
            "no-measurable-change", "0.0 points; no interval: all changed equally"),
    Planted("two documents", by_loss(1.874, 7.269, made.change("held_out_loss", 5.395, half=0.3,
            n=2, word="no measurable change")), "no-measurable-change",
            "too few of the 2 differ to be conclusive"),
    Planted("few groups of documents", by_loss(1.874, 7.269, made.change("held_out_loss", 5.395,
            half=0.3, n=46, word="no measurable change")), "no-measurable-change",
            "too few groups of the 46 differ"),
    Planted("harm", evaluated(before=160),
            "worse-than-untrained", "a lower learning rate"),
    Planted("harm by the loss", by_loss(1.2, 1.9),
            "worse-than-untrained", "on 200 held-out documents"),
    Planted("no gain by the loss", by_loss(1.9, 1.89),
            "no-measurable-change", "more held-out documents (data.eval_fraction)"),
    Planted("learned by heart", losses(6.1, 2.0, 1.5, 11.5), "overfitting", "stop near step 600"),
    Planted("worse from the first step", losses(1.5, 1.9, 2.4),
            "overfitting", "no step got"),
    Planted("learned by heart, no gain", together(losses(6.1, 2.0, 1.5, 11.5),
            evaluated(before=110)), "no-measurable-change overfitting",
            "train on more data, not longer"),
    Planted("chosen by its own loss", {"plan": {"load_best_model_at_end": True}, **by_loss(6.2,
            2.1)}, "chosen-by-held-out-loss", "training.load_best_model_at_end"),
    Planted("answers without an end", wrong(n_cut_off=30),
            "answers-cut-off", "evaluation.max_new_tokens"),
    Planted("long prompts", wrong(not_asked=30), "questions-not-asked", "shorten the prompts"),
    Planted("questions with two answers", evaluated(n_questions_shared_with_training=9),
            "questions-shared", "group of the source"),
    Planted("merge in bf16", {"export": {"loss_after_merge": 0.5391, "dtype": "bfloat16"}},
            "export-moved-loss", "export in fp32"),
    Planted("merge in fp32", {"export": {"loss_after_merge": 0.5391}},
            "export-moved-loss", "fp32 rounds least"),
    # Data.
    Planted("source without a license", {"datasets": {"sources": (SOURCES[0], replace(SOURCES[1],
            license=None))}}, "no-license", "generated-shops"),
    Planted("duplicates", lost(2_500, near_duplicate=2_500), "data-left-out", "62 %"),
    Planted("long documents cut", {"packing": {"overflow": "truncate", "train": CUT}},
            "tokens-cut", "overflow: split"),
    Planted("pieces with nothing to learn", {"packing": {"train": CUT}},
            "tokens-cut", "raise max_seq_length, up to"),
    Planted("padding of rows that are not packed", {"packing": UNPACKED,
            "training": {"n_padding_tokens": 60_000_000}}, "padding", "packing: bfd"),
    Planted("documents of most of a row", sized(3_200, 1, 3_300, fill=0.62),
            "padding", "change max_seq_length: documents of 341 tokens", run=DEMO),
    Planted("three rows", sized(3, 60, 11, fill=0.8),
            "data-below-batch padding", "training has only 3 rows", run=DEMO),
    Planted("few steps", sized(640, 2, 900), "few-steps", "gradient_accumulation_steps", run=DEMO),
    Planted("few steps of one micro-batch", together(sized(640, 2, 900),
            {"training": {"micro_batch_size": 32, "n_accumulation_steps": 1}}), "few-steps",
            "fewer rows per step (batch_size)", run=DEMO),
    Planted("long warm-up", {"plan": {"n_warmup_steps": 600}}, "few-steps", "warmup_ratio"),
    # Time.
    Planted("slow loader", spent(data_wait_s=0.3), "data-wait", "compare 2, 4 and 8"),
    Planted("slow disk", together(spent(data_wait_s=0.3), staged("rows", **IN_PLACE)),
            "data-wait", "scratch: auto"),
    Planted("tokenized as it goes", together(spent(data_wait_s=0.3),
            {"training": {"on_the_fly": True}}), "data-wait rows-not-compared",
            "pack the rows before training"),
    Planted("many saves", together(spent(checkpoint_s=0.1), {"plan": {"save_steps": 10}}),
            "checkpoint-time", "save less often (save_steps)"),
    Planted("saves by time", together(spent(checkpoint_s=0.1), {"plan": {"save_steps": N_STEPS}}),
            "checkpoint-time", "(save_every_minutes)"),
    Planted("one slow save", together(spent(checkpoint_s=0.1), {"training": {"n_saves": 1}}),
            "checkpoint-time", "only the final weights"),
    Planted("many evaluations", spent(eval_s=0.2), "evaluation-time", "eval_steps"),
    Planted("two long evaluations", together(spent(eval_s=0.2),
            {"training": {"eval_points": TRAINING.eval_points[::6]}}), "evaluation-time",
            "% of wall time"),
    Planted("slow start", spent(startup_s=0.07, other_s=0.05), "start-up", "torch_compile: false"),
    Planted("slow start of a demo", together(spent(DEMO, startup_s=0.2),
            {"plan": {"torch_compile": False}}), "start-up", "training run pays it once", run=DEMO),
    Planted("killed far from a save", together(spent(other_s=0.2), {"training": RESUMED}),
            "lost-work", "save more often"),
    # Card.
    Planted("memory ran out", {"training": SMALLER}, "memory-short", "set batch_size to 8"),
    Planted("memory ran out in spite of recomputation", {"training": SMALLER, "plan": {**RECOMPUTED,
            "without_checkpointing_peak_bytes": 70e9}}, "memory-short",
            "gradient_accumulation_steps to 4"),
    Planted("a wrong kernel", {"training": {"fallbacks": (PLAIN,)}},
            "plain-route", "loss was chunked instead of compiled after step 0: NaN"),
    Planted("full scratch", staged("weights", is_fallback=True, reason="No space left"),
            "not-staged", "weights were read in place: No space left"),
    Planted("recomputation for nothing", {"plan": {**RECOMPUTED,
            "without_checkpointing_peak_bytes": 70e9}}, "recomputation",
            "gradient_checkpointing: false"),
    Planted("kernels that wait for memory", read(tensor_active_percent=15.0,
            sm_active_percent=90.0), "memory-bound-kernels", "a larger micro-batch"),
    Planted("small kernels", together(COOL, read(sm_active_percent=60.0)),
            "small-kernels", "a larger micro-batch"),
    Planted("small kernels, not compiled", together(COOL, read(sm_active_percent=None),
            {"plan": {"torch_compile": False}}), "small-kernels", "torch_compile: true"),
    Planted("idle card", read(any_kernel_percent=45.0), "idle-card", "do not show why"),
    Planted("starved card", together(read(any_kernel_percent=45.0), spent(data_wait_s=0.5)),
            "idle-card data-wait", "data took 50 % of wall time"),
    Planted("hot card", {"monitor": {"throttle_s": {"power": 41.0, "thermal": 300.0}}},
            "thermal-throttling", "improve the cooling"),
    Planted("memory beyond the card's", together(read(memory_used_bytes=79.5e9),
            {"training": {"peak_memory_reserved_bytes": 84_000_000_000}}),
            "memory-spilled memory-over-plan", "4.50 GB of device memory"),
    Planted("short peak that no reading met",
            {"training": {"peak_memory_reserved_bytes": 66_000_000_000}}, "memory-over-plan",
            "the allocator held 66.0 GB"),
    Planted("room for twice the rows", {"plan": {"next_micro_batch_peak_bytes": 70_000_000_000}},
            "memory-room", "batch_size: 32, gradient_accumulation_steps: 1"),
    # Run.
    Planted("slower than calibrated", costing(predicted_hours_low=0.40, predicted_hours_high=0.50),
            "plan-missed", "check the bottleneck"),
    Planted("slower than guessed", costing(predicted_hours_low=0.40, predicted_hours_high=0.50,
            calibrated=False), "plan-missed", "calibrate"),
    Planted("slower, as it was resumed", together(costing(predicted_hours_low=0.40,
            predicted_hours_high=0.50), spent(other_s=0.2), {"training": RESUMED}),
            "plan-missed lost-work", "discarded time"),
    Planted("slower tokenizer", {"packing": {"engine_fallbacks": ("other ids for 'a b'",)}},
            "tokenizer-fallback", "other ids"),
    Planted("card that no table has", {"plan": {"gpu": None},
            "training": {"gpu_name": None, "measured_peak_flops_per_s": 6e14}},
            "measured-peak", "no source gives a peak for this card;"),
    Planted("dead monitor", {"monitor": {"n_samples": 0}}, "monitor-lost", "monitor_gpu.py"),
    Planted("batch of its own", {"plan": {"global_batch_sequences": 64}},
            "rows-not-compared", "its own settings"),
    Planted("claim that does not hold", {"plan": {"claims": GPU.inputs.plan.claims}},
            "claim", "not 47 hours"),
)  # fmt: skip
