"""What a transfer writes down."""

from expertflow.core.records import Record


class SendRecord(Record, frozen=True, kw_only=True):
    """One transfer that was verified; ``n_bytes`` are those that had to be moved."""

    what: str
    n_files: int
    n_bytes: int
    duration_s: float
    verified: str
