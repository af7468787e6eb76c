"""Copy training states elsewhere, so that losing a disk costs only minutes.

Below a destination:

    state/{expert}/{fingerprint}/step-00000040/…       the newest complete checkpoint, the logs
    state/{expert}/{fingerprint}/step-00000040.json    its contents with hashes; written last
    state/{expert}/{fingerprint}/finished/…            a trained model, and what its results need

A push without its .json was interrupted, and is ignored.
"""

import logging
import re
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.disk import find_full
from expertflow.core.errors import DataError
from expertflow.core.files import link_or_copy, remove, replacing, sha256_file
from expertflow.core.locks import try_lock
from expertflow.core.records import read_part, write_record
from expertflow.rental.sync.store import (
    NotThere,
    SendRecord,
    Store,
    SyncFailed,
    check_key,
    files_below,
)
from expertflow.train.saved import checkpoint_files

log = logging.getLogger(__name__)
FINISHED, KEPT = "finished", 2
PUSH = re.compile(rf"step-\d+|{FINISHED}")
# Written when training is done; until then there is no model to restore.
OUTCOME, FINAL, CHECKPOINTS, LOCK = "outcome.json", "final", "checkpoints", "lock"
N_HOLDS = 3
FETCH_WAITS_S = (5.0, 10.0, 20.0)


class _Damaged(SyncFailed):
    pass


def states_below(root: Path) -> list[Path]:
    return sorted(
        state
        for expert in root.glob("[!.]*")
        for state in expert.glob("[!.]*")
        if state.is_dir() and not state.name.endswith(".partial")
    )


def push_state(
    state: Path, store: Store, hold: Path, *, trusted: Collection[str] | None = None
) -> SendRecord | None:
    """Copy a state's newest checkpoint or model and logs, unless already there; keep two pushes.

    Hard links in ``hold``, on the same disk, preserve a checkpoint meanwhile. A push whose key is
    not ``trusted`` (null: all are) is compared and repaired. SyncFailed leaves earlier pushes
    intact.
    """
    place, name, folder = key_of(state), _progress_of(state), hold / "files"
    if name is None:
        return None
    # Only the .json counts: it is written after everything else.
    there = _list_pushes(store, place)
    if f"{name}.json" in there and (trusted is None or f"{place}/{name}" in trusted):
        return None
    start_s = time.monotonic()
    try:
        name, files = _hold(state, folder)
        key = f"{place}/{name}"
        if f"{name}.json" in there:
            # The .json first, so that a push interrupted now does not count.
            store.delete(f"{key}.json")
        sent = store.send_files(folder, key, files)
        sha256s = {file: sha256_file(folder / file) for file in files}
        write_record(hold / f"{name}.json", {"name": name, "sha256s": sha256s})
        store.send_files(hold, place, [f"{name}.json"])
        (hold / f"{name}.json").unlink()
        n_bytes = sum((folder / file).stat().st_size for file in files)
    finally:
        remove(folder)
    _drop_older(store, place, [*there, f"{name}.json"], name)
    # The total: if most was already there, a speed from the remainder would predict weeks.
    return replace(sent, n_bytes=n_bytes, duration_s=round(time.monotonic() - start_s, 3))


def pull_states(
    root: Path, store: Store, *, wait: Callable[[float], object] = time.sleep
) -> list[str]:
    """Restore states with more progress in the store than here; return a line for each.

    A damaged push is dropped in favor of the previous one; SyncFailed if all of a state's are.
    """

    def visible(key: str) -> list[str]:
        return [check_key(name) for name in store.list_names(key) if not name.startswith(".")]

    lines = []
    for expert in visible("state"):
        for fingerprint in visible(f"state/{expert}"):
            outcome = _pull(store, root / expert / fingerprint, wait)
            lines += [f"{expert}/{fingerprint}: {outcome}"] if outcome else []
    return lines


def _list_pushes(store: Store, place: str) -> list[str]:
    # Anything else there is not part of a push, and is neither read nor removed.
    return [n for n in store.list_names(place) if PUSH.fullmatch(n.removesuffix(".json"))]


def key_of(state: Path) -> str:
    return f"state/{state.parent.name}/{state.name}"


def _progress_of(state: Path) -> str | None:
    """Return the newest checkpoint's name, ``finished`` for a model; names sort by progress."""
    if (state / OUTCOME).is_file() and (state / FINAL).is_dir():
        return FINISHED
    newest = checkpoint_files.newest_checkpoint(state)
    return None if newest is None else newest.name


def _rank(name: str | None) -> tuple[bool, str]:
    # step-00000040 < step-00000080 < finished
    return (name == FINISHED, name or "")


def _drop_older(store: Store, place: str, names: list[str], newest: str) -> None:
    pushes = sorted({n.removesuffix(".json") for n in names if n.endswith(".json")}, key=_rank)
    # Always keep the newest: after a rollback, a run continues with a lower step.
    kept = {newest, *[name for name in pushes if name != newest][-(KEPT - 1) :]}
    for name in sorted({entry.removesuffix(".json") for entry in names} - kept):
        for entry in (f"{name}.json", name):
            if entry in names:
                store.delete(f"{place}/{entry}")


def _hold(state: Path, folder: Path) -> tuple[str, list[str]]:
    for _ in range(N_HOLDS):
        remove(folder)
        try:
            return _lay_out(state, folder)
        except FileNotFoundError as error:
            # Newer checkpoints replaced this one meanwhile.
            log.info("%s changed while being copied (%s); trying again", state, error)
    raise SyncFailed(f"{state}: changes too fast to be copied; push less often than it saves")


def _lay_out(state: Path, folder: Path) -> tuple[str, list[str]]:
    """Link immutable files and copy growing ones; return the push's name and its files."""
    name = _progress_of(state)
    if name is None:
        raise FileNotFoundError(f"{state}: no complete checkpoint")
    if name == FINISHED:
        kept = [state / FINAL]
    else:
        # The best checkpoint is needed too if the run publishes its best weights.
        found = (checkpoint_files.newest_checkpoint(state), checkpoint_files.best_checkpoint(state))
        kept = [path for path in dict.fromkeys(found) if path is not None]
        name = kept[0].name
    for path in kept:
        if not (files := files_below(path)):
            raise FileNotFoundError(f"{path}: is missing")
        for file in files:
            link_or_copy(path / file, folder / path.relative_to(state) / file)
    # Logs come after the checkpoint, so that they cover all of it.
    for file in files_below(state, skip=(CHECKPOINTS, FINAL, LOCK)):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(state / file, folder / file)
    return name, files_below(folder)


def _pull(store: Store, state: Path, wait: Callable[[float], object]) -> str | None:
    place = key_of(state)
    pushed = [n.removesuffix(".json") for n in _list_pushes(store, place) if n.endswith(".json")]
    here = _rank(_intact_progress_of(state) if pushed else None)
    further = [name for name in sorted(pushed, key=_rank, reverse=True) if _rank(name) > here]
    damaged = []
    for name in further:
        if (state / LOCK).is_file():
            with (state / LOCK).open("a") as stream:
                if try_lock(stream) == "held":
                    return f"{name} not pulled, because a trainer is running here"
        try:
            _fetch_with_retries(store, check_key(name), state, wait)
        except _Damaged as error:
            log.warning("%s", error)
            damaged.append(name)
            continue
        # If they stayed, this run would trust them and not push the same step again.
        for bad in damaged:
            store.delete(f"{place}/{bad}.json")
            store.delete(f"{place}/{bad}")
        dropped = f"; {', '.join(damaged)} was damaged and dropped" if damaged else ""
        return f"{name} pulled, sha256 of every file matches{dropped}"
    if further:
        raise SyncFailed(
            f"{store.shown}/{place}: {', '.join(further)} is damaged, and no other push is further"
            " than the state here; pass --no-pull to continue with the state here"
        )
    return None


def _intact_progress_of(state: Path) -> str | None:
    name = _progress_of(state)
    if name in (None, FINISHED):
        return name
    for path in reversed(checkpoint_files.complete_checkpoints(state)):
        found = checkpoint_files.find_damage(path, contents=checkpoint_files.TENSORS)
        if found is None:
            return path.name
        log.warning("%s is ignored: %s", path, found)
    return None


def _fetch_with_retries(
    store: Store, name: str, state: Path, wait: Callable[[float], object]
) -> None:
    for wait_s in FETCH_WAITS_S:
        try:
            return _fetch(store, name, state)
        except SyncFailed as error:
            # A retry would find it damaged or too large again.
            if isinstance(error, _Damaged) or find_full(error) is not None:
                raise
            log.warning("%s; trying again in %.0f s", error, wait_s)
        wait(wait_s)
    return _fetch(store, name, state)


def _fetch(store: Store, name: str, state: Path) -> None:
    key = f"{key_of(state)}/{name}"
    shown = f"{store.shown}/{key}"
    # Next to its place, and moved there once every file is what was pushed.
    with replacing(state) as partial:
        partial.mkdir()
        store.fetch(f"{key}.json", partial)
        manifest = partial / f"{name}.json"
        try:
            found = read_part(dict[str, str], manifest, "sha256s")
            sha256s = {check_key(file): sha256 for file, sha256 in found.items()}
        except (DataError, SyncFailed) as error:
            raise _Damaged(f"{shown}: its manifest is damaged: {error}") from error
        if not sha256s:
            raise _Damaged(f"{shown}: its manifest lists no files")
        manifest.unlink()
        try:
            store.fetch(key, partial)
        except NotThere as error:
            raise _Damaged(f"{shown}: its files are missing") from error
        for file, sha256 in sha256s.items():
            path = partial / file
            if not path.is_file() or sha256_file(path) != sha256:
                raise _Damaged(f"{shown}: {file} is not what was pushed")
