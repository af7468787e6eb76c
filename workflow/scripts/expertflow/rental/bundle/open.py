"""Open a bundle: check every byte, then lay it out as if it had been made here."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from expertflow.core.errors import ConfigError, DataError, HardwareError
from expertflow.core.files import remove, sha256_file, sync, sync_directory
from expertflow.core.locks import EXPERT_LOCKS, holder, sign, try_lock
from expertflow.core.records import read_record, write_record
from expertflow.rental.bundle.model import link_weights
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
from expertflow.train.records import ModelRecord

SPACE_RESERVE = 1.02


def open_bundle(
    bundle: Path,
    index: BundleIndex,
    directory: Path,
    *,
    model: Path | None = None,
    may_replace: bool = False,
    settings_here: str | None = None,
    other_code: tuple[str, ...] = (),
) -> bool:
    """Lay a bundle's expert out in a working directory; return false where it was open already.

    ``index`` was read from the bundle, ``model`` is a folder with weights; the last two become part
    of the record ``Opened``.

    Raises:
        ConfigError: other results are there and may not be dropped, or a run makes the expert.
        DataError: the bundle or the base model is not what it should be.
        HardwareError: the disk is too small, or cannot be written to.
    """
    if index.kind != "bundle":
        raise DataError(f"{bundle}: is an outcome; open it with --outcome")
    results = directory / "results" / index.expert
    with hold_expert(directory, index.expert):
        if _is_open(index, results):
            _complete_model(index, results, model)
            return False
        if results.exists() and not may_replace:
            is_bundle = (results / CARRIED).exists()
            what = "an opened bundle, changed since or another one" if is_bundle else "results"
            raise ConfigError(
                f"{results}: holds {what}; move it away, use --directory, or drop it with --replace"
            )
        with unpack(bundle, index, results) as partial:
            _complete_model(index, partial, model)
            opened = Opened(index=index, settings_here=settings_here, other_code=other_code)
            write_record(partial / OPENED, opened)
            adopt_provenance(partial, directory, index)
            remove(results)
            partial.rename(results)
            sync_directory(results.parent)
    return True


@contextlib.contextmanager
def hold_expert(directory: Path, expert: str) -> Iterator[None]:
    """Keep runs and other openings off an expert; nothing is left of a block that fails.

    Raises:
        ConfigError: a run makes it, or another opening is at work.
    """
    path = directory / EXPERT_LOCKS / f"{expert}.lock"
    is_new = not path.exists()
    with _new_folder(path.parent):
        with path.open("a+", encoding="utf-8") as stream:
            held = try_lock(stream) == "held"
            known = holder(stream)
            if held:
                who = f", process {known['pid']} on {known['host']}" if known else ""
                raise ConfigError(
                    f"{directory / 'results' / expert}: is being made by another run{who}; wait for"
                    " it, or stop it"
                )
            # The rest of what a run has written there is for the next run.
            sign(stream, **known)
            try:
                yield
            except BaseException:
                if is_new:
                    remove(path)
                raise


@contextlib.contextmanager
def unpack(bundle: Path, index: BundleIndex, results: Path) -> Iterator[Path]:
    """Unpack a bundle beside its place, checked; the folder is gone after the block unless moved.

    Only who holds the expert may call this, so that earlier attempts' folders can go.

    Raises:
        HardwareError: the disk is too small, or cannot be written to.
    """
    parent, prefix = results.parent, f"results/{index.expert}/"
    with _new_folder(parent):
        for left in parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(results.name)}\.\d+\.partial", left.name):
                remove(left)
        n_bytes, free = sum(m.n_bytes for m in index.members), shutil.disk_usage(parent).free
        if free < n_bytes * SPACE_RESERVE:
            raise HardwareError(
                f"{parent}: {free / 1e9:.1f} GB free, {n_bytes / 1e9:.1f} GB needed for {bundle};"
                " free some, or open it elsewhere with --directory"
            )
        partial = parent / f".{results.name}.{os.getpid()}.partial"

        def create(member: Member) -> BinaryIO:
            path = partial / member.name.removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("xb")

        try:
            try:
                read_bundle(bundle, index, create)
                sync(partial)
            except OSError as error:
                raise HardwareError(
                    f"{error.filename or parent}: cannot be written ({error.strerror}); open the"
                    " bundle elsewhere with --directory"
                ) from error
            yield partial
        finally:
            remove(partial)


def adopt_provenance(partial: Path, directory: Path, index: BundleIndex) -> None:
    """Give all files of an unpacked bundle one time, and tell Snakemake how they were made."""
    # None is newer than what was made from it.
    time_s = float(int(time.time()))
    for path in [*partial.rglob("*"), partial]:
        os.utime(path, (time_s, time_s), follow_symlinks=False)
    if not (path := partial / PROVENANCE).is_file():
        raise DataError(f"{PROVENANCE}: is missing in the bundle; make the bundle again")
    write_provenance(directory, path.read_bytes(), expert=index.expert, time_s=time_s)


def is_same(path: Path, n_bytes: int, sha256: str) -> bool:
    """Return whether a file has this size and hash."""
    return path.is_file() and path.stat().st_size == n_bytes and sha256_file(path) == sha256


def _is_open(index: BundleIndex, results: Path) -> bool:
    """Return whether this very bundle was opened here before, and is still as it was."""
    marker, place = results / OPENED, results.parents[1]
    return (
        marker.is_file()
        and read_record(Opened, marker).index == index
        and all(is_same(place / m.name, m.n_bytes, m.sha256) for m in index.members)
    )


def _complete_model(index: BundleIndex, results: Path, given: Path | None) -> None:
    """Link the weights of a base model that came without them."""
    folder = f"results/{index.expert}/{MODEL}/"
    names = [member.name for member in index.members if member.name.startswith(folder)]
    if not any(name.endswith(".safetensors") for name in names):
        link_weights(read_record(ModelRecord, results / "model.json"), given, results / MODEL)


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make a folder and those above it; those that were made are gone again if the block fails."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for place in missing:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise
