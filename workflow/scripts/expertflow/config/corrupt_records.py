"""Remove records corrupted by a power cut, so that the rules that wrote them rerun."""

import glob
import json
from collections.abc import Iterator
from pathlib import Path, PurePath

from expertflow.chain import CHAIN
from expertflow.config.guard import note
from expertflow.config.run_lock import try_hold

# The folders below that of an expert which hold records, each beside its sidecar.
FOLDERS = {str(PurePath(stage.pattern).parent) for stage in CHAIN}


def remove_corrupt_records(results: Path, *, looks: bool) -> None:
    """Remove records that are no JSON, each with a line; a run that only looks just tells.

    Snakemake takes a file for made because it is there. One that somebody edited is left alone:
    ``verify_results.py`` tells of it. So is one of an expert that another run makes.
    """
    found = list(corrupt_records(results))
    if looks:
        for path in found:
            note(f"{path} or its sidecar is cut short or empty; a run removes it and remakes it")
        return
    for expert in sorted({path.relative_to(results).parts[0] for path in found}):
        with try_hold(expert) as ours:
            if ours:
                # Looked for again: another run may have made it meanwhile.
                for path in list(corrupt_records(results, glob.escape(expert))):
                    path.unlink()
                    note(
                        f"{path} or its sidecar was cut short or empty, and is removed; it is made"
                        " again where it is used"
                    )


def corrupt_records(results: Path, expert: str = "*") -> Iterator[Path]:
    """Yield records and sidecars that are not JSON, and records whose sidecar is not."""
    for folder in sorted(FOLDERS):
        for sidecar in sorted(results.glob(f"{expert}/{folder}/.*.json.fingerprint")):
            record = sidecar.with_name(sidecar.name[1:].removesuffix(".fingerprint"))
            is_whole = _is_json(sidecar)
            if record.is_file() and not (is_whole and _is_json(record)):
                yield record
            if not is_whole:
                yield sidecar


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except FileNotFoundError:
        # Another run is making it anew.
        return True
    except ValueError:
        return False
    return True
