"""Bring back training states that are further elsewhere than here."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import replacing
from expertflow.core.locks import try_lock
from expertflow.core.records import read_record
from expertflow.rental.sync.push import (
    FINISHED,
    LOCK,
    PushRecord,
    is_further,
    name_of,
    place_of,
    rank,
    record_of,
)
from expertflow.rental.sync.store import NotThere, Store, SyncFailed, check_key
from expertflow.train.saved import checkpoint_files

log = logging.getLogger(__name__)
N_TRIES, FIRST_WAIT_S = 4, 5.0


class _Damaged(SyncFailed):
    """A push is not what its manifest says."""


def pull_states(
    root: Path, store: Store, *, wait: Callable[[float], object] = time.sleep
) -> list[str]:
    """Bring back what is further elsewhere than here; say of each state what was done.

    A damaged push gives way to the one before it, and is not taken for a push any more.

    Raises:
        SyncFailed: the store cannot be read, or has nothing but damaged pushes of a state.
    """
    said = []
    for expert in _visible(store.names("state")):
        for fingerprint in _visible(store.names(f"state/{expert}")):
            words = _pull(store, root / expert / fingerprint, wait)
            said += [f"{expert}/{fingerprint}: {words}"] if words else []
    return said


def _visible(names: list[str]) -> list[str]:
    return [check_key(name) for name in names if not name.startswith(".")]


def _pull(store: Store, state: Path, wait: Callable[[float], object]) -> str | None:
    place = place_of(state)
    pushed = [n.removesuffix(".json") for n in store.names(place) if n.endswith(".json")]
    here = _sound_name_of(state) if pushed else None
    further = [name for name in sorted(pushed, key=rank, reverse=True) if is_further(name, here)]
    damaged = []
    for name in further:
        if _is_locked(state):
            return f"{name} is there, and a trainer is at work here: left alone"
        try:
            _fetch_stubbornly(store, check_key(name), state, wait)
        except _Damaged as error:
            log.warning("%s", error)
            damaged.append(name)
            continue
        # Trusted, it would keep this run from pushing the same step again.
        for bad in damaged:
            store.drop(f"{place}/{bad}.json")
            store.drop(f"{place}/{bad}")
        dropped = f"; {', '.join(damaged)} is damaged and dropped" if damaged else ""
        return f"{name} pulled, sha256 of every file equal{dropped}"
    if further:
        raise SyncFailed(
            f"{store.shown}/{place}: {', '.join(further)} is there and damaged, and nothing else is"
            " further than here; give --no-pull to go on with what is here"
        )
    return None


def _sound_name_of(state: Path) -> str | None:
    """Name how far a state is, by the newest checkpoint that holds what was written."""
    name = name_of(state)
    if name in (None, FINISHED):
        return name
    for path in reversed(checkpoint_files.complete(state)):
        found = checkpoint_files.damage(path, contents=True)
        if found is None:
            return path.name
        log.warning("%s does not count: %s", path, found)
    return None


def _fetch_stubbornly(
    store: Store, name: str, state: Path, wait: Callable[[float], object]
) -> None:
    """Fetch a push; a line that breaks is no reason to train again what is there."""
    wait_s = FIRST_WAIT_S
    for _ in range(N_TRIES - 1):
        try:
            return _fetch(store, name, state)
        except _Damaged:
            raise
        except SyncFailed as error:
            log.warning("%s; trying again in %.0f s", error, wait_s)
        wait(wait_s)
        wait_s *= 2
    return _fetch(store, name, state)


def _fetch(store: Store, name: str, state: Path) -> None:
    key = f"{place_of(state)}/{name}"
    shown = f"{store.shown}/{key}"
    with replacing(state) as partial:
        partial.mkdir()
        store.fetch(f"{key}.json", partial)
        manifest = partial / f"{name}.json"
        try:
            record = read_record(PushRecord, manifest)
            files = {check_key(file): wanted for file, wanted in record.files.items()}
        except (DataError, SyncFailed) as error:
            raise _Damaged(f"{shown}: its manifest is damaged: {error}") from error
        manifest.unlink()
        try:
            store.fetch(key, partial)
        except NotThere as error:
            raise _Damaged(f"{shown}: its files are gone") from error
        for file, wanted in files.items():
            path = partial / file
            if not path.is_file() or record_of(path) != wanted:
                raise _Damaged(f"{shown}: {file} is not what was pushed")
        if not files:
            raise _Damaged(f"{shown}: its manifest names no file")


def _is_locked(state: Path) -> bool:
    """Tell whether a trainer is at work on a state."""
    if not (state / LOCK).is_file():
        return False
    with (state / LOCK).open("a") as stream:
        return try_lock(stream) == "held"
