"""What can go wrong between the hub and the disk, each in one line that says what to do.

The libraries wrap errors in errors; the line follows from the one that tells most. Their own texts
are quoted only where nothing else would help, and never with a token or the query of a signed
address in them.
"""

import errno
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from expertflow.core.errors import DataError
from expertflow.data.cache import hub_cache
from expertflow.data.settings import SourceSpec

T = TypeVar("T")
log = logging.getLogger(__name__)
N_TRIES = 3
WAIT_S = 2.0
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
SECRET = re.compile(r"hf_\w{4,}|(?i:bearer)\s+\S+|(?<=\?)[^\s\"'<>]+|(?<=://)[^/\s@]+@")
QUOTE_CHARS = 300


class SecretFilter(logging.Filter):
    """Take secrets out of what the libraries log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite a log record; none is dropped."""
        record.msg, record.args = without_secrets(record.getMessage()), ()
        return True


def without_secrets(text: str) -> str:
    """Blank tokens, credentials and the queries of signed addresses.

    >>> without_secrets("GET https://cdn/x?Signature=abc with Bearer hf_abcdef")
    'GET https://cdn/x?[hidden] with [hidden]'
    """
    return SECRET.sub("[hidden]", text)


def with_retries(what: str, call: Callable[[], T]) -> T:
    """Call a few times while the hub fails in a way that may pass; complete files are kept."""
    for attempt in range(1, N_TRIES):
        try:
            return call()
        except library_errors() as error:
            reason = _passing(error)
            if reason is None:
                raise
            wait_s = WAIT_S * 2 ** (attempt - 1)
            log.warning("%s: %s; try %d of %d in %g s", what, reason, attempt + 1, N_TRIES, wait_s)
            time.sleep(wait_s)
    return call()


@contextmanager
def one_line(source: SourceSpec) -> Iterator[None]:
    """Turn what the libraries raise into one line for the user."""
    try:
        yield
    except DataError:
        raise
    except library_errors() as error:
        raise DataError(f"source {source.name}: {explain(source, error)}") from error


def library_errors() -> tuple[type[Exception], ...]:
    """Name what the libraries raise for reasons outside this program."""
    import httpx2
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import RevisionResolutionError, XetDownloadError

    return (
        OSError,
        ValueError,
        RuntimeError,
        httpx2.HTTPError,
        DatasetsError,
        RevisionResolutionError,
        XetDownloadError,
    )


def explain(source: SourceSpec, error: BaseException) -> str:
    """Say what is wrong and how to mend it."""
    causes = list(_chain(error))
    for explanation in (_disk, _access, _offline, _server, _name):
        for cause in causes:
            if text := explanation(source, cause):
                return text
    quoted = without_secrets(" ".join(f"{type(error).__name__}: {error}".split()))
    return f"cannot load data set {source.id} ({quoted[:QUOTE_CHARS]}); check config and options"


def is_unreachable(error: BaseException) -> bool:
    """Tell whether the hub could not be asked, for want of a network or its own fault."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return any(isinstance(e, OfflineModeIsEnabled) or _passing(e) for e in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _passing(error: BaseException) -> str | None:
    """Name a failure that may pass; null for any other."""
    import httpx2

    for cause in _chain(error):
        if isinstance(cause, httpx2.TransportError):
            return type(cause).__name__
        status = _status(cause)
        if status in RETRIED_STATUS:
            return f"status {status}"
    return None


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _disk(_: SourceSpec, error: BaseException) -> str | None:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "Not enough disk space" in str(error):
        return f"no space left for {hub_cache()}; free some, or set HF_HOME to another disk"
    if isinstance(error, PermissionError):
        return f"{error.filename}: not writable; set HF_HOME to a folder that is"
    return None


def _access(source: SourceSpec, error: BaseException) -> str | None:
    from huggingface_hub import errors

    page = f"https://huggingface.co/datasets/{source.id}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"data set {source.id} is gated; accept its terms at {page}, then log in with"
            " 'hf auth login' or set HF_TOKEN"
        )
    if isinstance(error, errors.DisabledRepoError):
        return f"data set {source.id} is disabled on the hub; use another one"
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"data set {source.id} has no revision {source.revision or 'main'!r}; use a branch,"
            f" tag or commit of {page}/commits/main"
        )
    if _status(error) == 401 and "Invalid" in str(error):
        return "the hub refuses the token; log in again with 'hf auth login', or unset HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no data set {source.id!r} on the hub, or it is private; correct the id, or log in"
            " with 'hf auth login'"
        )
    if _status(error) in (401, 403):
        return f"the hub does not let this token read {source.id}; ask for access at {page}"
    return None


def _offline(source: SourceSpec, error: BaseException) -> str | None:
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    what = f"data set {source.id}@{source.revision or 'main'} is not complete in {hub_cache()}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{what} and HF_HUB_OFFLINE is set; unset it and run once with a network"
    if isinstance(error, httpx2.TransportError):
        return (
            f"{what} and the hub cannot be reached ({type(error).__name__}); check network and"
            " HF_ENDPOINT, or copy the cache from a machine that has one"
        )
    return None


def _server(source: SourceSpec, error: BaseException) -> str | None:
    status = _status(error)
    if status in RETRIED_STATUS:
        return f"the hub fails for {source.id} (status {status}) after {N_TRIES} tries; try later"
    if isinstance(error, OSError) and "Consistency check failed" in str(error):
        return f"a file of {source.id} arrived damaged; run again to fetch it anew"
    return None


def _name(source: SourceSpec, error: BaseException) -> str | None:
    from datasets.exceptions import DatasetGenerationError, SplitsVerificationError
    from huggingface_hub.errors import HFValidationError

    if isinstance(error, HFValidationError):
        return f"{source.id!r} is no data set id; write it as owner/name"
    if isinstance(error, SplitsVerificationError):
        return (
            f"data set {source.id} holds other splits or counts than its card says; some of its"
            " files may be missing: delete it from the cache and fetch again"
        )
    if isinstance(error, DatasetGenerationError):
        cause = " ".join(str(error.__cause__ or error).split())[:QUOTE_CHARS]
        return (
            f"the files of {source.id} do not read as one table ({without_secrets(cause)}); choose"
            " some with config, or with data_files among the options"
        )
    return None
