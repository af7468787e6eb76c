"""Remember the hashes of large files, so that unchanged ones are read once."""

import logging
import time
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.core.format import gb
from expertflow.core.records import read_part, write_sealed

log = logging.getLogger(__name__)
# Relative to a working directory.
HASHES = Path("state", "hashes.json")
SLOW_HASH_BYTES = 1 << 30
# A file that changed just now could change again within the same tick of its clock.
SETTLED_NS = 2_000_000_000


class HashCache:
    """Hashes by path, each valid while device, inode, size and both times stay the same.

    Only here does a byte that changes without the times, as on a failing disk, go unnoticed.
    """

    def __init__(self, path: Path = HASHES) -> None:
        self.path = path
        self.known = self._read()
        self._new: dict[str, list[Any]] = {}

    def _read(self) -> dict[str, list[Any]]:
        try:
            return read_part(dict[str, list[Any]], self.path, "hashes")
        except DataError as error:
            if self.path.exists():
                log.warning("%s; until then all files are hashed again", error)
            return {}

    def sha256(self, path: Path) -> str:
        stat = path.stat()
        stamp = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        key = str(path.resolve())
        entry = self.known.get(key)
        # An entry is [device, inode, bytes, mtime_ns, ctime_ns, sha256].
        if entry is not None and entry[:-1] == stamp:
            return str(entry[-1])
        if stat.st_size > SLOW_HASH_BYTES:
            log.warning("hashing %s (%s), once", path, gb(stat.st_size))
        is_settled = time.time_ns() - stat.st_ctime_ns > SETTLED_NS
        sha256 = sha256_file(path)
        if is_settled:
            self.known[key] = self._new[key] = [*stamp, sha256]
        return sha256

    def save(self) -> None:
        """Add new hashes to the file, to which other jobs may have added theirs.

        Outside a working directory, as when a script is run by hand, nothing is written.
        """
        if self._new and self.path.parent.is_dir():
            known = {key: v for key, v in self._read().items() if Path(key).exists()}
            write_sealed(self.path, {"hashes": known | self._new})
            self._new = {}
