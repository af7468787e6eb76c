"""Find credentials in a text, and replace e-mail addresses with pseudonyms.

The patterns are those of detect-secrets and ``secret_patterns``. detect-secrets' keyword detector
("password") and entropy detectors are left out: on real data nearly all their matches were
examples, checksums and commit ids. A setting named like a credential counts if its value has
letters and digits and no placeholder word. Not found: passwords without such a name, keys split
across lines, encoded or compressed text, and kinds of keys in neither list.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from expertflow.core.format import cut_text, unescape
from expertflow.data.secret_patterns import ASSIGNED, KINDS, NAMES, PLACEHOLDER

PLUGINS = (
    *("ArtifactoryDetector", "AWSKeyDetector", "AzureStorageKeyDetector", "BasicAuthDetector"),
    *("CloudantDetector", "DiscordBotTokenDetector", "GitHubTokenDetector", "GitLabTokenDetector"),
    *("IbmCloudIamDetector", "IbmCosHmacDetector", "JwtTokenDetector", "MailchimpDetector"),
    *("NpmDetector", "OpenAIDetector", "PrivateKeyDetector", "PypiTokenDetector"),
    *("SendGridDetector", "SlackDetector", "SoftlayerDetector", "SquareOAuthDetector"),
    *("StripeDetector", "TelegramBotTokenDetector", "TwilioKeyDetector"),
)
# Some patterns take quadratic time in the line length. Longer lines are read in overlapping windows
# to keep it linear; only a credential longer than the overlap may be missed.
WINDOW_CHARS, OVERLAP_CHARS = 16_384, 4096
# Between name and value a pattern allows any whitespace, three times: cubic time. Longer runs are
# shortened to this, which exceeds the 20 characters that any pattern counts.
_BLANKS = " " * 40
_MANY_BLANKS = re.compile(_BLANKS + " +")
# Most texts have no run this long and need no further search.
LEAST_RUN = 24
_RUN = re.compile(rf"(?<![\w.~+=-])[\w.~+=-]{{{LEAST_RUN},}}")
LEAST_RUNS = {
    "Airtable Token": 82, "Cloudant Credentials": 24, "Discord Bot Token": 59,
    "IBM Cloud IAM Key": 44, "IBM COS HMAC Credentials": 48, "SoftLayer Credentials": 64,
}  # fmt: skip
# Lowercase texts; every match of a detect-secrets kind contains one of them, ignoring case.
FIXED = {
    "AWS Access Key": ("a3t", "abia", "acca", "akia", "asia", "aws"),
    "IBM Cloud IAM Key": ("key", "pwd", "pass", "token"),
    "IBM COS HMAC Credentials": ("secret",),
    "OpenAI Token": ("t3blbkfj",),
    "Slack Token": ("xox", "hooks.slack.com"),
}
# Prefixes that a gate may omit: possibly empty ones, such as "(?:x|)" or the start of a word or
# line, and slow ones, because searching for what follows is faster, or linear.
_EMPTY_HEAD = r"\(\?:(?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\|(?:\^|\(\?<=\^\))?\)(?![*+?{])"
_SLOW_HEADS = (
    *(r"\/\/.+", "sk-[A-Za-z0-9-_]*", "[0-9a-z]{32}", r"\d{8,10}", "(?:r|s)"),
    r"(?:https?\:\/\/)[\w\-]+",
)
_HEAD = re.compile("|".join((_EMPTY_HEAD, *map(re.escape, _SLOW_HEADS))))
_HAS_BOTH = re.compile(r"(?=.*[A-Za-z])(?=.*\d)")
_LOCAL = "0-9A-Za-z_\u00c0-\u024f"
# A letter in escaped JSON, "\u00e9", perhaps escaped again; and backward from the "@".
_LETTER = re.compile(r"\\{1,4}u([0-9A-Fa-f]{4})")
_BACKWARDS = r"[0-9A-Fa-f](?:[c-fC-F]00|[0-9A-Fa-f]10|[0-4]20)u\\{1,4}"
# Atomic, so that no escape is read as single letters.
_LOCAL_BACKWARDS = re.compile(
    rf"(?>{_BACKWARDS}|[{_LOCAL}.%+-]){{0,63}}(?>{_BACKWARDS}|[{_LOCAL}])"
)
_LABEL = r"[0-9A-Za-z\u00c0-\u024f](?:[0-9A-Za-z\u00c0-\u024f-]{0,61}[0-9A-Za-z\u00c0-\u024f])?"
_TOP_LEVEL = r"(?:xn--[0-9A-Za-z-]{2,59}|[A-Za-z\u00c0-\u024f]{2,24})"
_DOMAIN = re.compile(rf"(?:{_LABEL}\.){{1,8}}{_TOP_LEVEL}(?![_-]*[0-9A-Za-z])")
_ESCAPE = re.compile(r"u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[abfnrtv0]")
_PSEUDONYM = re.compile(r"person-[0-9a-f]{12}@example\.org")
_KEY = b"expertflow e-mail"


class Detector(NamedTuple):
    """A kind of credential; a text with one in any line also passes one of ``gates``.

    Such a text has ``least_run`` characters in a row without a blank, quote, slash or bracket, and
    contains one of ``fixed``, ignoring case.
    """

    kind: str
    gates: tuple[Callable[[str], object], ...]
    find: Callable[[str], Iterable[str]]
    least_run: int = 0
    fixed: tuple[str, ...] = ("",)
    is_placeholder: Callable[[str], bool] = lambda _: False

    def finds(self, line: str) -> bool:
        return not all(map(self.is_placeholder, self.find(line)))


def find_secrets(text: str) -> list[str]:
    """Return the sorted kinds of credentials in a text, never the credentials.

    Patterns run on the full text first, which is fast; detectors that match then read single lines.
    """
    kinds: set[str] = set()
    # Cut at line ends, if lines are shorter.
    for window in cut_text(unescape(text), "\n", WINDOW_CHARS, overlap=OVERLAP_CHARS):
        if _BLANKS in window:
            window = _MANY_BLANKS.sub(_BLANKS, window)
        # Splitting at blanks is much faster than the pattern, and leaves little to search.
        long_words = " ".join(word for word in window.split() if len(word) >= LEAST_RUN)
        longest = max(map(len, _RUN.findall(long_words)), default=LEAST_RUN - 1)
        low = window.lower()
        for detector in load_detectors():
            # Cheapest test first: most texts fail it.
            if detector.least_run > longest or detector.kind in kinds:
                continue
            if not any(map(low.__contains__, detector.fixed)):
                continue
            if not any(gate(window) for gate in detector.gates):
                continue
            # Drop the marker of diff lines: some patterns match only at the start of a line.
            lines = (s[1:] if s.startswith(("+", "-")) else s for s in window.split("\n"))
            if any(map(detector.finds, lines)):
                kinds.add(detector.kind)
    return sorted(kinds)


@functools.lru_cache(maxsize=1)
def load_detectors() -> tuple[Detector, ...]:
    from detect_secrets.filters import heuristic
    from detect_secrets.settings import get_plugins, transient_settings

    def is_placeholder(value: str) -> bool:
        # "<password>", "{password}", "12345", "%%": a placeholder, or not worth hiding.
        tests = (heuristic.is_templated_secret, heuristic.is_sequential_string)
        return any(test(value) for test in (*tests, heuristic.is_not_alphanumeric_string))

    chosen = {"plugins_used": [{"name": name} for name in PLUGINS], "filters_used": []}
    with transient_settings(chosen):
        plugins = list(get_plugins())
    found = [_own(kind, fixed, text) for kind, forms in KINDS.items() for fixed, text in forms]
    found.append(Detector("Assigned Credential", (bool,), _assigned_values, fixed=NAMES))
    for plugin in plugins:
        gates = tuple(_gate(pattern) for pattern in plugin.denylist)
        # Unlike analyze_line, analyze_string never asks a provider to verify a key.
        kind = plugin.secret_type
        fixed = FIXED.get(kind, ("",))
        detector = Detector(kind, gates, plugin.analyze_string, LEAST_RUNS.get(kind, 0), fixed)
        if type(plugin).__name__ == "BasicAuthDetector":
            detector = detector._replace(is_placeholder=is_placeholder)
        found.append(detector)
    return tuple(found)


def _own(kind: str, fixed: str, text: str) -> Detector:
    pattern = re.compile(text)
    # A slash or a blank ends a run.
    least_run = 0 if kind == "Private Key" or "/" in text else LEAST_RUNS.get(kind, LEAST_RUN)
    return Detector(kind, (pattern.search,), pattern.findall, least_run, (fixed.lower(),))


def _assigned_values(line: str) -> list[str]:
    low = line.lower()
    if not any(name in low for name in NAMES):
        return []
    values = (found["quoted"] or found["bare"] for found in ASSIGNED.finditer(line))
    return [v for v in values if _HAS_BOTH.match(v) and not PLACEHOLDER.search(v)]


def _gate(pattern: re.Pattern[str]) -> Callable[[str], object]:
    """Return a faster search that finds something wherever ``pattern`` matches a line."""
    text = pattern.pattern
    # Without a pattern's start, the search can use the rarer letters that follow.
    while head := _HEAD.match(text):
        text = text[head.end() :]
    return re.compile(text, pattern.flags | re.MULTILINE).search


def replace_emails(text: str) -> str:
    """Replace each e-mail address with a stable pseudonym, in linear time.

    Regardless of case, an address becomes the same "person-1a2b3c4d5e6f@example.org"; pseudonyms
    are left alone. This hides addresses from readers, not from someone who guesses and hashes
    one. Not found: addresses without a dot in the domain, with quotes or numeric hosts, or written
    as "a at b.org" or "git@host".
    """
    parts: list[str] = []
    done = 0
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        start = _local_start(text, done, at) if domain else at
        if domain and start < at:
            address = _LETTER.sub(lambda found: chr(int(found[1], 16)), text[start : domain.end()])
            if text[start:at] != "git" and not _PSEUDONYM.fullmatch(address):
                parts += (text[done:start], _pseudonym(address))
                done = domain.end()
        at = text.find("@", at + 1)
    return "".join((*parts, text[done:])) if parts else text


def _local_start(text: str, first: int, at: int) -> int:
    """Return where the local part before ``at`` starts; ``at`` if there is none."""
    # A local part has at most 64 characters.
    start = max(first, at - 64)
    # Reversed: a pattern cannot be matched backward from the "@".
    found = _LOCAL_BACKWARDS.match(text[start:at][::-1])
    if not found:
        return at
    start = at - found.end()
    if start > first and text[start - 1] == "\\":
        # In source code, "\nann@a.org" is a line end and an address.
        if escape := _ESCAPE.match(text, start, at):
            start = escape.end()
    return start


@functools.lru_cache(maxsize=4096)
def _pseudonym(address: str) -> str:
    raw = address.lower().encode("utf-8", "surrogatepass")
    # Keyed, so that tables of plain hashes do not match.
    digest = hashlib.blake2b(raw, key=_KEY, digest_size=6).hexdigest()
    return f"person-{digest}@example.org"
