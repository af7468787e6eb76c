"""Hugging Face data sets: pinned to a commit, read from the library's own cache.

Looking at the cache costs no network. ``datasets`` downloads what is missing and keeps it as Arrow
files, which the shards read by row range.
"""

import os
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.data.records import DataFile, SourceSpec

DEFAULT_SHARDS = 4


def cached_revision(repository: str, revision: str | None) -> str | None:
    """Find the commit that a branch or tag had when the cache last saw it; null when unknown."""
    wanted = revision or "main"
    if len(wanted) == 40 and all(c in "0123456789abcdef" for c in wanted):
        return wanted
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub")).expanduser()
    ref = cache / f"datasets--{repository.replace('/', '--')}" / "refs" / wanted
    return ref.read_text(encoding="utf-8").strip() if ref.is_file() else None


def fetch(source: SourceSpec) -> tuple[str | None, list[DataFile]]:
    """Load a data set through the library's cache; give its commit and its Arrow files.

    Raises:
        DataError: the hub cannot be reached, or the data set, revision, config or split is unknown.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    identifier = str(source.id)
    revision = cached_revision(identifier, source.revision)
    try:
        if revision is None:
            # Resolves a branch to its commit and leaves that in the cache, for the next time
            # without a network; the card is the one file it costs.
            folder = huggingface_hub.snapshot_download(
                identifier,
                repo_type="dataset",
                revision=source.revision,
                allow_patterns=["README.md"],
            )
            revision = Path(folder).name
        data = datasets.load_dataset(
            identifier,
            source.config,
            data_dir=source.options.get("data_dir"),
            split=source.split or "train",
            revision=revision,
        )
    except (OSError, ValueError, HfHubHTTPError, OfflineModeIsEnabled) as error:
        raise DataError(
            f"source {source.name}: cannot load data set {identifier} ({type(error).__name__}:"
            f" {error}); check id, split and network, or download it once where there is one"
        ) from error
    return revision, [_cached_file(Path(file["filename"])) for file in data.cache_files]


def _cached_file(path: Path) -> DataFile:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        n_records = sum(batch.num_rows for batch in pa.ipc.open_stream(source))
    return DataFile(
        path=str(path),
        format="arrow",
        n_bytes=path.stat().st_size,
        n_records=n_records,
        sha256=sha256_file(path),
    )
