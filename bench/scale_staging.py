"""Many processes that stage at once on one disk, through the code that training calls.

One key: of all processes one copies, the others wait and find the copy. Many keys under a quota
that holds a share of them: copies that nobody reads give way, one that is held never does. Source
and store are on one disk, and bytes are not shared, as if they were on two.
"""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scale_apart import FORK, Failed

from expertflow.core.files import remove, sha256_file
from expertflow.stage import make
from expertflow.stage.content import Content, read_content, rows_key
from expertflow.stage.copy import hash_files
from expertflow.stage.make import ensure_staged
from expertflow.stage.store import MARKER, NotStaged, Store, open_store

SPLITS = ("train", "held_out")
N_TRIES, PAUSE_S = 400, 0.05
Row = dict[str, Any]


def made_rows(folder: Path, n_bytes: int) -> Content:
    """Write two splits of random bytes, most of them in the first."""
    hashes = []
    for split, n in zip(SPLITS, (n_bytes, 64), strict=True):
        path = folder / split / "data-00000-of-00001.arrow"
        path.parent.mkdir(parents=True)
        path.write_bytes(os.urandom(n))
        hashes.append(sha256_file(path))
    return read_content("rows", folder, rows_key(*hashes))


def one_key(folder: Path, *, n_processes: int, n_bytes: int) -> Row:
    """Let all processes ask for one copy at the same moment.

    Raises:
        Failed: not exactly one copied, or a process did not get the copy.
    """
    content = made_rows(folder / "source", n_bytes)
    store = _store(folder / "scratch", None)
    found = _all_at_once([partial(_take, content, store)] * n_processes)
    origins = Counter(one["origin"] for one in found)
    if origins != Counter(copied=1, reused=n_processes - 1):
        raise Failed(f"one key, {n_processes} processes: {dict(origins)}; exactly one may copy")
    waits = [one["waited_s"] for one in found if one["origin"] == "reused"]
    return {
        "n_processes": n_processes, "n_bytes": n_bytes, "n_copies": origins["copied"],
        "copy_s": next(one["waited_s"] for one in found if one["origin"] == "copied"),
        "waited_s_median": statistics.median(waits), "waited_s_max": max(waits),
    }  # fmt: skip


def many_keys(folder: Path, *, n_processes: int, n_bytes: int, n_fit: int) -> Row:
    """Let each process ask for a copy of its own where only ``n_fit`` of them fit.

    Each holds its copy for a moment and looks at it again before it lets go; one that is refused
    because all copies are held asks again.

    Raises:
        Failed: a held copy was changed or removed, the quota was passed, or a process got none.
    """
    contents = [made_rows(folder / f"source-{i}", n_bytes) for i in range(n_processes)]
    quota = n_fit * (n_bytes + 4096)
    store = _store(folder / "scratch", quota / (1 << 30))
    found = _all_at_once([partial(_take_and_hold, content, store) for content in contents])
    n_lost = sum(not one["is_whole"] for one in found)
    kept = sum(_kept_bytes(store, content.key) for content in contents)
    most = max(one["kept_bytes"] for one in found)
    if n_lost or max(kept, most) > quota:
        raise Failed(
            f"{n_processes} keys: {n_lost} held copies lost, {max(kept, most)} bytes kept under a"
            f" quota of {quota}"
        )
    left = sum((store.root / content.key).exists() for content in contents)
    waits = [one["waited_s"] for one in found]
    return {
        "n_processes": n_processes, "n_bytes": n_bytes, "n_fit": n_fit, "n_held_copies_lost": 0,
        "n_refused": sum(one["n_refused"] for one in found), "n_evicted": n_processes - left,
        "kept_bytes_max": most, "quota_bytes": quota,
        "waited_s_median": statistics.median(waits), "waited_s_max": max(waits),
    }  # fmt: skip


def _store(folder: Path, quota_gib: float | None) -> Store:
    folder.mkdir()
    return open_store(folder, quota_gib)


def _take(content: Content, store: Store) -> Row:
    start = time.perf_counter()
    held = ensure_staged(content, store)
    waited_s = time.perf_counter() - start
    _check(content, held.folder)
    held.hold.close()
    return {"origin": held.origin, "waited_s": waited_s}


def _take_and_hold(content: Content, store: Store) -> Row:
    start, n_refused = time.perf_counter(), 0
    for _ in range(N_TRIES):
        try:
            held = ensure_staged(content, store)
            break
        except NotStaged:
            n_refused += 1
            time.sleep(PAUSE_S)
    else:
        raise Failed(f"{content.key}: refused {N_TRIES} times")
    waited_s = time.perf_counter() - start
    with store._counting():
        kept_bytes = sum(_kept_bytes(store, path.name) for path in store.root.glob("[!.]*"))
    time.sleep(2 * PAUSE_S)
    is_whole = _is_whole(content, held.folder)
    held.hold.close()
    return {"waited_s": waited_s, "n_refused": n_refused, "is_whole": is_whole,
            "kept_bytes": kept_bytes}  # fmt: skip


def _kept_bytes(store: Store, key: str) -> int:
    """Count the bytes of a copy with a marker; others may remove it meanwhile."""
    marker = store.find(key) if (store.root / key / MARKER).exists() else None
    return 0 if marker is None else marker.n_bytes


def _check(content: Content, folder: Path) -> None:
    if not _is_whole(content, folder):
        raise Failed(f"{folder}: not what was staged")


def _is_whole(content: Content, folder: Path) -> bool:
    names = list(content.sizes)
    try:
        return hash_files(folder, names) == hash_files(content.source, names)
    except OSError:
        return False


def _all_at_once(jobs: list[Callable[[], Row]]) -> list[Row]:
    """Run each job in a process of its own, all from one moment on; give what they say.

    Raises:
        Failed: one of them ended with an error.
    """
    go, answers = FORK.Event(), FORK.SimpleQueue()

    def run(job: Callable[[], Row]) -> None:
        # On one disk bytes would be shared: this is about copying.
        make.can_share = lambda *_: False
        go.wait()
        answers.put(job())

    processes = [FORK.Process(target=run, args=(job,)) for job in jobs]
    for process in processes:
        process.start()
    go.set()
    found = []
    # Read while they run, as a pipe that is full would stop them.
    while len(found) < len(processes):
        if not answers.empty():
            found.append(answers.get())
        elif any(process.exitcode for process in processes):
            break
        else:
            time.sleep(0.01)
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise Failed(f"{sum(map(bool, codes))} of {len(codes)} processes failed; see above")
    return found


def contention(folder: Path, *, n_processes: int, n_bytes: int) -> dict[str, Row]:
    """Try both, in folders that are removed."""
    rows = {}
    for name, work in {
        "one_key": partial(one_key, n_bytes=n_bytes),
        "many_keys": partial(many_keys, n_bytes=n_bytes // 16, n_fit=max(2, n_processes // 4)),
    }.items():
        place = folder / name
        place.mkdir(parents=True)
        try:
            rows[name] = work(place, n_processes=n_processes)
        finally:
            remove(place)
        print(name, rows[name])
    return rows
