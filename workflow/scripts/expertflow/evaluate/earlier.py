"""Keep a history of an expert's evaluations, so that the next one can detect a regression.

Each evaluation is a line of JSON with the questions it got right, by content hash. The history is a
cache: losing it costs only the comparison.
"""

import json
import logging
from collections.abc import Hashable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.files import (
    canonical_json,
    sha256_directory,
    sha256_file,
    sha256_text,
    write_text,
)
from expertflow.core.locks import try_lock
from expertflow.core.records import Record, fill_record, from_json, seal, to_json, unseal
from expertflow.evaluate.records import Decoding, EarlierRun, Example, GenerationSpec, Judgment
from expertflow.evaluate.statistics import estimate_change

log = logging.getLogger(__name__)
N_KEPT = 50
HASH_CHARS = 32


class ScoringSetup(Record, frozen=True, kw_only=True):
    """How questions were asked and judged. ``artifacts`` are hashes of the files scoring read.

    ``scorer`` has the versions of the scoring code: a corrected scorer alone may change a score.
    """

    task: str
    metric: str
    max_new_tokens: int
    decoding: Decoding
    fields: dict[str, str]
    artifacts: dict[str, str]
    scorer: dict[str, str]


class PastRun(Record, frozen=True, kw_only=True):
    """An evaluation's results by question; only those with equal ``how`` are compared."""

    evaluated_at: str
    weights_sha256: str
    how: ScoringSetup
    correct: dict[str, bool]


def make_run(
    spec: GenerationSpec,
    metric: str,
    weights_sha256: str,
    examples: Sequence[Example],
    judgments: Sequence[Judgment],
    scorer: Mapping[str, str],
) -> PastRun:
    paths = {name: Path(place) for name, place in sorted(spec.artifacts.items())}
    how = fill_record(
        ScoringSetup,
        spec,
        task=spec.task_name,
        metric=metric,
        # Current hashes, because a corrected database makes other answers right.
        artifacts={
            name: sha256_directory(path) if path.is_dir() else sha256_file(path)
            for name, path in paths.items()
        },
        scorer=dict(scorer),
    )
    keys = [hash_question(spec, example) for example in examples]
    correct = {key: one.correct for key, one in zip(keys, judgments, strict=True)}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return PastRun(evaluated_at=now, weights_sha256=weights_sha256, how=how, correct=correct)


def hash_question(spec: GenerationSpec, example: Example) -> str:
    given = {arg: example.fields.get(name) for arg, name in sorted(spec.fields.items())}
    return sha256_text(canonical_json([example.prompt, example.reference, given]))[:HASH_CHARS]


def compare_runs(
    now: PastRun, path: Path, *, seed: int, groups: Mapping[str, Hashable]
) -> EarlierRun | None:
    """Compare with the newest evaluation of other weights, or just name it.

    ``groups`` maps hashes of questions to their groups.
    """
    others = [
        one
        for one in reversed(read_runs(path))
        if one.weights_sha256 != now.weights_sha256 and one.how == now.how
    ]
    if not others:
        return None
    # If none shares a question, name the newest, so that the report can say so.
    before = next((b for b in others if b.correct.keys() & now.correct.keys()), others[0])
    shared = sorted(before.correct.keys() & now.correct.keys())
    value = change = None
    if shared:
        then, today = ([run.correct[key] for key in shared] for run in (before, now))
        value = sum(then) / len(then)
        own, metric = [groups[key] for key in shared], now.how.metric
        change = estimate_change(metric, then, today, groups=own, higher_is_better=True, seed=seed)
    return fill_record(
        EarlierRun, before, n_shared_questions=len(shared), value_fraction=value, change=change
    )


def append_run(now: PastRun, path: Path) -> None:
    """Append an evaluation atomically, under a lock; repeats add nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("a") as lock:
            try_lock(lock, wait=True)
            known = read_runs(path)
            # The job was run again.
            if known and replace(known[-1], evaluated_at=now.evaluated_at) == now:
                return
            lines = (canonical_json(seal(to_json(run))) for run in (*known, now)[-N_KEPT:])
            write_text(path, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        # The results are valid without it, and were paid for.
        log.warning("%s: this evaluation was not saved for later ones (%s)", path, error)


def read_runs(path: Path) -> list[PastRun]:
    if not path.is_file():
        return []
    found: list[PastRun] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(from_json(PastRun, unseal(json.loads(line))))
        except (ValueError, DataError) as error:
            log.warning("%s: line %d was skipped: %.120s", path, number, error)
    return found
