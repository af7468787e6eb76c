"""Find a base model on disk, and ask the hub about one that is not downloaded yet."""

import functools
from pathlib import Path

from expertflow.data import cache

TIMEOUT_S = 3.0


def find_folder(name: str, revision: str | None) -> Path:
    """Return a model's local folder or the one in the hub's cache, which may lack files."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    # If nothing was downloaded yet, this folder does not exist.
    commit = cache.find_revision(name, revision, "models")
    return cache.snapshot_folder(name, commit or "main", "models")


@functools.cache
def look_up_downloads(name: str, revision: str | None) -> dict[str, int] | None:
    """Return the bytes by path of the files missing from the cache; downloads the config.json.

    Null if the hub is out of reach, turned off, or does not show the model.
    """
    # Imported here: it takes half a second, for a single lookup.
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    from expertflow.train.model.base import WANTED_FILES

    disable_progress_bars()
    try:
        # Asked first, so that an unresponsive hub times out once, not for each file.
        HfApi().model_info(name, revision=revision, timeout=TIMEOUT_S)
        hf_hub_download(name, "config.json", revision=revision, etag_timeout=TIMEOUT_S)
        files = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(WANTED_FILES),
            dry_run=True,
            etag_timeout=TIMEOUT_S,
        )
    except (OSError, ValueError, HTTPError):
        return None
    # The cache may have some of the files, from an interrupted download.
    return {file.filename: file.file_size for file in files if file.will_download}
