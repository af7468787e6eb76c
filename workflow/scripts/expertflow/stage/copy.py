"""Copy packed rows to a fast local disk once, verified, and say where they are."""

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expertflow.core.errors import HardwareError
from expertflow.core.files import replacing, sha256_directory
from expertflow.stage.records import StageSpec, StagingRecord

SPACE_RESERVE = 1.1


def plan_staging(*, expert: str, spec: StageSpec, source: Path, key: str) -> StagingRecord:
    """Decide whether rows are copied, and copy them if so.

    ``key`` is the hash that names the rows' content; copies are shared by whoever needs that key.
    """
    n_bytes = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    sha256 = sha256_directory(source)
    target, n_copied, speed = None, None, None
    if spec.scratch is None:
        reason = "no scratch directory is configured: training reads the rows where they are"
    elif not Path(spec.scratch).is_dir():
        raise HardwareError(f"scratch {spec.scratch}: no such directory; create it, or set null")
    else:
        target = Path(spec.scratch) / "expertflow" / key
        start = time.perf_counter()
        copied = ensure_staged(source=source, target=target, sha256=sha256)
        n_copied = n_bytes if copied else 0
        speed = n_bytes / (time.perf_counter() - start) if copied else None
        reason = "copied and verified" if copied else "already there, verified"
    return StagingRecord(
        expert=expert,
        key=key,
        source=str(source),
        source_sha256=sha256,
        target=None if target is None else str(target),
        n_bytes=n_bytes,
        n_bytes_copied=n_copied,
        reason=reason,
        copy_bytes_per_s=speed,
    )


def ensure_staged(*, source: Path, target: Path, sha256: str) -> bool:
    """Make sure that ``target`` holds exactly the source's files; say whether it had to copy.

    Raises:
        HardwareError: the disk is too small, or the copy does not match.
    """
    with _locked(target):
        if target.is_dir() and sha256_directory(target) == sha256:
            return False
        n_bytes = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
        free = shutil.disk_usage(target.parent).free
        if free < n_bytes * SPACE_RESERVE:
            raise HardwareError(
                f"scratch {target.parent}: {free / 1e9:.1f} GB free, {n_bytes / 1e9:.1f} GB needed;"
                " free some, or set scratch to null"
            )
        with replacing(target) as partial:
            shutil.copytree(source, partial)
            if sha256_directory(partial) != sha256:
                raise HardwareError(f"{target}: the copy differs from {source}; check the disk")
        return True


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process at a time make a copy; others wait and then find it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
