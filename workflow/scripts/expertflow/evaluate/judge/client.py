"""Client for a chat-completions endpoint, with retries; protects the key.

The key goes into one header of requests to the endpoint's own host and nowhere else: redirects are
not followed, proxies and ``.netrc`` are not read, and no error repeats what the server sent. A key
is sent over plain HTTP to this machine only.
"""

import asyncio
import ipaddress
import json
import logging
import os
import re
import ssl
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx2

from expertflow.core.errors import ConfigError
from expertflow.core.records import Record
from expertflow.evaluate.records import JudgeSpec, redact_address

LOG = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 20
# Larger counts are nonsense, and not exact as floats.
MAX_COUNT = 2**53 - 1
_WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class Patience(Record, frozen=True, kw_only=True):
    """Timeouts and retries of a judge; a time-out is retried once, a busy server more often."""

    n_attempts: int = 5
    n_timeouts: int = 2
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    n_at_once: int = 4
    # Consecutive failures before giving up on all requests.
    n_failures: int = 8


class JudgeReply(Record, frozen=True, kw_only=True):
    text: str
    n_input_tokens: int | None
    n_output_tokens: int | None


class JudgeError(Exception):
    """A failed request; ``is_final``: others will fail too, ``is_busy``: retry after ``wait_s``."""

    is_final = is_busy = timed_out = False
    wait_s = 0

    def __init__(self, reason: str, **more: Any) -> None:
        super().__init__(reason)
        vars(self).update(more)


class JudgeClient:
    def __init__(self, spec: JudgeSpec, patience: Patience) -> None:
        """Check address and key, raising ConfigError."""
        self._spec, self._patience = spec, patience
        address, key = _parse_address(spec.endpoint), _read_key(spec.api_key_env)
        if key and address.scheme == "http" and not _is_this_machine(address.hostname or ""):
            raise ConfigError(
                f"evaluation.judge.endpoint {redact_address(spec.endpoint)}: a key must not be "
                "sent over plain http; use https, or remove api_key_env"
            )
        url = spec.endpoint.rstrip("/")
        self._url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._http = httpx2.AsyncClient(
            headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
            # The machine's own certificates.
            verify=ssl.create_default_context(),
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # one limit for the complete exchange
        )
        # By default it logs each request.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        self._not_before = 0.0
        # Newer models reject `max_tokens` and any temperature, and need `max_completion_tokens`;
        # null until a request has been answered.
        self._is_newer: bool | None = None

    async def aclose(self) -> None:
        await self._http.aclose()

    async def ask(self, messages: Sequence[dict[str, str]]) -> JudgeReply:
        """Send one chat and return the reply, retrying as ``Patience`` allows; raise JudgeError."""
        wait_s, n_timeouts = self._patience.first_wait_s, 0
        newer = bool(self._is_newer)
        for attempt in range(1, self._patience.n_attempts + 1):
            while (now := time.monotonic()) < self._not_before:
                await asyncio.sleep(self._not_before - now)
            try:
                if (reply := await self._send(messages, newer)) is not None:
                    return reply
                # The prompt may be too long instead, so this is kept only once answered.
                newer = True
            except JudgeError as error:
                n_timeouts += error.timed_out
                is_last = attempt == self._patience.n_attempts
                if not error.is_busy or is_last or n_timeouts >= self._patience.n_timeouts:
                    raise
                # Some servers send 0.
                pause_s = max(wait_s, error.wait_s)
                if pause_s > self._patience.longest_wait_s:
                    raise JudgeError(f"{error}, retry only after {pause_s:.0f} s") from None
                # A busy server is busy for all requests.
                self._not_before = max(self._not_before, time.monotonic() + pause_s)
                wait_s = min(2 * wait_s, self._patience.longest_wait_s)
        raise JudgeError("HTTP 400")

    async def _send(self, messages: Sequence[dict[str, str]], newer: bool) -> JudgeReply | None:
        """Send once; null if the endpoint rejects the request and may expect another style."""
        request: dict[str, object] = {"model": self._spec.model, "messages": list(messages)}
        if newer:
            request["max_completion_tokens"] = self._spec.max_tokens
        else:
            request |= {"max_tokens": self._spec.max_tokens, "temperature": 0}
        status, retry_after, body = await self._exchange(json.dumps(request).encode("ascii"))
        # Once a request in the old style has succeeded, a 400 has another cause.
        if status == 400 and not newer and self._is_newer is not False:
            return None
        if status in _WORTH_ANOTHER_TRY:
            # A date is not read: the wait doubles anyway.
            wait_s = int(retry_after) if re.fullmatch(r"[0-9]{1,9}", retry_after) else 0
            raise JudgeError(f"HTTP {status}", is_busy=True, wait_s=wait_s)
        # Following it would send the prompt to a host that the user did not name.
        if 300 <= status < 400:
            raise JudgeError(f"HTTP {status}: redirects are not followed", is_final=True)
        if status != 200:
            raise JudgeError(f"HTTP {status}", is_final=status in (401, 402, 403, 404, 405))
        if self._is_newer is None:
            self._is_newer = newer
            if newer:
                LOG.warning(
                    "judge: HTTP 400 for max_tokens with temperature 0; "
                    "continuing with max_completion_tokens and no temperature"
                )
        return _read_reply(body)

    async def _exchange(self, body: bytes) -> tuple[int, str, bytes]:
        try:
            # Socket time-outs apply to each read, so a dripping server needs this limit.
            async with (
                asyncio.timeout(self._spec.timeout_s),
                self._http.stream("POST", self._url, content=body) as response,
            ):
                content = b""
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > MAX_REPLY_BYTES:
                        raise JudgeError(f"the reply is longer than {MAX_REPLY_BYTES:,} bytes")
                return response.status_code, response.headers.get("Retry-After", ""), content
        except TimeoutError:
            why = f"no reply within {self._spec.timeout_s:g} s"
            raise JudgeError(why, is_busy=True, timed_out=True) from None
        except (UnicodeError, httpx2.InvalidURL):
            raise JudgeError("the endpoint's host name is invalid", is_final=True) from None
        except (OSError, httpx2.HTTPError) as error:
            cause: BaseException = error
            # httpx2 wraps what the socket raised; the innermost error names the cause.
            while (earlier := cause.__cause__ or cause.__context__) is not None:
                cause = earlier
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise JudgeError("the certificate is not trusted", is_final=True) from None
            raise JudgeError(f"no connection ({type(cause).__name__})", is_busy=True) from None


def _read_reply(body: bytes) -> JudgeReply:
    try:
        reply = json.loads(body)
        content = reply["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError):
        content = None
    # Some endpoints return the text in parts, as for images.
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str):
        raise JudgeError("the reply is not a chat completion")
    usage = reply.get("usage")
    n_input, n_output = (_count(usage, f"{kind}_tokens") for kind in ("prompt", "completion"))
    return JudgeReply(text=content, n_input_tokens=n_input, n_output_tokens=n_output)


def _count(usage: object, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def _parse_address(endpoint: str) -> SplitResult:
    """Parse scheme, host and path; errors never repeat the address, which may contain a secret."""
    try:
        address = urlsplit(endpoint)
        port = address.port
    except ValueError:
        address, port = urlsplit(""), 0
    if address.scheme not in ("http", "https") or not address.hostname or port == 0:
        raise ConfigError("evaluation.judge.endpoint is not a URL; use https://host/v1")
    if "@" in address.netloc or address.query or address.fragment:
        raise ConfigError(
            "evaluation.judge.endpoint contains a user, query or fragment; "
            "set only scheme, host and path, and pass the key by api_key_env"
        )
    if not _is_plain(endpoint):
        raise ConfigError(
            "evaluation.judge.endpoint contains a space or non-ASCII character; percent-encode it"
        )
    return address


def _read_key(name: str | None) -> str | None:
    """Read the key from an environment variable; errors never repeat it."""
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {name} is not set; set it to the key")
    if not _is_plain(key):
        raise ConfigError(
            f"the environment variable {name} contains a character that no key has; set it again"
        )
    return key


def _is_plain(text: str) -> bool:
    return all(32 < ord(char) <= 126 for char in text)


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
