"""One-line explanations, with a fix, of errors between the hub and the disk.

The libraries nest errors; the most informative one decides. Their messages are quoted only if
nothing else helps, and never with a token or the query of a signed URL.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING

from expertflow.core.disk import find_full
from expertflow.core.errors import DataError, HardwareError, iter_causes, single_line
from expertflow.data.cache import describe_full_cache, hub_cache
from expertflow.data.settings import SourceSpec

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying

log = logging.getLogger(__name__)
N_TRIES = 3
WAIT_S = 2.0
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
SECRET = re.compile(r"hf_\w{4,}|(?i:bearer)\s+\S+|(?<=\?)[^\s\"'<>]+|(?<=://)[^/\s@]+@")
QUOTE_CHARS = 300


def hide_secrets(record: logging.LogRecord) -> bool:
    """Remove secrets from the libraries' log records; as a filter it drops no record."""
    # Formatted first: a secret may be in the arguments only.
    record.msg, record.args = without_secrets(record.getMessage()), ()
    return True


def without_secrets(text: str) -> str:
    return SECRET.sub("[hidden]", text)


def make_retrier(what: str) -> "Retrying":
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    def warn(state: "RetryCallState") -> None:
        assert state.outcome is not None
        reason = _passing_reason(state.outcome.exception())
        n, wait_s = state.attempt_number + 1, state.upcoming_sleep
        log.warning("%s: %s; try %d of %d in %g s", what, reason, n, N_TRIES, wait_s)

    # An interrupt while handling a lost connection is not a library error: never retry it.
    known = library_errors()
    return Retrying(
        retry=retry_if_exception(lambda e: isinstance(e, known) and _passing_reason(e) is not None),
        stop=stop_after_attempt(N_TRIES),
        wait=wait_exponential(multiplier=WAIT_S),
        before_sleep=warn,
        reraise=True,
    )


@contextmanager
def one_line(source: SourceSpec) -> Iterator[None]:
    """Turn library errors into a one-line DataError; every line names the source."""
    try:
        yield
    except (DataError, HardwareError) as error:
        raise type(error)(f"source {source.name}: {error}") from error.__cause__
    except library_errors() as error:
        raise DataError(f"source {source.name}: {explain_error(source, error)}") from error


def library_errors() -> tuple[type[Exception], ...]:
    from datasets.exceptions import DatasetsError
    from httpx2 import HTTPError
    from huggingface_hub.errors import RevisionResolutionError, XetDownloadError

    own = (DatasetsError, HTTPError, RevisionResolutionError, XetDownloadError)
    return (OSError, ValueError, RuntimeError, *own)


def explain_error(source: SourceSpec, error: BaseException) -> str:
    # Ties go to the outer error, which comes first.
    _, text = min((_fault(source, cause) for cause in iter_causes(error)), key=itemgetter(0))
    if text:
        return text
    quoted = without_secrets(" ".join(f"{type(error).__name__}: {error}".split()))
    return f"cannot load data set {source.id} ({quoted[:QUOTE_CHARS]}); check config and options"


def is_unreachable(error: BaseException) -> bool:
    """Return whether the hub was unavailable, because of the network or the hub itself."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    causes = iter_causes(error)
    return any(isinstance(e, OfflineModeIsEnabled) or _passing_reason(e) for e in causes)


def _passing_reason(error: BaseException | None) -> str | None:
    from httpx2 import TransportError

    for cause in iter_causes(error):
        if isinstance(cause, TransportError):
            return type(cause).__name__
        if (status := _status(cause)) in RETRIED_STATUS:
            return f"status {status}"
    return None


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _fault(source: SourceSpec, error: BaseException) -> tuple[int, str]:
    """Explain one error, with its rank: the lowest of a chain is the most informative."""
    from datasets.exceptions import DatasetGenerationError, SplitsVerificationError
    from httpx2 import TransportError
    from huggingface_hub import errors as hub

    name, page = source.id, f"https://huggingface.co/datasets/{source.id}"
    here = f"data set {name}@{source.revision or 'main'} is incomplete in {hub_cache()}"
    status, message = _status(error), str(error)
    match error:
        case _ if find_full(error) or "Not enough disk space" in message:
            # The library reports the space it needs.
            return 0, describe_full_cache(message.partition("Needed: ")[2].partition(" (")[0])
        case PermissionError():
            return 0, f"{error.filename}: not writable; set HF_HOME to a folder that is"
        case hub.GatedRepoError():
            login = "then log in with 'hf auth login' or set HF_TOKEN"
            return 1, f"data set {name} is gated; accept its terms at {page}, {login}"
        case hub.DisabledRepoError():
            return 1, f"data set {name} is disabled on the hub; use another one"
        case hub.RevisionNotFoundError():
            fix = f"use a branch, tag or commit of {page}/commits/main"
            return 1, f"data set {name} has no revision {source.revision or 'main'!r}; {fix}"
        case _ if status == 401 and "Invalid" in message:
            fix = "log in again with 'hf auth login', or unset HF_TOKEN"
            return 1, f"the hub rejects the token; {fix}"
        case hub.RepositoryNotFoundError():
            fix = "correct the id, or log in with 'hf auth login'"
            return 1, f"no data set {name!r} on the hub, or it is private; {fix}"
        case _ if status in (401, 403):
            return 1, f"the hub does not let this token read {name}; ask for access at {page}"
        case hub.OfflineModeIsEnabled():
            fix = "unset it and run once with a network"
            return 2, f"{here} and HF_HUB_OFFLINE is set; {fix}"
        case TransportError():
            fix = "check network and HF_ENDPOINT, or copy the cache from a machine that has it"
            fault = f"the hub cannot be reached ({type(error).__name__})"
            return 2, f"{here} and {fault}; {fix}"
        case _ if status in RETRIED_STATUS:
            return 3, f"the hub fails on {name} (status {status}) after {N_TRIES} tries; try later"
        case OSError() if "Consistency check failed" in message:
            return 3, f"a file of {name} arrived damaged; run again to refetch it"
        case hub.HFValidationError():
            return 4, f"{name!r} is not a data set id; write it as owner/name"
        case SplitsVerificationError():
            fix = "some files may be missing: delete it from the cache and fetch again"
            return 4, f"data set {name} has different splits or counts than its card; {fix}"
        case DatasetGenerationError():
            cause = without_secrets(single_line(error.__cause__ or error, QUOTE_CHARS))
            fix = "choose some with config or options.data_files"
            return 4, f"the files of {name} cannot be read as one table ({cause}); {fix}"
    return 5, ""
