"""Which trained weights are in the results, so that their state has nothing to lose."""

import json
from pathlib import Path


def published_below(results: Path) -> frozenset[str]:
    """List the hashes of weights that the results hold."""
    found = {weights_of(path) for path in results.glob("*/training.json")}
    return frozenset(sha256 for sha256 in found if sha256 is not None)


def weights_of(record: Path) -> str | None:
    """Give the hash of the weights that a record is about; null where there is no such record."""
    try:
        value = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    sha256 = value.get("weights_sha256") if isinstance(value, dict) else None
    return sha256 if isinstance(sha256, str) else None
