"""Find a base model on disk, and ask the hub about one that is not downloaded yet."""

import functools
from pathlib import Path

from expertflow.data import cache

TIMEOUT_S = 3.0


def find_folder(name: str, revision: str | None) -> Path:
    """Return a model's own folder or the one in the hub's cache, which may lack files."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    # Where nothing was downloaded yet, a folder that is not there.
    commit = cache.find_revision(name, revision, "models")
    return cache.snapshot_folder(name, commit or "main", "models")


@functools.cache
def look_up_downloads(name: str, revision: str | None) -> dict[str, int] | None:
    """Return the bytes by path of what the cache lacks of a model; its config.json is there then.

    Null where the hub is out of reach, not to be asked, or does not show the model.
    """
    # Imported here: half a second, for what is asked once.
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    from expertflow.train.model.base import WANTED_FILES

    disable_progress_bars()
    try:
        # Asked first: a hub that does not answer is given up once, and not for each file.
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
    # The cache may hold some of the files, from a download that broke off.
    return {file.filename: file.file_size for file in files if file.will_download}
