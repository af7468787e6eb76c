"""Tune an expert: search for the fastest settings of its step, and measure the gain."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from expertflow.core.errors import ConfigError, DataError, TrainingError, single_line
from expertflow.core.files import remove, sha256_json
from expertflow.core.locks import try_lock, wait_for_lock
from expertflow.core.records import Record, fill_record, read_record, write_sealed
from expertflow.core.settings import name_of
from expertflow.plan.draft import PlanDraft
from expertflow.plan.memory import peak_bytes
from expertflow.plan.records import TrainPlan
from expertflow.plan.resolve import plan_training
from expertflow.plan.switches import choose_loader
from expertflow.plan.tuned import TIE_FRACTION, TunedSettings, TuningRecord, TuningTrial, tuning_key
from expertflow.studies.compare_trials import estimate_ratio
from expertflow.studies.plan_expert import TuneJob, card_names, check_card, cpu_name, draft_plan
from expertflow.studies.search import Search, find_choices
from expertflow.studies.variants import with_one_process
from expertflow.train.records import TrialResult
from expertflow.train.trial import Trial

log = logging.getLogger(__name__)
# Steps of a trial. Timing ends early if steps take long.
N_WARMUP, N_TIMED, MAX_TIMED_S = 3, 20, 4.0
# If the first step takes longer than this, one more is enough.
LONG_STEP_S = 2.0
# The remainder is for timing best and default alternately.
SEARCH_FRACTION = 0.6
N_PAIRS = 3
LIBRARIES = ("torch", "transformers", "peft")

RunTrial = Callable[[Trial], TrialResult]


class Pair(Record, frozen=True, kw_only=True):
    """Two choices timed in succession, in document tokens per second."""

    best: TunedSettings
    default: TunedSettings
    best_tokens_per_s: float
    default_tokens_per_s: float


class CachedTrials(Record, frozen=True, kw_only=True):
    """Trials cached under one key; ``made_by`` identifies the code and its libraries.

    ``used_by`` are the experts whose searches ended; one that searches again wants new times.
    """

    key: str
    made_by: tuple[str, ...]
    used_by: tuple[str, ...] = ()
    gpu_name: str | None = None
    trials: tuple[TuningTrial, ...] = ()
    pairs: tuple[Pair, ...] = ()


def tune(
    job: TuneJob, run_trial: RunTrial, *, clock: Callable[[], float] = time.perf_counter
) -> TuningRecord:
    """Search, then compare the best with the default in alternating runs."""
    end_s = clock() + job.max_seconds
    draft = draft_plan(job)
    plan = plan_training(draft)
    _check(plan)
    key = tuning_key(
        plan,
        model_type=draft.facts.model_type,
        packing=draft.packing.packing,
        cpu=cpu_name(draft.gpu),
    )
    made_by = (job.code, *(f"{name} {metadata.version(name)}" for name in LIBRARIES))
    alone = with_one_process(plan, packing=draft.packing, facts=draft.facts)
    blank = CachedTrials(key=key, made_by=made_by)
    with open_cache(job.cache, blank) as (path, kept):
        kept = blank if job.expert in kept.used_by else kept
        bench = Bench(job=job, draft=draft, plan=alone, run_trial=run_trial, path=path, kept=kept)
        # Failures are retried, even out of memory, since another process may have used it.
        known = {t.settings: t for t in kept.trials if t.outcome in ("measured", "given up")}
        search = Search(
            **find_choices(draft, plan),
            run=bench.run,
            predict=bench.predict,
            clock=clock,
            max_s=SEARCH_FRACTION * job.max_seconds,
            keep=bench.keep,
            known=known,
        )
        search.explore()
        judged = _judge(bench, search, search.best(), end_s=end_s)
        bench.write(used_by=(*bench.kept.used_by, job.expert))
    return fill_record(
        TuningRecord,
        plan,
        **judged,
        key=key,
        gpu_name=bench.kept.gpu_name,
        default=search.default,
        trials=tuple(search.trials.values()),
    )


@contextmanager
def open_cache(folder: Path, kept: CachedTrials) -> Iterator[tuple[Path, CachedTrials]]:
    """Open the cached trials of a key, locked against concurrent searches with that key."""
    name = sha256_json([kept.key, *kept.made_by])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a") as stream:
        if try_lock(stream) == "held":
            wait_for_lock(stream, f"{folder / name}: another run is tuning the same")
        path = folder / f"{name}.json"
        if path.is_file():
            try:
                kept = read_record(CachedTrials, path)
            except DataError as error:
                log.warning("%s; tuning again", error)
        yield path, kept


class Bench(Struct, kw_only=True):
    """Runs settings of a single-process plan, and stores the results in ``path``."""

    job: TuneJob
    draft: PlanDraft
    plan: TrainPlan
    run_trial: RunTrial
    path: Path
    kept: CachedTrials

    def run(self, settings: TunedSettings, least_tokens_per_s: float | None) -> TrialResult:
        spec = replace(
            self.job.spec,
            loader=settings.loader,
            dataloader_num_workers=settings.dataloader_num_workers,
        )
        follows = {name_of(s): value for s, (value, _) in choose_loader(spec, "none").items()}
        trial = fill_record(
            Trial,
            self.job,
            plan=replace(self.plan, **{**asdict(settings), **follows}),
            n_warmup_steps=N_WARMUP,
            n_timed_steps=N_TIMED,
            max_timed_s=MAX_TIMED_S,
            long_step_s=LONG_STEP_S,
            least_tokens_per_s=least_tokens_per_s,
        )
        try:
            result = self.run_trial(trial)
        except TrainingError as error:
            result = TrialResult(outcome="failed", problem=single_line(error))
        finally:
            # A killed process leaves it behind.
            remove(self.job.scratch)
        self.kept = replace(self.kept, gpu_name=result.gpu_name or self.kept.gpu_name)
        speed = f"{result.tokens_per_s:,.0f} tokens/s" if result.n_timed_steps else ""
        details = "; ".join(filter(None, (speed, result.problem)))
        log.info("%s: %s: %s", settings_words(settings), result.outcome, details)
        return result

    def predict(self, settings: TunedSettings) -> int | None:
        if self.draft.gpu is None or settings.attention != self.plan.attention:
            return None  # Only the plan's attention was traced.
        checkpoint = settings.gradient_checkpointing
        return peak_bytes(self.draft, settings.batch_size, checkpoint=checkpoint)

    def keep(self, trial: TuningTrial) -> None:
        others = tuple(t for t in self.kept.trials if t.settings != trial.settings)
        self.write(trials=(*others, trial))

    def write(self, **changes: Any) -> None:
        self.kept = replace(self.kept, **changes)
        write_sealed(self.path, self.kept)


def settings_words(settings: TunedSettings) -> str:
    n_workers, by_thread = settings.dataloader_num_workers, settings.loader == "thread"
    return (
        f"{settings.batch_size} x {settings.gradient_accumulation_steps} rows, checkpointing"
        f" {'on' if settings.gradient_checkpointing else 'off'}, attention {settings.attention},"
        f" {'compiled' if settings.torch_compile else 'not compiled'}, threads"
        f" {settings.n_threads or 'auto'},"
        f" {'loader thread' if by_thread else f'{n_workers} workers'}"
    )


def _check(plan: TrainPlan) -> None:
    if plan.world_size > 1 and plan.parallel == "fsdp":
        raise ConfigError(
            "training.parallel is fsdp: tuning times one process, which cannot hold the whole"
            " model; use ddp, or set training.tuned to null"
        )
    if plan.gpu is not None:
        name = next(iter(card_names()), "none")
        check_card(plan.gpu, name, "tuning")


def _judge(
    bench: Bench, search: Search, best: TunedSettings | None, *, end_s: float
) -> dict[str, object]:
    """Time alternating pairs; return the winner, the default unless the gain is certain."""
    default = search.default
    if best == default:
        return {"best": best, "gain": 1.0}
    if best is None or search.trials[default].outcome != "measured":
        return {"best": best}
    # The winner of a search is partly the luckiest of many trials.
    pairs = _time_pairs(bench, search, best, end_s=end_s)
    if len(pairs) < N_PAIRS:
        n_pairs = len(pairs)
        log.info("%s: %d of %d pairs: keeping the default", settings_words(best), n_pairs, N_PAIRS)
        return {"best": default}
    gain = estimate_ratio([pair.best_tokens_per_s / pair.default_tokens_per_s for pair in pairs])
    if gain.value < 1 + TIE_FRACTION or gain.low <= 1:
        log.info("%s: %.3f times the default: a tie", settings_words(best), gain.value)
        best = default
    return {"best": best, "gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}


def _time_pairs(bench: Bench, search: Search, best: TunedSettings, *, end_s: float) -> list[Pair]:
    default = search.default
    pairs = [p for p in bench.kept.pairs if (p.best, p.default) == (best, default)]
    # Compiled code is cached by then.
    trials = search.trials[best], search.trials[default]
    # Estimated duration of a pair, so that no pair overruns the budget.
    steps_s = sum((N_WARMUP + t.n_timed_steps) * (t.step_s or 0.0) for t in trials)
    took_s = steps_s + sum(t.startup_s or 0.0 for t in trials)
    for i in range(len(pairs), N_PAIRS):
        start_s = search.clock()
        if start_s + took_s > end_s:
            break
        # Alternating order, since a card slows down while it warms up.
        order = (default, best) if i % 2 == 0 else (best, default)
        results = {settings: bench.run(settings, None) for settings in order}
        if any(result.outcome != "measured" for result in results.values()):
            break
        pair = Pair(
            best=best,
            default=default,
            best_tokens_per_s=results[best].tokens_per_s,
            default_tokens_per_s=results[default].tokens_per_s,
        )
        pairs.append(pair)
        bench.write(pairs=(*bench.kept.pairs, pair))
        took_s = search.clock() - start_s
    return pairs
