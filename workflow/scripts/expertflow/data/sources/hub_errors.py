"""One-line explanations, with a fix, of errors between the hub and the disk.

The libraries nest errors; the most informative one decides. Their messages are quoted only if
nothing else helps, and never with a token or the query of a signed URL.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
    if find_full(error):
        return describe_full_cache()
    causes = list(iter_causes(error))
    # From the outside in: the hub's own errors say more than the connection's below them.
    if text := next(filter(None, (_explain_cause(source, cause) for cause in causes)), None):
        return text
    quoted = without_secrets(single_line("; ".join(f"{type(e).__name__}: {e}" for e in causes)))
    fix = "check its id, config and options, or try again"
    return f"cannot load data set {source.id} ({quoted[:QUOTE_CHARS]}); {fix}"


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


def _explain_cause(source: SourceSpec, error: BaseException) -> str | None:
    from httpx2 import TransportError
    from huggingface_hub import errors as hub

    name, page = source.id, f"https://huggingface.co/datasets/{source.id}"
    here = f"data set {name}@{source.revision or 'main'} is incomplete in {hub_cache()}"
    match error:
        case OSError() if "Not enough disk space" in str(error):
            # The library reports the space it needs.
            return describe_full_cache(str(error).partition("Needed: ")[2].partition(" (")[0])
        case PermissionError():
            return f"{error.filename}: not writable; set HF_HOME to a folder that is"
        case hub.HFValidationError():
            return f"{name!r} is no id like owner/name; correct it, or use kind local for files"
        case hub.RevisionNotFoundError():
            fix = f"use a branch, tag or commit of {page}/commits/main"
            return f"data set {name} has no revision {source.revision or 'main'!r}; {fix}"
        case _ if isinstance(error, hub.RepositoryNotFoundError) or _status(error) in (401, 403):
            fix = f"correct the id, or get access at {page} and log in with 'hf auth login'"
            return f"data set {name} is not on the hub, or is gated or private; {fix}"
        case _ if (
            isinstance(error, TransportError | hub.OfflineModeIsEnabled)
            or _status(error) in RETRIED_STATUS
        ):
            reason = _passing_reason(error) or type(error).__name__
            fix = "check the network, HF_HUB_OFFLINE and HF_ENDPOINT, or copy another cache here"
            return f"{here} and the hub cannot be reached ({reason}); {fix}"
    return None
