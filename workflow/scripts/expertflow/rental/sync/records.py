"""What a transfer writes down."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SendRecord:
    """One transfer that was verified; ``n_bytes`` are those that had to be moved."""

    what: str
    n_files: int
    n_bytes: int
    duration_s: float
    verified: str
