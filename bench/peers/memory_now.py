"""Read the peak of this process's resident memory, not its parent's."""

from pathlib import Path


def peak_resident_bytes() -> int:
    """Return the peak since the program started; ``ru_maxrss`` is inherited from the parent."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
