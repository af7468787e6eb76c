"""The files of a profile: in a run's state, and published from there. Needs no torch."""

import logging
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import ExpertflowError
from expertflow.core.files import link_or_copy, replacing
from expertflow.core.records import read_record, write_record
from expertflow.train.records import Kernel, KernelProfile

log = logging.getLogger(__name__)

PROFILE, KERNELS, TRACE = "profile", "kernels.json", "trace.json.gz"
# What a run's outcome says of how many steps were to be watched when it was trained.
ASKED = "profile_steps"
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


def nothing_watched(reason: str, *, device: str, n_wanted: int) -> KernelProfile:
    """Give the record of a run of which no step was watched."""
    return KernelProfile(
        n_wanted_steps=n_wanted,
        n_steps=0,
        first_step=None,
        device=device,
        wall_s=None,
        n_neighbour_steps=0,
        neighbour_step_s=None,
        pause_s=None,
        device_busy_fraction=None,
        n_kernels=0,
        kernels_s=0.0,
        kernels=(),
        rest=Kernel(name="", n_calls=0, total_s=0.0),
        trace=None,
        n_trace_bytes=None,
        reason=reason,
        unavailable={},
        notes=(),
    )


def publish_profile(state: Path, target: Path, *, n_wanted: int, outcome: dict[str, Any]) -> None:
    """Lay the profile of a finished state out in a folder, or a record of why there is none."""
    record = _record(state / PROFILE, n_wanted=n_wanted, outcome=outcome)
    with replacing(target) as partial:
        partial.mkdir()
        if record.trace is not None:
            link_or_copy(state / PROFILE / record.trace, partial / TRACE)
        write_record(partial / KERNELS, record)


def _record(folder: Path, *, n_wanted: int, outcome: dict[str, Any]) -> KernelProfile:
    """Read what the state has; a lost or spoilt profile is said and spoils nothing else."""
    device, n_asked = outcome["device"], outcome.get(ASKED, 0)
    path = folder / KERNELS
    if not path.is_file():
        reason = "the state has lost it" if n_asked else AFTERWARDS if n_wanted else NOT_ASKED
        return nothing_watched(reason, device=device, n_wanted=n_wanted)
    try:
        record = read_record(KernelProfile, path)
    except ExpertflowError as error:
        log.warning("the profile is left out: %s", error)
        reason = f"what the state has of it cannot be read ({error})"
        return nothing_watched(reason, device=device, n_wanted=n_wanted)
    size = (folder / TRACE).stat().st_size if (folder / TRACE).is_file() else None
    if record.trace is None or (record.trace == TRACE and size == record.n_trace_bytes):
        return record
    lost = dict.fromkeys(("trace", "n_trace_bytes"), "the state does not have it whole any more")
    log.warning("%s is left out: %s", folder / TRACE, lost["trace"])
    return replace(
        record, trace=None, n_trace_bytes=None, unavailable={**record.unavailable, **lost}
    )
