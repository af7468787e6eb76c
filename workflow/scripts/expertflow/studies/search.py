"""Search for the fastest settings of a step; every choice keeps the global batch."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from expertflow.core.format import GIB, gib
from expertflow.core.records import fill_record
from expertflow.core.settings import name_of
from expertflow.hardware.probe import probe_machine
from expertflow.plan.draft import PlanDraft
from expertflow.plan.records import USABLE_FRACTION, TrainPlan
from expertflow.plan.settings import Loader, Training
from expertflow.plan.tuned import (
    TIE_FRACTION,
    TunedSettings,
    TuningTrial,
    free_settings,
    is_allowed,
    select_measured,
    settings_of,
)
from expertflow.train.records import TrialResult

# A trial below this share of the best speed so far is given up after its first steps.
WORTH_FRACTION = 0.9
# Attention implementations besides the one that reads document boundaries.
MASKED = ("flex", "sdpa")
N_WORKERS = (0, 2, 4, 8)
# Runs settings; the second argument is the lowest speed of interest in tokens/s, or null.
Run = Callable[[TunedSettings, float | None], TrialResult]


def find_choices(draft: PlanDraft, plan: TrainPlan) -> dict[str, Any]:
    """Return the arguments of a ``Search`` that list its choices."""
    default, free = settings_of(plan), free_settings(draft.spec)
    is_packed, machine = draft.packing.packing != "none", probe_machine()
    n_cpus, total = machine["n_cpus_usable"], draft.memory_total_bytes
    threads, workers = set[int](), list[int]()
    if draft.gpu is None and name_of(Training.n_threads) in free:
        # Powers of two up to the usable threads, that number, and the physical cores.
        threads = {1 << i for i in range(n_cpus.bit_length()) if 1 << i <= n_cpus}
        threads |= {n_cpus, min(machine["n_cpus_physical"] or n_cpus, n_cpus)}
    if name_of(Training.loader) in free and not is_packed:
        workers = [n for n in N_WORKERS if n <= n_cpus and n != default.dataloader_num_workers]
    is_compiled = name_of(Training.torch_compile) in free and is_packed and plan.method != "qlora"
    return {
        "default": default,
        "free": free,
        "on_card": draft.gpu is not None,
        "usable_bytes": None if total is None else int(USABLE_FRACTION * total),
        "may_compile": is_compiled and draft.gpu is not None,
        "n_threads": sorted(threads),
        "n_workers": workers,
    }


class Search(Struct, kw_only=True):
    """A search in progress. ``trials`` has the result of every choice, in order.

    ``free`` settings are those that the manifest leaves open. ``usable_bytes`` limits a predicted
    peak, null on a CPU. No trial begins after ``max_s`` of ``clock``. ``known`` trials of an
    earlier search are reused, except given-up ones that may be worthwhile here. ``keep`` is called
    with every trial run.
    """

    default: TunedSettings
    free: frozenset[str]
    on_card: bool
    usable_bytes: int | None = None
    may_compile: bool = False
    n_threads: Sequence[int] = ()
    n_workers: Sequence[int] = ()
    run: Run
    predict: Callable[[TunedSettings], int | None]
    clock: Callable[[], float]
    max_s: float
    keep: Callable[[TuningTrial], None] = lambda trial: None
    known: dict[TunedSettings, TuningTrial] = field(default_factory=dict)
    trials: dict[TunedSettings, TuningTrial] = field(default_factory=dict)
    _end_s: float = 0.0

    def explore(self) -> None:
        """Try one kind of setting after another, each with the best of the others so far."""
        self._end_s = self.clock() + self.max_s
        start = self.default
        self._try(start)
        if self.may_compile:
            # Compiling takes tens of seconds and does not change the ranking of the rest.
            start = replace(start, torch_compile=False)
            self._try(start)
        self._try_each(start, n_threads=self.n_threads)
        if self.on_card:
            self._descend(start)
            if name_of(Training.attention) in self.free:
                self._try_each(start, attention=MASKED)  # with the best number of rows
        elif name_of(Training.batch_size) in self.free:
            base = self.best(start) or start
            for rows in self._micro_batches():
                self._try(self._with_rows(base, rows))
            # The best number of threads may depend on the number of rows.
            self._try_each(start, n_threads=self.n_threads)
        base = self.best(start) or start
        for n in self.n_workers:
            kind: Loader = "workers" if n else "thread"
            self._try(replace(base, loader=kind, dataloader_num_workers=n))
        if self.may_compile:
            self._try_each(start, torch_compile=(True,))

    def best(self, like: TunedSettings | None = None) -> TunedSettings | None:
        """Return the fastest allowed choice, the simplest of ties; ``like``: compiled alike."""
        rates = {
            choice: rate
            for choice, rate in self._rates(like).items()
            if is_allowed(choice, self.default, self.free)
        }
        # Within a trial's noise, the simpler choice wins.
        tied = (s for s in rates if rates[s] * (1 + TIE_FRACTION) >= max(rates.values()))
        return min(tied, key=self._complexity, default=None)

    def _rates(self, like: TunedSettings | None) -> dict[TunedSettings, float]:
        return {
            trial.settings: trial.tokens_per_s or 0.0
            for trial in select_measured(self.trials.values())
            if like is None or trial.settings.torch_compile == like.torch_compile
        }

    def _try_each(self, start: TunedSettings, **values: Iterable[Any]) -> None:
        base = self.best(start) or start
        for name, each in values.items():
            for value in each:
                self._try(replace(base, **{name: value}))

    def _descend(self, start: TunedSettings) -> None:
        """Try fewer and fewer rows, first keeping all activations, then recomputing them.

        Stop once fewer rows are slower; recompute only with more rows than fit without.
        """
        ran: list[int] = []
        is_free = name_of(Training.batch_size) in self.free
        micros = self._micro_batches() if is_free else [start.batch_size]
        free = name_of(Training.gradient_checkpointing) in self.free
        for again in (False, True) if free else (self.default.gradient_checkpointing,):
            choices = [
                replace(self._with_rows(start, rows), gradient_checkpointing=again)
                for rows in micros
                if not again or not ran or rows > max(ran)
            ]
            fastest = 0.0
            for i, choice in enumerate(choices):
                trial = self._try(choice)
                if trial.outcome not in ("measured", "given up"):
                    continue
                ran += [] if again else [choice.batch_size]  # rows that fit without recomputing
                rate = trial.tokens_per_s or 0.0
                # More rows with recomputation against fewer without.
                is_no_gain = again and bool(ran) and trial.outcome == "given up"
                if is_no_gain or rate < fastest * (1 - TIE_FRACTION):
                    why = f"dominated: {choice.batch_size} rows were already slower"
                    for other in choices[i + 1 :]:
                        left_out = _left_out(other, why, self.predict(other))
                        self.trials.setdefault(other, left_out)
                    break
                fastest = max(fastest, rate)

    def _micro_batches(self) -> list[int]:
        n_rows = self.default.batch_size * self.default.gradient_accumulation_steps
        return [n for n in range(n_rows, 0, -1) if n_rows % n == 0]

    def _with_rows(self, base: TunedSettings, rows: int) -> TunedSettings:
        n_rows = self.default.batch_size * self.default.gradient_accumulation_steps
        return replace(base, batch_size=rows, gradient_accumulation_steps=n_rows // rows)

    def _try(self, choice: TunedSettings) -> TuningTrial:
        if choice not in self.trials:
            self.trials[choice] = self._find_or_run(choice)
        return self.trials[choice]

    def _find_or_run(self, choice: TunedSettings) -> TuningTrial:
        # A choice is given up below a share of the best so far of its kind.
        rates = self._rates(choice).values()
        least = WORTH_FRACTION * max(rates) if rates else None  # tokens/s
        if (known := self.known.get(choice)) is not None:
            rate = known.tokens_per_s
            # Another search with another best gave it up, but it may be worthwhile in this one.
            is_slow = rate is not None and least is not None and rate < least
            if known.outcome != "given up" or is_slow:
                return known
        peak, usable = self.predict(choice), self.usable_bytes
        # The default is always run, as everything is compared with it.
        if choice != self.default:
            if peak is not None and usable is not None and peak > usable:
                sizes = f"predicted {gib(peak)}, usable {usable / GIB:.1f}"
                return _left_out(choice, f"memory: {sizes}", peak)
            if self.clock() >= self._end_s:
                why = f"budget: the search had used its {self.max_s:g} s"
                return _left_out(choice, why, peak)
        result = self.run(choice, least)
        is_timed = result.n_timed_steps > 0 and math.isfinite(result.timed_s)
        trial = fill_record(
            TuningTrial,
            result,
            settings=choice,
            reason=result.problem,
            predicted_peak_bytes=peak,
            tokens_per_s=result.tokens_per_s if is_timed else None,
            step_s=result.timed_s / result.n_timed_steps if is_timed else None,
            startup_s=result.startup_s if is_timed else None,
        )
        self.keep(trial)
        return trial

    def _complexity(self, choice: TunedSettings) -> tuple[float, ...]:
        default = self.default
        return (
            choice != default,
            choice.torch_compile,
            choice.gradient_checkpointing,
            choice.attention != default.attention,
            choice.dataloader_num_workers,
            choice.n_threads or 0,
            choice.gradient_accumulation_steps,
        )


def _left_out(settings: TunedSettings, reason: str, predicted: int | None) -> TuningTrial:
    return TuningTrial(
        settings=settings, outcome="left out", reason=reason, predicted_peak_bytes=predicted
    )
