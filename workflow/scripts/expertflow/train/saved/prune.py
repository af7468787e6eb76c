"""Remove training states that no result refers to any more."""

from pathlib import Path

from expertflow.core.locks import try_lock
from expertflow.core.records import read_part


def prunable(results: Path, state: Path) -> list[Path]:
    """List the states that can go: not published by their expert, and not in use.

    An unfinished state may be a run that is to be resumed, so the newest of them stays.
    """
    found: list[Path] = []
    # Beside the states lie a store of tokens and a guard's notes, which other rules look after.
    experts = (path for path in state.glob("[!.]*") if path.is_dir())
    for expert in sorted(experts):
        published = _published(results / expert.name / "training.json")
        others = [path for path in expert.iterdir() if path.is_dir() and path.name != published]
        others.sort(key=lambda path: path.stat().st_mtime)
        finished = [path for path in others if (path / "outcome.json").is_file()]
        unfinished = [path for path in others if path not in finished]
        # Nothing published: a retraining failed, and the newest finished model is the last one.
        keep = unfinished[-1:] + ([] if published else finished[-1:])
        found += [path for path in others if path not in keep and not _in_use(path)]
    return found


def _published(record: Path) -> str | None:
    if not record.is_file():
        return None
    return read_part(str, record, "fingerprint")


def _in_use(state: Path) -> bool:
    """Tell whether a trainer holds the state's lock, or may, where there are no locks."""
    with (state / "lock").open("a") as stream:
        return try_lock(stream) != "taken"
