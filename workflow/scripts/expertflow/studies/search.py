"""Search for the fastest settings of a step; every choice keeps the global batch."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from expertflow.core.format import GIB, gib
from expertflow.core.records import Record, fill_record
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


class Space(Record, frozen=True, kw_only=True):
    """Choices besides the default; ``free`` settings are those that the manifest leaves open.

    ``usable_bytes`` limits a predicted peak, null on a CPU.
    """

    default: TunedSettings
    free: frozenset[str]
    on_card: bool
    usable_bytes: int | None = None
    may_compile: bool = False
    n_threads: tuple[int, ...] = ()
    n_workers: tuple[int, ...] = ()

    def is_free(self, setting: Any) -> bool:
        return name_of(setting) in self.free

    @property
    def n_rows(self) -> int:
        return self.default.batch_size * self.default.gradient_accumulation_steps

    @property
    def micro_batches(self) -> list[int]:
        return [n for n in range(self.n_rows, 0, -1) if self.n_rows % n == 0]


def space_of(draft: PlanDraft, plan: TrainPlan) -> Space:
    default, free = settings_of(plan), free_settings(draft.spec)
    is_packed, machine = draft.packing.packing != "none", probe_machine(table=[])
    n_cpus, total = machine.n_cpus_usable, draft.memory_total_bytes
    threads, workers = list[int](), list[int]()
    if draft.gpu is None and name_of(Training.n_threads) in free:
        threads = threads_to_try(n_cpus, machine.n_cpus_physical)
    if name_of(Training.loader) in free and not is_packed:
        workers = [n for n in N_WORKERS if n <= n_cpus and n != default.dataloader_num_workers]
    is_compiled = name_of(Training.torch_compile) in free and is_packed and plan.method != "qlora"
    return Space(
        default=default,
        free=free,
        on_card=draft.gpu is not None,
        usable_bytes=None if total is None else int(USABLE_FRACTION * total),
        may_compile=is_compiled and draft.gpu is not None,
        n_threads=tuple(threads),
        n_workers=tuple(workers),
    )


def threads_to_try(n_usable: int, n_physical: int | None) -> list[int]:
    """Return powers of two up to the usable threads, that number, and the physical cores."""
    powers = {1 << i for i in range(n_usable.bit_length()) if 1 << i <= n_usable}
    return sorted(powers | {n_usable, min(n_physical or n_usable, n_usable)})


class Search(Struct, kw_only=True):
    """A search in progress. ``trials`` has the result of every choice, in order.

    No trial begins after ``max_s`` of ``clock``. ``known`` trials of an earlier search are reused,
    except given-up ones that may be worthwhile here. ``keep`` is called with every trial run.
    """

    space: Space
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
        space, start = self.space, self.space.default
        self._try(start)
        if space.may_compile:
            # Compiling takes tens of seconds and does not change the ranking of the rest.
            start = replace(start, torch_compile=False)
            self._try(start)
        self._try_each(start, n_threads=space.n_threads)
        if space.on_card:
            self._descend(start)
            if space.is_free(Training.attention):
                self._try_each(start, attention=MASKED)  # with the best number of rows
        elif space.is_free(Training.batch_size):
            base = self.best(start) or start
            for rows in space.micro_batches:
                self._try(self._with_rows(base, rows))
            # The best number of threads may depend on the number of rows.
            self._try_each(start, n_threads=space.n_threads)
        base = self.best(start) or start
        for n in space.n_workers:
            kind: Loader = "workers" if n else "thread"
            self._try(replace(base, loader=kind, dataloader_num_workers=n))
        if space.may_compile:
            self._try_each(start, torch_compile=(True,))

    def best(self, like: TunedSettings | None = None) -> TunedSettings | None:
        """Return the fastest allowed choice, the simplest of ties; ``like``: compiled alike."""
        default, free = self.space.default, self.space.free
        rates = {
            choice: rate
            for choice, rate in self._rates(like).items()
            if is_allowed(choice, default, free)
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
        space = self.space
        is_free = space.is_free(Training.batch_size)
        micros = space.micro_batches if is_free else [start.batch_size]
        free = space.is_free(Training.gradient_checkpointing)
        for again in (False, True) if free else (space.default.gradient_checkpointing,):
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

    def _with_rows(self, base: TunedSettings, rows: int) -> TunedSettings:
        return replace(base, batch_size=rows, gradient_accumulation_steps=self.space.n_rows // rows)

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
        peak, usable = self.predict(choice), self.space.usable_bytes
        # The default is always run, as everything is compared with it.
        if choice != self.space.default:
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
        default = self.space.default
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
