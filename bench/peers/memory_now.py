"""Read this process's resident memory. The kernel's own peak, and not that of what started it."""

from pathlib import Path


def resident_bytes(name: str = "VmRSS") -> int:
    """Give resident memory now, or with ``VmHWM`` its peak since the program began.

    ``ru_maxrss`` will not do: a program inherits it from the process that started it.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status holds no {name}")
