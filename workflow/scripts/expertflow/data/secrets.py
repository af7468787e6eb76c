"""Find credentials in a text, and hide e-mail addresses.

The patterns are those of detect-secrets: every key of a provider that it knows, private keys,
passwords in addresses, JSON web tokens. A few kinds that it does not know yet stand in ``_MORE``.
Its detectors of words like "password" and of random-looking strings are left out: on real data
nearly all they found were examples, checksums and commit ids (of 820 commits 4 for random hex, of
3,324 JSON examples 14 for words, 15 and 18 for random strings), while the kinds used here found
none in the commits.

Not found: passwords without such a mark, keys split over several lines, encoded or compressed text,
and kinds of keys that neither list knows. Secrets in example documents count as secrets.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator

from expertflow.core.errors import DataError
from expertflow.core.records import Record

PLUGINS = (
    *("ArtifactoryDetector", "AWSKeyDetector", "AzureStorageKeyDetector", "BasicAuthDetector"),
    *("CloudantDetector", "DiscordBotTokenDetector", "GitHubTokenDetector", "GitLabTokenDetector"),
    *("IbmCloudIamDetector", "IbmCosHmacDetector", "JwtTokenDetector", "MailchimpDetector"),
    *("NpmDetector", "OpenAIDetector", "PrivateKeyDetector", "PypiTokenDetector"),
    *("SendGridDetector", "SlackDetector", "SoftlayerDetector", "SquareOAuthDetector"),
    *("StripeDetector", "TelegramBotTokenDetector", "TwilioKeyDetector"),
)
_MORE = {
    "Private Key": r"BEGIN ENCRYPTED PRIVATE KEY|PuTTY-User-Key-File-3",
    "GitHub Token": r"github_pat_[0-9A-Za-z_]{82}",
    "GitLab Token": r"glpat-[0-9A-Za-z_-]{27,300}\.[0-9a-z]{9}",
    "Google API Key": r"AIza[0-9A-Za-z_-]{35}(?![0-9A-Za-z_-])",
    "Hugging Face Token": r"hf_[A-Za-z]{34}(?![0-9A-Za-z])",
}
# Some patterns take time quadratic in the length of a line. Longer lines are read in windows, each
# of which starts within the one before it, so that time stays linear; a credential longer than the
# overlap may then be missed, a shorter one is not.
WINDOW_CHARS, OVERLAP_CHARS = 16_384, 4096
# Between a name and its value a pattern allows any blanks, three times: cubic time. More than this
# many are read as this many, which is more than the 20 characters that any pattern counts.
_BLANKS = " " * 40
_MANY_BLANKS = re.compile(_BLANKS + " +")
# What a gate may leave out: what a pattern begins with when that may be empty, "(?:x|)" or the
# start of a word or line; and more, as a search is faster, or linear, with what comes after it.
_EMPTY_HEAD = r"\(\?:(?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\|(?:\^|\(\?<=\^\))?\)(?![*+?{])"
_SLOW_HEADS = (
    *(r"\/\/.+", "sk-[A-Za-z0-9-_]*", "[0-9a-z]{32}", r"\d{8,10}", "(?:r|s)"),
    r"(?:https?\:\/\/)[\w\-]+",
)
_HEAD = re.compile("|".join((_EMPTY_HEAD, *map(re.escape, _SLOW_HEADS))))
_LOCAL = "0-9A-Za-z_\u00c0-\u024f"
_LOCAL_BACKWARDS = re.compile(rf"[{_LOCAL}.%+-]{{0,63}}[{_LOCAL}]")
_LABEL = r"[0-9A-Za-z\u00c0-\u024f](?:[0-9A-Za-z\u00c0-\u024f-]{0,61}[0-9A-Za-z\u00c0-\u024f])?"
_DOMAIN = re.compile(rf"(?:{_LABEL}\.){{1,8}}[A-Za-z\u00c0-\u024f]{{2,24}}(?![0-9A-Za-z_-])")
_ESCAPE = re.compile(r"u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[abfnrtv0]")
_PSEUDONYM = re.compile(r"person-[0-9a-f]{12}@example\.org")
_KEY = b"expertflow e-mail"


class Detector(Record, frozen=True, kw_only=True):
    """A kind of credential: some of ``gates`` is in every text in which ``find`` finds one."""

    kind: str
    gates: tuple[re.Pattern[str], ...]
    find: Callable[[str], Iterable[str]]
    is_shown: Callable[[str], bool] | None = None

    def finds(self, line: str) -> bool:
        """Return whether a line holds such a credential, and not just a placeholder."""
        return any(not (self.is_shown and self.is_shown(value)) for value in self.find(line))


def find_secrets(text: str) -> list[str]:
    """Name the kinds of credentials that a text holds, sorted, each once; never the credentials.

    First every pattern is searched in the whole text, which is fast as most begin with rare
    letters; only a detector whose pattern is there then reads the lines, one by one.
    """
    kinds: set[str] = set()
    for window in _windows(text):
        if _BLANKS in window:
            window = _MANY_BLANKS.sub(_BLANKS, window)
        for detector in detectors():
            if detector.kind in kinds or not any(gate.search(window) for gate in detector.gates):
                continue
            # Lines of a diff without the mark: some keys must stand at the start of a line.
            lines = (s[1:] if s.startswith(("+", "-")) else s for s in window.split("\n"))
            if any(map(detector.finds, lines)):
                kinds.add(detector.kind)
    return sorted(kinds)


@functools.lru_cache(maxsize=1)
def detectors() -> tuple[Detector, ...]:
    from detect_secrets.filters import heuristic
    from detect_secrets.settings import get_plugins, transient_settings

    def is_place(value: str) -> bool:
        # "<password>", "{password}", "12345", "%%": a place for a password, or none worth hiding.
        tests = (heuristic.is_templated_secret, heuristic.is_sequential_string)
        return any(test(value) for test in (*tests, heuristic.is_not_alphanumeric_string))

    chosen = {"plugins_used": [{"name": name} for name in PLUGINS], "filters_used": []}
    try:
        with transient_settings(chosen):
            plugins = list(get_plugins())
    except TypeError as error:
        raise DataError(
            "detect-secrets: it lacks a detector; install the pinned version"
        ) from error
    found = [
        Detector(
            kind=plugin.secret_type,
            gates=tuple(_gate(pattern) for pattern in plugin.denylist),
            # analyze_string asks no provider whether a key is valid, as analyze_line may.
            find=plugin.analyze_string,
            is_shown=is_place if type(plugin).__name__ == "BasicAuthDetector" else None,
        )
        for plugin in plugins
    ]
    for kind, text in _MORE.items():
        pattern = re.compile(text)
        found.append(Detector(kind=kind, gates=(pattern,), find=pattern.findall))
    return tuple(found)


def _gate(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Make a faster pattern that is found in every text with a line that ``pattern`` matches.

    What a match begins with can be dropped, as the rest is then still found: the search can look
    for the rare letters that come later. ^ and $ become the ends of lines.
    """
    text = pattern.pattern
    while head := _HEAD.match(text):
        text = text[head.end() :]
    return re.compile(text, pattern.flags | re.MULTILINE)


def _windows(text: str) -> Iterator[str]:
    """Cut a text at line ends, and lines longer than a window into overlapping parts."""
    start = 0
    while len(text) - start > WINDOW_CHARS:
        end = start + WINDOW_CHARS
        newline = text.rfind("\n", start, end)
        yield text[start : newline if newline >= 0 else end]
        start = newline + 1 if newline >= 0 else end - OVERLAP_CHARS
    yield text[start:]


def replace_emails(text: str) -> str:
    """Replace every e-mail address by a stable pseudonym.

    The same address, in any case, gives the same "person-1a2b3c4d5e6f@example.org" in every run;
    pseudonyms are left as they are. Time is linear in the length of the text. It hides addresses
    from readers, not from someone who can guess one and compute its hash. Not found: addresses
    without a dot in the domain, with quotes or numeric hosts, or written as "a at b.org".
    "git@host" stays.
    """
    parts: list[str] = []
    done = 0
    at = text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        start = _local_start(text, done, at) if domain else at
        if domain and start < at:
            address = text[start : domain.end()]
            if text[start:at] != "git" and not _PSEUDONYM.fullmatch(address):
                parts += (text[done:start], _pseudonym(address))
                done = domain.end()
        at = text.find("@", at + 1)
    return "".join((*parts, text[done:])) if parts else text


def _local_start(text: str, first: int, at: int) -> int:
    """Find where the local part before ``at`` starts; ``at`` if there is none."""
    start = max(first, at - 64)
    found = _LOCAL_BACKWARDS.match(text[start:at][::-1])
    if not found:
        return at
    start = at - found.end()
    if start > first and text[start - 1] == "\\":
        # In source text: "\nann@a.org" is a line end and an address.
        if escape := _ESCAPE.match(text, start, at):
            start = escape.end()
    return start


@functools.lru_cache(maxsize=4096)
def _pseudonym(address: str) -> str:
    raw = address.lower().encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(raw, key=_KEY, digest_size=6).hexdigest()
    return f"person-{digest}@example.org"
