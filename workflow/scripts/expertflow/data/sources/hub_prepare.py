"""Make Arrow files of a data set's downloaded files, by the library's own rules.

Which files belong to which split follows from the card or from their names. The library works that
out on a folder, so it is shown one that has every file of the commit by name: a link to those that
are here, an empty one in place of each that is not. That needs no network, and only what is chosen
is downloaded.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from expertflow.core.errors import DataError
from expertflow.data import cache
from expertflow.data.settings import SourceSpec
from expertflow.data.sources.hub_download import Snapshot, download

log = logging.getLogger(__name__)
BUILDERS = ("arrow", "csv", "json", "parquet", "text")


def prepare(source: SourceSpec, snapshot: Snapshot) -> cache.Prepared:
    """Download what is missing of the wanted config and write all its splits as Arrow files.

    Raises:
        DataError: the config or split is unknown, or the files are of a kind that is not read.
    """
    from filelock import FileLock

    root = cache.prepared_root(str(source.id))
    root.parent.mkdir(parents=True, exist_ok=True)
    # Another expert's job may want the same data set at the same time.
    with FileLock(f"{root}.lock"):
        with _every_file(snapshot) as folder:
            builder = _builder(source, snapshot, folder)
            wanted = _chosen_files(source, builder, folder)
        output = _place(source, snapshot, builder)
        prepared = _already_there(output)
        if prepared is not None:
            return prepared
        if snapshot.missing(wanted):
            download(source, snapshot, wanted)
        with _every_file(snapshot) as folder:
            _write_arrow(_builder(source, snapshot, folder), output)
    return cache.read_prepared(output)


def _place(source: SourceSpec, snapshot: Snapshot, builder: Any) -> Path:
    config = cache.config_folder(source, builder.config.name)
    root = cache.prepared_root(str(source.id))
    return root / config / str(builder.config.version) / snapshot.commit


def _already_there(output: Path) -> cache.Prepared | None:
    """Give what lies in the folder, if it is whole."""
    try:
        return cache.read_prepared(output)
    except DataError:
        return None


def _write_arrow(builder: Any, output: Path) -> None:
    from datasets import DownloadConfig

    log.info("%s: preparing config %s", builder.dataset_name, builder.config.name)
    builder.download_and_prepare(
        str(output),
        download_mode="reuse_cache_if_exists",
        download_config=DownloadConfig(
            cache_dir=cache.prepared_cache() / "downloads", delete_extracted=True
        ),
    )
    n_records = sum(split.num_examples for split in builder.info.splits.values())
    log.info("%s: prepared, %d records", builder.dataset_name, n_records)


@contextmanager
def _every_file(snapshot: Snapshot) -> Iterator[Path]:
    """Lay out a commit's files by name in a folder of the data set's name."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve() / snapshot.repository.split("/")[-1]
        folder.mkdir()
        for path in snapshot.n_bytes_by_path:
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            real = snapshot.folder / path
            if real.exists():
                place.symlink_to(real.resolve())
            else:
                place.touch()
        yield folder


def _builder(source: SourceSpec, snapshot: Snapshot, folder: Path) -> Any:
    import datasets
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError

    if (folder / f"{folder.name}.py").exists():
        raise DataError(
            f"source {source.name}: {source.id} is made by a script of its own, which is never"
            " run; try revision refs/convert/parquet, where the hub keeps some of these as Parquet"
        )
    try:
        builder = datasets.load_dataset_builder(
            str(folder),
            source.config,
            data_dir=source.options.get("data_dir"),
            data_files=source.options.get("data_files"),
            cache_dir=str(folder.parent / "cache"),
        )
    except (EmptyDatasetError, DataFilesNotFoundError, FileNotFoundError) as error:
        raise DataError(_no_files(source, snapshot)) from error
    except BadZipFile as error:
        raise DataError(
            f"source {source.name}: {source.id} holds zip archives, which are not read; unpack it"
            " and use kind local"
        ) from error
    except ValueError as error:
        raise _unknown_config(source, folder, error) from error
    if builder.name not in BUILDERS:
        raise DataError(
            f"source {source.name}: {source.id} holds {builder.name} files; only"
            f" {', '.join(BUILDERS)} are read"
        )
    return builder


def _unknown_config(source: SourceSpec, folder: Path, error: ValueError) -> Exception:
    """Name the configs there are, if the config was what is wrong."""
    import datasets

    known = sorted(datasets.get_dataset_config_names(str(folder)))
    if source.config is not None and source.config not in known:
        fault = f"has no config {source.config!r}; use one of {', '.join(known)}"
    elif source.config is None and len(known) > 1:
        fault = f"has several configs; set config to one of {', '.join(known)}"
    else:
        return error
    return DataError(f"source {source.name}: {source.id} {fault}")


def _chosen_files(source: SourceSpec, builder: Any, folder: Path) -> list[str]:
    """List the files of a config, by their paths in the data set.

    A card could name any file of this machine, or any address: that is refused.
    """
    by_split = {str(split): list(files) for split, files in builder.config.data_files.items()}
    check_split(source, list(by_split))
    files = sorted({str(file) for files in by_split.values() for file in files})
    outside = [f for f in files if not os.path.normpath(f).startswith(f"{folder}{os.sep}")]
    if outside:
        raise DataError(
            f"source {source.name}: {source.id} names a file outside of itself"
            f" ({Path(outside[0]).name}); it is not read"
        )
    return [Path(os.path.normpath(file)).relative_to(folder).as_posix() for file in files]


def check_split(source: SourceSpec, known: list[str]) -> None:
    """Refuse a split that the data set does not have."""
    split = source.split or "train"
    if split not in known:
        raise DataError(
            f"source {source.name}: {source.id} has no split {split!r}; use one of"
            f" {', '.join(sorted(known))}"
        )


def _no_files(source: SourceSpec, snapshot: Snapshot) -> str:
    chosen = [
        f"{key} {source.options[key]!r}" for key in cache.READ_OPTIONS if key in source.options
    ]
    where = f" under {' and '.join(chosen)}" if chosen else ""
    what = f"holds no {'/'.join(BUILDERS)} files{where}"
    if not snapshot.is_listed:
        what = f"{what} in {snapshot.folder}, and the hub cannot be reached"
        return f"source {source.name}: {source.id} {what}; run once with a network"
    fix = f"correct {chosen[0].split()[0]}" if chosen else "use another data set"
    return f"source {source.name}: {source.id} {what}; {fix}"
