"""Keep the trials of searches, so that another expert of the same kind takes them over."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.core.locks import try_lock
from expertflow.core.records import Record, read_record, write_record
from expertflow.plan.tuned import TunedSettings, TuningTrial

log = logging.getLogger(__name__)


class Pair(Record, frozen=True, kw_only=True):
    """Two choices that were timed one right after the other, in documents' tokens a second."""

    best: TunedSettings
    default: TunedSettings
    best_tokens_per_s: float
    default_tokens_per_s: float


class CachedTrials(Record, frozen=True, kw_only=True):
    """What is kept of searches under one key; ``made_by`` names the code and its libraries."""

    key: str
    made_by: tuple[str, ...]
    gpu_name: str | None = None
    trials: tuple[TuningTrial, ...] = ()
    pairs: tuple[Pair, ...] = ()


class TrialCache:
    def __init__(self, path: Path, kept: CachedTrials) -> None:
        self._path = path
        self.kept = kept

    def known(self) -> dict[TunedSettings, TuningTrial]:
        """Return the trials that say something of another run.

        What failed is tried again, memory that ran out included: another process may have held it.
        """
        return {t.settings: t for t in self.kept.trials if t.outcome in ("measured", "given up")}

    def keep(self, trial: TuningTrial, gpu_name: str | None) -> None:
        others = tuple(t for t in self.kept.trials if t.settings != trial.settings)
        name = gpu_name or self.kept.gpu_name
        self._write(replace(self.kept, gpu_name=name, trials=(*others, trial)))

    def keep_pair(self, pair: Pair) -> None:
        self._write(replace(self.kept, pairs=(*self.kept.pairs, pair)))

    def pairs(self, best: TunedSettings, default: TunedSettings) -> tuple[Pair, ...]:
        return tuple(p for p in self.kept.pairs if (p.best, p.default) == (best, default))

    def _write(self, kept: CachedTrials) -> None:
        self.kept = kept
        write_record(self._path, kept)


@contextmanager
def open_cache(folder: Path, *, key: str, made_by: tuple[str, ...]) -> Iterator[TrialCache]:
    """Open the trials under a key, and keep others from searching the same at the same time."""
    name = sha256_json([key, *made_by])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a") as stream:
        if try_lock(stream) == "held":
            log.info("the same is being tuned already; waiting, to take its trials over")
            try_lock(stream, wait=True)
        path = folder / f"{name}.json"
        kept = CachedTrials(key=key, made_by=made_by)
        if path.is_file():
            try:
                kept = read_record(CachedTrials, path)
            except DataError as error:
                log.warning("%s; tuned anew", error)
        yield TrialCache(path, kept)
