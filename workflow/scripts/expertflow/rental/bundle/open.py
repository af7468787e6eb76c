"""Open a bundle: check every byte, then lay it out as if it had been made here."""

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from expertflow.core.errors import ConfigError, DataError, HardwareError
from expertflow.core.files import remove, sha256_file, sync, sync_directory
from expertflow.core.records import read_record, write_record
from expertflow.rental.bundle.lock import only_one
from expertflow.rental.bundle.model import find_weights, has_weights, lay_out_weights
from expertflow.rental.bundle.provenance import write_provenance
from expertflow.rental.bundle.records import (
    CARRIED,
    MODEL,
    OPENED,
    PROVENANCE,
    BundleIndex,
    Member,
    Opened,
)
from expertflow.rental.bundle.tar import read_bundle

log = logging.getLogger(__name__)
SPACE_RESERVE = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How to open a bundle, as its ``index`` was read. ``model`` is a folder with weights.

    ``other_code`` are the rules of which this checkout has other code than the bundle was made by.
    """

    bundle: Path
    index: BundleIndex
    directory: Path
    model: Path | None
    other_code: tuple[str, ...]
    accept_other_code: bool
    replace: bool
    settings_here: str | None


def open_bundle(opening: Opening) -> Opened | None:
    """Lay a bundle's expert out in a working directory; null where this was done before.

    Raises:
        ConfigError: other code, or other results, and no word that this is meant; or a run makes
            the expert.
        DataError: the bundle or the base model is not what it should be.
        HardwareError: the disk is too small.
    """
    index = opening.index
    if index.kind != "bundle":
        raise DataError(f"{opening.bundle}: is an outcome; open it with --outcome")
    results = opening.directory / "results" / index.expert
    with only_one(opening.directory, index.expert):
        sweep(results)
        if _is_open(index, results):
            _link_again(opening, results)
            return None
        _refuse_other_code(opening)
        _refuse_results(results, replace=opening.replace)
        return _open(opening, results)


def _open(opening: Opening, results: Path) -> Opened:
    index = opening.index
    with unpacked(opening.bundle, index, results) as (partial, sha256):
        if index.model is not None:
            lay_out_weights(find_weights(index.model, opening.model), partial / MODEL)
        opened = Opened(
            sha256=sha256,
            n_bytes=opening.bundle.stat().st_size,
            index=index,
            settings_here=opening.settings_here,
            other_code=opening.other_code,
        )
        write_record(partial / OPENED, opened)
        time_s = same_time(partial)
        provenance = (partial / PROVENANCE).read_text(encoding="utf-8")
        write_provenance(opening.directory, provenance, expert=index.expert, time_s=time_s)
        _move_in(partial, results)
    return opened


@contextlib.contextmanager
def unpacked(bundle: Path, index: BundleIndex, results: Path) -> Iterator[tuple[Path, str]]:
    """Unpack a bundle beside where it belongs, checked; it is gone after the block unless moved.

    Yields the folder, and the hash of the bundle.
    """
    parent = results.parent
    parent.mkdir(parents=True, exist_ok=True)
    n_bytes = sum(member.n_bytes for member in index.members)
    free = shutil.disk_usage(parent).free
    if free < n_bytes * SPACE_RESERVE:
        raise HardwareError(
            f"{parent}: {free / 1e9:.1f} GB free, {n_bytes / 1e9:.1f} GB needed for {bundle}; free"
            " some, or open it elsewhere with --directory"
        )
    partial = parent / f".{results.name}.{os.getpid()}.partial"
    try:
        sha256 = read_bundle(bundle, index, lambda member: _create(partial / below(index, member)))
        sync(partial)
        yield partial, sha256
    finally:
        remove(partial)


def below(index: BundleIndex, member: Member) -> str:
    """Give a member's name below its expert's results."""
    return member.name.removeprefix(f"results/{index.expert}/")


def same_time(folder: Path) -> float:
    """Give all files below a folder one time, so that none is newer than what is made of it."""
    time_s = float(int(time.time()))
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (time_s, time_s), follow_symlinks=False)
    return time_s


def is_whole(index: BundleIndex, results: Path) -> bool:
    """Tell whether all members lie in ``results`` as they were packed."""
    return all(holds(results / below(index, member), member) for member in index.members)


def holds(path: Path, member: Member) -> bool:
    """Tell whether a file is a member, to the byte."""
    return (
        path.is_file()
        and path.stat().st_size == member.n_bytes
        and sha256_file(path) == member.sha256
    )


def sweep(results: Path) -> None:
    """Remove what killed openings have left, and put back results that one had moved away.

    Who calls it holds the expert, so that none of it belongs to an opening at work.
    """
    name = re.compile(rf"\.{re.escape(results.name)}\.\d+\.partial(\.old)?")
    found = sorted(results.parent.glob(".*")) if results.parent.is_dir() else []
    for left in filter(lambda path: name.fullmatch(path.name), found):
        if left.suffix == ".old" and not results.exists():
            log.warning("%s: an opening was killed; its old results are back", results)
            left.rename(results)
        else:
            remove(left)


def _create(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("xb")


def _is_open(index: BundleIndex, results: Path) -> bool:
    """Tell whether this very bundle was opened here before, and is still as it was."""
    marker = results / OPENED
    return (
        marker.is_file() and read_record(Opened, marker).index == index and is_whole(index, results)
    )


def _link_again(opening: Opening, results: Path) -> None:
    """Look for the weights again if what was linked is gone, or another model by now."""
    model = opening.index.model
    if model is not None and not has_weights(results / MODEL, model):
        lay_out_weights(find_weights(model, opening.model), results / MODEL)
        log.info("%s: the weights are linked again", results / MODEL)


def _refuse_other_code(opening: Opening) -> None:
    if opening.other_code and not opening.accept_other_code:
        raise ConfigError(
            f"{opening.bundle}: made by other code than this checkout's:"
            f" {', '.join(opening.other_code)}; check out the code it was made by, or"
            " let these rules run again with --accept-other-code"
        )


def _refuse_results(results: Path, *, replace: bool) -> None:
    if results.exists() and not replace:
        what = "an opened bundle, changed since or another one"
        if not (results / CARRIED).exists():
            what = "results of its own"
        raise ConfigError(
            f"{results}: holds {what}; move it away, use --directory, or drop it with --replace"
        )


def _move_in(partial: Path, results: Path) -> None:
    """Put the new results in the place of the old ones, if any, which go last."""
    old = results.with_name(f"{partial.name}.old")
    if results.exists():
        results.rename(old)
    partial.rename(results)
    sync_directory(results.parent)
    remove(old)
