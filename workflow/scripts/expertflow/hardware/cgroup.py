"""What a container or batch job leaves of a machine: cgroup limits, version 1 and 2."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# Version 1 writes "no limit" as a number near 2**63.
NO_LIMIT = 1 << 60


def cpu_quota(root: Path = ROOT) -> float | None:
    """Give how many processors' worth of time this process may use; null without a quota."""
    quotas = [_cpu_max(folder) for folder in _folders(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Give how much memory this process may use; null without a limit."""
    limits = []
    for folder in _folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name)
            if text.isdigit() and int(text) < NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def memory_left_bytes(root: Path = ROOT) -> int | None:
    """Give how much memory this process may still take; null without a limit.

    Cached files that nobody used lately count as free: they give way.
    """
    left = []
    for folder in _folders(root, "memory"):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _text(folder / limit), _text(folder / used)
            if most.isdigit() and int(most) < NO_LIMIT and now.isdigit():
                lines = _text(folder / "memory.stat").split("\n")
                stat = dict(line.split(" ", 1) for line in lines if " " in line)
                left.append(max(0, int(most) - int(now) + int(stat.get(cached, 0))))
    return min(left, default=None)


def _cpu_max(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us")
        period = _text(folder / "cpu.cfs_period_us")
    # "max" or -1: no quota.
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Give this process's control groups and all above them: the tightest limit counts.

    In a container the path may be the host's; what does not exist below the mount is passed over.
    """
    for line in _text(root / "proc/self/cgroup").split("\n"):
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        for mount in _mounts(root / "sys/fs/cgroup", names, controller):
            folder = mount / path.strip("/")
            yield from (up for up in (folder, *folder.parents) if up.is_relative_to(mount))


def _mounts(base: Path, names: str, controller: str) -> list[Path]:
    if not names:
        return [base, base / "unified"]
    return [base / names, base / controller]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
