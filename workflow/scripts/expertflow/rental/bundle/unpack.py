"""Open a bundle or an outcome: check every byte, then lay it out as if it had been made here."""

import contextlib
import logging
import os
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from expertflow.core.disk import check_space
from expertflow.core.errors import ConfigError, DataError, HardwareError, TrainingError
from expertflow.core.files import hold_partial, remove, sha256_file, sync, sync_directory
from expertflow.core.locks import EXPERT_LOCKS, read_holder, sign_lock, try_lock
from expertflow.core.records import read_record, write_record
from expertflow.core.sidecars import TIMESTAMP
from expertflow.rental.bundle import records
from expertflow.rental.bundle.records import BundleIndex, Member, OpenedBundle
from expertflow.rental.bundle.tar import read_bundle
from expertflow.train.records import ModelRecord

log = logging.getLogger(__name__)
SPACE_RESERVE = 1.02
METADATA = Path(".snakemake", "metadata")
# An outcome with other rows or another plan does not belong to these results.
DECISIVE = ("packing.json", "plan.json")
# What every machine writes itself: logs, the sidecars of locks, which contain times, and which
# references it can judge.
OWN_PLACES = ("logs/", ".sources.lock.json.", "sources/locked/.", "references.", ".references.")


def open_bundle(
    bundle: Path,
    opened: OpenedBundle,
    directory: Path,
    *,
    model: Path | None = None,
    may_replace: bool = False,
) -> bool:
    """Lay a bundle's expert out in a working directory; return false if it was open already.

    ``model`` is a folder with weights. Raise ConfigError if other results may not be dropped, a run
    is making the expert, or its maker's own code may not run; DataError if bundle or model are not
    as recorded; HardwareError if the disk is too small or not writable.
    """
    index = opened.index
    if index.kind != "bundle":
        raise DataError(f"{bundle}: is an outcome; open it with --outcome")
    results = directory / "results" / index.expert
    if (own_code := index.spec and index.spec.own_code) is not None:
        what = f"{bundle}: carries its maker's own code, {own_code}"
        if not opened.allow_own_code:
            raise ConfigError(
                f"{what}, which evaluation runs with your rights; read it, then --allow-own-code"
            )
        log.warning("%s, which evaluation runs with your rights", what)
    with _hold_expert(directory, index.expert):
        if (
            (results / records.OPENED).is_file()
            and (before := read_record(OpenedBundle, results / records.OPENED)).index == index
            and before.allow_own_code == opened.allow_own_code
            and before.allow_judge == opened.allow_judge
            and all(_is_same(directory / m.name, m) for m in index.members)
        ):
            _complete_model(index, results, model)
            return False
        # After the check of equality: opening the same bundle twice is not an error.
        if results.exists():
            _check_replaced(results, may_replace=may_replace)
        with _unpack(bundle, index, results) as partial:
            _complete_model(index, partial, model)
            # From here on the bundle's settings apply; nobody sees it before the rename.
            write_record(partial / records.OPENED, opened)
            _prepare_for_snakemake(partial, directory, index)
            remove(results)
            partial.rename(results)
            sync_directory(results.parent)
    return True


def _check_replaced(results: Path, *, may_replace: bool) -> None:
    what, is_bundle = "results", (results / records.CARRIED).exists()
    if is_bundle:
        what = "an opened bundle, changed since or another one"
    if is_finished := is_bundle and (results / "report.json").is_file():
        what = f"a finished run, which make_outcome.py {results.name} --output FILE takes home"
    if not may_replace:
        raise ConfigError(
            f"{results}: contains {what}; move it, use --directory, or drop it with --replace"
        )
    if is_finished:
        fix = "to get it back, open its bundle and run again: its training stays in state/"
        log.warning("%s: dropping %s; %s", results, what, fix)


def land_outcome(
    outcome: Path, index: BundleIndex, directory: Path, *, may_replace: bool = False
) -> None:
    """Lay out an outcome, the report last; raise the errors of ``open_bundle``."""
    if index.kind != "outcome":
        raise DataError(f"{outcome}: is a {index.kind}; open it without --outcome")
    results = directory / "results" / index.expert
    with _hold_expert(directory, index.expert):
        if not may_replace:
            _refuse_others(index, directory)
        with _unpack(outcome, index, results) as partial:
            _prepare_for_snakemake(partial, directory, index)
            remove(partial / records.CARRIED)
            _move_in(index, partial, results)
    if (results / "ablation.json").is_file():
        log.info(
            "%s: its report shows an ablation; keep ablate=true in the configuration here, with the"
            " same ablation settings, or the report is rebuilt without it",
            index.expert,
        )


@contextlib.contextmanager
def _hold_expert(directory: Path, expert: str) -> Iterator[None]:
    """Lock an expert against runs and other openings; a failed block leaves nothing behind."""
    path = directory / EXPERT_LOCKS / f"{expert}.lock"
    # A rejected bundle leaves no .snakemake behind in an empty folder.
    with _undone_on_failure(path), path.open("a+", encoding="utf-8") as stream:
        is_held, known = try_lock(stream) == "held", read_holder(stream)
        if is_held:
            who = f", process {known['pid']} on {known['host']}" if known else ""
            raise ConfigError(
                f"{directory / 'results' / expert}: is being made by another run{who}; wait for"
                " it, or stop it"
            )
        # Keep the last run's entry for the next one.
        sign_lock(stream, **known)
        yield


@contextlib.contextmanager
def _unpack(bundle: Path, index: BundleIndex, results: Path) -> Iterator[Path]:
    """Unpack a bundle next to its place, with the expert locked; only what is moved stays."""
    parent, prefix = results.parent, f"results/{index.expert}/"
    with _undone_on_failure(results):
        needed = SPACE_RESERVE * sum(member.n_bytes for member in index.members)
        fix = "free some, or open it elsewhere with --directory"
        check_space([(parent, needed, str(bundle))], fix=fix)
        try:
            with hold_partial(results) as (partial, _):

                def create(member: Member) -> BinaryIO:
                    path = partial / member.name.removeprefix(prefix)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    return path.open("xb")

                read_bundle(bundle, index, create)
                sync(partial)
                yield partial
        except OSError as error:
            raise HardwareError(
                f"{error.filename or parent}: cannot be written ({error.strerror}); open the"
                " bundle elsewhere with --directory"
            ) from error


def _prepare_for_snakemake(partial: Path, directory: Path, index: BundleIndex) -> None:
    """Set one timestamp on all unpacked files, and drop what Snakemake knows of earlier ones.

    The bundled sidecars record what they were made from.
    """
    # With one timestamp, no file is older than its inputs.
    time_s = float(int(time.time()))
    for path in [*partial.rglob("*"), partial]:
        os.utime(path, (time_s, time_s), follow_symlinks=False)
    # Metadata of unchanged files is correct, and is kept.
    came = {member.name for member in index.members}.difference(index.brought)
    came |= {str(parent) for name in came for parent in Path(name).parents}
    metadata = directory / METADATA
    for path in [path for path in metadata.rglob("*") if path.is_file()]:
        # Snakemake splits a long name into folders that begin with @.
        name = "".join(part.removeprefix("@") for part in path.relative_to(metadata).parts)
        with contextlib.suppress(ValueError):
            if urlsafe_b64decode(name).decode() in came:
                path.unlink()


def _is_same(path: Path, member: Member) -> bool:
    has_size = path.is_file() and path.stat().st_size == member.n_bytes
    return has_size and sha256_file(path) == member.sha256


def _complete_model(index: BundleIndex, results: Path, given: Path | None) -> None:
    folder = f"results/{index.expert}/base_model/"
    names = [member.name for member in index.members if member.name.startswith(folder)]
    if not any(name.endswith(".safetensors") for name in names):
        model = read_record(ModelRecord, results / "model.json")
        link_weights(model, given, results / "base_model")


@contextlib.contextmanager
def _undone_on_failure(path: Path) -> Iterator[None]:
    """Make the folders above a path; if the block fails, remove what did not exist before."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for place in missing:
            with contextlib.suppress(OSError):
                place.rmdir() if place.is_dir() else place.unlink()
        raise


def _refuse_others(index: BundleIndex, directory: Path) -> None:
    for member in index.members:
        path, name = directory / member.name, member.name.split("/", 2)[2]
        is_free = name.startswith((*OWN_PLACES, records.CARRIED)) or name.endswith(TIMESTAMP)
        is_kept = member.name in index.brought and name not in DECISIVE
        if not (is_free or is_kept or not path.exists() or _is_same(path, member)):
            raise ConfigError(
                f"{path}: is not from this outcome; move it away, use --directory, or drop it with"
                " --replace"
            )


def _move_in(index: BundleIndex, partial: Path, results: Path) -> None:
    for folder in records.FOLDERS:
        if (partial / folder).is_dir():
            remove(results / folder)
    files = [path for path in partial.rglob("*") if path.is_file()]
    # False sorts first: the report comes last, because it shows that all is complete.
    for path in sorted(files, key=lambda file: file.name == "report.json"):
        name = path.relative_to(partial).as_posix()
        target = results / name
        if not (f"results/{index.expert}/{name}" in index.brought and target.exists()):
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    sync_directory(results)


def link_weights(model: ModelRecord, given: Path | None, folder: Path) -> None:
    """Link weights from ``given``, the manifest's folder or the hub into ``folder``.

    Raise DataError if they differ or the hub is unreachable, TrainingError if there are none.
    """
    # Imported here, because that takes longer than opening most bundles.
    from expertflow.tokens.tokenizer import download_files
    from expertflow.train.model.base import WANTED_FILES, hash_weights, weight_files

    there = weight_files(folder)
    if there and all(map(Path.is_file, there)) and hash_weights(folder) == model.weights_sha256:
        return
    source = given or Path(model.name).expanduser()
    if given is None and model.kind == "hub":
        fix = "pass a folder with --model, or pack it with bundle_weights=true"
        source = download_files(model.name, model.revision, WANTED_FILES, fix=fix)
    elif given is None and not source.is_dir():
        raise TrainingError(
            f"model {model.name}: no such folder on this machine; copy it here and pass it with"
            " --model, or pack it with bundle_weights=true"
        )
    files = weight_files(source)
    if not files:
        raise TrainingError(f"{source}: no *.safetensors; pass the model's folder with --model")
    log.info("hashing the weights of %s in %s", model.name, source)
    if (found := hash_weights(source)) != model.weights_sha256:
        raise DataError(
            f"{source}: its weights are not the bundle's (weights_sha256 {found[:12]}…, expected"
            f" {model.weights_sha256[:12]}…); pass the folder of {model.name}"
            f" {model.revision or ''} with --model"
        )
    # Links from an earlier opening, to missing or other weights.
    for old in there:
        old.unlink()
    for file in files:
        (folder / file.name).symlink_to(file.resolve())
