"""Sidecars: the hashes of what a stage wrote, and what it was made from.

Each record has a hidden one next to it, which also lists the other files of its stage. A stage
checks its inputs against them.
"""

import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import field

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file, sha256_json, sha256_text, sidecar_of
from expertflow.core.hashes import HashCache
from expertflow.core.records import REPAIR, Record, read_record, write_sealed

SIDECARS = ".*.fingerprint"
# Snakemake's marker in a folder that a rule makes.
TIMESTAMP = ".snakemake_timestamp"
# A job's smallest inputs are hashed every time, up to this many bytes in total; hashes of the
# others are remembered. At 250 MB/s that takes 1 % of the shortest jobs.
FRESH_BYTES = 4 << 20
N_THREADS = 4
# Identifies one version of a file: inode, size and time.
Stamp = tuple[int, int, int]


class Sidecar(Record, frozen=True, kw_only=True):
    """``files`` are hashes by path, relative to the sidecar's folder or, elsewhere, absolute."""

    rule: str
    output: str
    sha256: str
    spec_sha256: str
    code: str
    flags_sha256: str = ""
    written_s: float = 0.0
    files: dict[str, str] = field(default_factory=dict)


def write_sidecar(
    output: Path,
    *,
    spec: str,
    code: str,
    files: Iterable[Path] = (),
    outside: Mapping[Path, str] | None = None,
    rule: str | None = None,
) -> None:
    """Record next to an output what it was made from, so that a copy can be verified anywhere.

    ``files`` are the files and folders written with it, ``outside`` the user's files that were read
    in place, with their hashes. The rule defaults to the one whose script this is.
    """
    paths = [path for given in files for path in list_files(given)]
    with ThreadPoolExecutor(N_THREADS) as pool:
        own, *hashes = pool.map(sha256_file, [output, *paths])
    names = [path.relative_to(output.parent).as_posix() for path in paths]
    cache, folder = HashCache(), output.parent.resolve()
    for path, sha256 in (outside or {}).items():
        if not path.resolve().is_relative_to(folder):
            if cache.sha256(path) != sha256:
                raise DataError(f"{path}: changed while it was read; run again")
            names.append(str(path.absolute()))
            hashes.append(sha256)
    cache.save()
    sidecar = Sidecar(
        rule=rule or Path(sys.argv[0]).stem,
        output=output.name,
        sha256=own,
        spec_sha256=sha256_text(spec),
        code=code,
        flags_sha256=sha256_json(_flags()) if rule is None else "",
        written_s=time.time(),
        files=dict(zip(names, hashes, strict=True)),
    )
    write_sealed(sidecar_of(output), sidecar)


def list_files(path: Path) -> list[Path]:
    """List a file, or those below a folder; none if it does not exist."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and file.name != TIMESTAMP]


def record_of(sidecar: Path) -> Path:
    return sidecar.with_name(sidecar.name[1:].removesuffix(".fingerprint"))


def check_inputs(given: Iterable[Path], *, made: Iterable[Path] = ()) -> dict[Path, Stamp]:
    """Check a job's inputs against the sidecars next to them; return stamps that reveal changes.

    A record stands for all files of its stage, a folder for its contents and the records in it.
    Files that are missing, or that no sidecar lists, are left to their reader, as are those that
    the job itself has ``made`` before.
    """
    skipped, wanted = {*made}, dict[Path, tuple[str, Path]]()
    for path in given:
        if path not in skipped:
            wanted |= {p: found for p, found in _recorded(path).items() if p not in skipped}
    stamps = {path: stamp for path in wanted if (stamp := _stamp_of(path)) is not None}
    known, left_bytes = None, FRESH_BYTES
    # Smallest first, so that as many as possible are hashed again.
    for path, (_, n_bytes, _) in sorted(stamps.items(), key=lambda item: item[1][1]):
        left_bytes -= n_bytes
        if left_bytes < 0 and known is None:
            known = HashCache()
        sha256, record = wanted[path]
        hash_file = sha256_file if known is None else known.sha256
        if path.is_dir() or hash_file(path) != sha256:
            source = record if path != record else "its sidecar"
            raise DataError(f"{path}: does not match {source}; {_fix(path, record)}")
    if known is not None:
        known.save()
    return stamps


def _flags() -> list[str]:
    # Settings and code have their own fields in a sidecar.
    words = sys.argv[1:]
    for i in [words.index(name) for name in ("--spec", "--code") if name in words]:
        words[i : i + 2] = ["", ""]
    return [word for word in words if word]


def was_there_before(path: Path, made: Sidecar) -> bool:
    """Return whether a file matches its sidecar, and that is no newer than another one."""
    named = _recorded(path).get(path)
    if named is None:
        return False
    sha256, record = named
    is_newer = read_record(Sidecar, sidecar_of(record)).written_s > made.written_s
    return not is_newer and sha256_file(path) == sha256


def _fix(path: Path, record: Path) -> str:
    if record.parent.absolute() in path.absolute().parents:
        return REPAIR
    # A repair cannot make a user's file again.
    rule = read_record(Sidecar, sidecar_of(record)).rule
    return f"restore it, or accept it: snakemake … --forcerun {rule}"


def check_unmoved(stamps: dict[Path, Stamp]) -> None:
    """Raise DataError if a checked file was replaced or modified since."""
    for path, stamp in stamps.items():
        if _stamp_of(path) != stamp:
            raise DataError(f"{path}: changed while it was read; run again")


def _stamp_of(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _recorded(path: Path) -> dict[Path, tuple[str, Path]]:
    """Return the hashes of the files that a path stands for, each with the record listing it."""
    if (own := sidecar_of(path)).is_file():
        return files_of(own)
    siblings = (files_of(sidecar) for sidecar in sorted(path.parent.glob(SIDECARS)))
    found = {p: e for named in siblings for p, e in named.items() if path in (p, *p.parents)}
    for sidecar in sorted(path.glob(SIDECARS)):
        found |= files_of(sidecar)
    return found


def files_of(sidecar: Path) -> dict[Path, tuple[str, Path]]:
    """Return the hashes of a sidecar's record and files, each with that record."""
    record = record_of(sidecar)
    if not record.is_file():
        # Its job failed, and Snakemake removed the record.
        return {}
    made = read_record(Sidecar, sidecar)
    files = {record.parent / name: sha256 for name, sha256 in made.files.items()}
    return {p: (sha256, record) for p, sha256 in [(record, made.sha256), *files.items()]}
