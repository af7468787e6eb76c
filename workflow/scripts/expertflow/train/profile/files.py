"""The files of a profile: in a run's state, and published from there. Needs no torch."""

import logging
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import ExpertflowError
from expertflow.core.files import link_or_copy, replacing
from expertflow.core.records import read_record, write_record
from expertflow.train.records import KernelProfile, RunSummary

log = logging.getLogger(__name__)

PROFILE, KERNELS, TRACE = "profile", "kernels.json", "trace.json.gz"
NOT_ASKED = "training.profile_steps is 0"
# Stands in a state while steps are watched: who is killed then is not killed by it for ever.
BEGUN = (
    "it was begun, and did not end: the process was killed while steps were watched or read, maybe"
    " for want of memory"
)
AFTERWARDS = (
    "it was asked for after this training was finished, which is not done again for it; to train"
    " again with it, rm -r its folder in state/ and run with --forcerun train_expert"
)


def publish_profile(state: Path, target: Path, run: RunSummary, *, n_wanted: int) -> None:
    """Lay the profile of a finished state out in a folder, or a record of why there is none."""
    record = _read(state / PROFILE, run, n_wanted)
    with replacing(target) as partial:
        partial.mkdir()
        if record.trace is not None:
            link_or_copy(state / PROFILE / record.trace, partial / TRACE)
        write_record(partial / KERNELS, record)


def _read(folder: Path, run: RunSummary, n_wanted: int) -> KernelProfile:
    """Read what the state has; a lost or damaged profile is reported and affects nothing else."""
    nothing = KernelProfile(n_wanted_steps=n_wanted, device=run.device)
    path = folder / KERNELS
    if not path.is_file():
        lost = "the state has lost it"
        reason = lost if run.profile_steps else AFTERWARDS if n_wanted else NOT_ASKED
        return replace(nothing, reason=reason)
    try:
        record = read_record(KernelProfile, path)
    except ExpertflowError as error:
        log.warning("the profile is left out: %s", error)
        return replace(nothing, reason=f"what the state has of it cannot be read ({error})")
    size = (folder / TRACE).stat().st_size if (folder / TRACE).is_file() else None
    if record.trace is None or (record.trace == TRACE and size == record.n_trace_bytes):
        return record
    gone = dict.fromkeys(("trace", "n_trace_bytes"), "the state does not have it whole any more")
    log.warning("%s is left out: %s", folder / TRACE, gone["trace"])
    return replace(
        record, trace=None, n_trace_bytes=None, unavailable={**record.unavailable, **gone}
    )
