"""Find credentials in a text, and replace e-mail addresses with pseudonyms.

The patterns are those of detect-secrets and, for kinds that it lacks, ours. Its keyword detector
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

PLUGINS = (
    *("ArtifactoryDetector", "AWSKeyDetector", "AzureStorageKeyDetector", "BasicAuthDetector"),
    *("CloudantDetector", "DiscordBotTokenDetector", "GitHubTokenDetector", "GitLabTokenDetector"),
    *("IbmCloudIamDetector", "IbmCosHmacDetector", "JwtTokenDetector", "MailchimpDetector"),
    *("NpmDetector", "OpenAIDetector", "PrivateKeyDetector", "PypiTokenDetector"),
    *("SendGridDetector", "SlackDetector", "SoftlayerDetector", "SquareOAuthDetector"),
    *("StripeDetector", "TelegramBotTokenDetector", "TwilioKeyDetector"),
)
_HEX, _WORD = "0-9a-f", "-0-9A-Za-z_"
# One of these precedes, ignoring case, every value that ASSIGNED finds.
NAMES = (
    *("passw", "passphrase", "pwd", "secret", "token", "api_key", "api-key", "apikey"),
    *("access_key", "access-key", "accesskey", "private_key", "private-key", "privatekey"),
)
# Kind -> (fixed text, pattern): any match contains the fixed text, and a text without it is not
# searched. Prefixes are those that providers publish; long values follow, so that prose does not
# match.
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "1Password Token": (("ops_eyJ", r"ops_eyJ[0-9A-Za-z+/=]{250,}"),),
    "Adobe Client Secret": (("p8e-", r"\bp8e-[0-9A-Za-z]{32}\b"),),
    "Age Secret Key": (("AGE-SECRET-KEY-1", r"AGE-SECRET-KEY-1[0-9A-Z]{58}"),),
    "Airtable Token": (("pat", rf"\bpat[0-9A-Za-z]{{14}}\.[{_HEX}]{{64}}\b"),),
    "Alibaba Cloud Key": (("LTAI", r"\bLTAI[0-9A-Za-z]{20}\b"),),
    "Anthropic API Key": (("sk-ant-", rf"sk-ant-(?:api|admin|oat)\d\d-[{_WORD}]{{80,}}"),),
    "Atlassian Token": (
        ("ATATT3", rf"ATATT3[{_WORD}=]{{60,}}"),
        ("ATBB", r"\bATBB[0-9A-Za-z]{28,}\b"),
    ),
    "Azure Client Secret": (("Q~", r"(?<![0-9A-Za-z_~.])[\w~.]{3}\dQ~[\w~.-]{31,34}"),),
    "Cloudflare Key": (("v1.0-", rf"\bv1\.0-[{_HEX}]{{24}}-[{_HEX}]{{146}}\b"),),
    "Databricks Token": (("dapi", rf"\bdapi[{_HEX}]{{32}}(?:-\d)?\b"),),
    "DigitalOcean Token": (("_v1_", rf"\bdo[por]_v1_[{_HEX}]{{64}}\b"),),
    "Docker Token": (
        ("dckr_pat_", rf"dckr_pat_[{_WORD}]{{27}}"),
        ("dckr_oat_", rf"dckr_oat_[{_WORD}]{{32}}"),
    ),
    "Doppler Token": (("dp.", r"\bdp\.(?:pt|st|ct|sa|scim|audit)\.[0-9A-Za-z.]{40,}"),),
    "Dropbox Token": (("sl.", rf"\bsl\.(?:u\.)?[{_WORD}=]{{130,}}"),),
    "Facebook Token": (("EAA", r"\bEAA[MC][0-9A-Za-z]{100,}\b"),),
    "Figma Token": (("figd_", rf"\bfigd_[{_WORD}]{{38,}}"),),
    "Fly.io Token": (
        ("FlyV1 fm", r"FlyV1 fm\d_[0-9A-Za-z+/=]{60,}"),
        ("fo1_", r"\bfo1_[\w-]{43}\b"),
    ),
    "GitHub Token": (("github_pat_", r"github_pat_[0-9A-Za-z_]{82}"),),
    "GitLab Token": (("glpat-", rf"glpat-[{_WORD}]{{27,300}}\.[0-9a-z]{{9}}"),),
    "Google API Key": (("AIza", rf"AIza[{_WORD}]{{35}}(?![{_WORD}])"),),
    "Google OAuth": (
        ("GOCSPX-", rf"GOCSPX-[{_WORD}]{{28}}"),
        ("ya29.", rf"\bya29\.[{_WORD}]{{30,}}"),
    ),
    "Grafana Token": (
        ("glc_eyJ", r"glc_eyJ[0-9A-Za-z+/=]{60,}"),
        ("glsa_", rf"glsa_[0-9A-Za-z]{{32}}_[{_HEX}]{{8}}"),
    ),
    "Groq API Key": (("gsk_", r"\bgsk_[0-9A-Za-z]{52}\b"),),
    "HashiCorp Vault Token": (
        ("hvs.", rf"\bhvs\.[{_WORD}]{{24,}}"),
        ("hvb.", rf"\bhvb\.[{_WORD}]{{100,}}"),
    ),
    "Heroku API Key": (("HRKU-", rf"HRKU-[{_WORD}]{{36,}}"),),
    "HubSpot Token": (("pat-", rf"\bpat-(?:na|eu)\d-[{_HEX}]{{8}}(?:-[{_HEX}]{{4,12}}){{4}}"),),
    "Hugging Face Token": (("hf_", r"hf_[A-Za-z]{34}(?![0-9A-Za-z])"),),
    "Linear API Key": (("lin_", r"\blin_(?:api|oauth)_[0-9A-Za-z]{40,64}\b"),),
    "Mailgun Key": (("key-", rf"\bkey-[{_HEX}]{{32}}\b"),),
    "Mapbox Secret Token": (("sk.eyJ", rf"\bsk\.eyJ[{_WORD}]{{40,}}\.[{_WORD}]{{20,}}"),),
    "Netlify Token": (("nfp_", r"\bnfp_[0-9A-Za-z]{36,}\b"),),
    "New Relic Key": (("NRAK-", r"NRAK-[0-9A-Z]{27}"),),
    "Notion Token": (("ntn_", r"\bntn_\d{11}[0-9A-Za-z]{35}\b"),),
    "npm Token": (("npm_", r"\bnpm_[0-9A-Za-z]{36}\b"),),
    "OpenAI Token": (("sk-", rf"\bsk-(?:proj|svcacct|admin)-[{_WORD}]{{58,}}"),),
    "Perplexity API Key": (("pplx-", r"\bpplx-[0-9A-Za-z]{48}\b"),),
    "PlanetScale Secret": (("pscale_", r"\bpscale_(?:tkn|pw|oauth)_[\w=.-]{32,}"),),
    "Postman API Key": (("PMAK-", rf"PMAK-[{_HEX}]{{24}}-[{_HEX}]{{34}}"),),
    "Private Key": (
        ("BEGIN ENCRYPTED PRIVATE KEY", "BEGIN ENCRYPTED PRIVATE KEY"),
        ("PuTTY-User-Key-File-3", "PuTTY-User-Key-File-3"),
    ),
    "Pulumi Token": (("pul-", rf"\bpul-[{_HEX}]{{40}}\b"),),
    "Replicate Token": (("r8_", r"\br8_[0-9A-Za-z]{37}\b"),),
    "RubyGems Key": (("rubygems_", rf"rubygems_[{_HEX}]{{48}}"),),
    "Sentry Token": (
        ("sntrys_eyJ", r"sntrys_eyJ[0-9A-Za-z+/=_]{80,}"),
        ("sntryu_", rf"sntryu_[{_HEX}]{{64}}"),
    ),
    "Shopify Token": (("shp", rf"\bshp(?:at|ca|pa|ss|tka)_[{_HEX}]{{32}}\b"),),
    "Slack App Token": (
        ("xapp-", r"\bxapp-\d-[0-9A-Z]+-\d+-[0-9a-z]{20,}"),
        ("xoxe", r"\bxoxe(?:\.xox[bp])?-\d-[0-9A-Za-z]{100,}"),
    ),
    "Square Token": (("EAAA", rf"\bEAAA[{_WORD}]{{60}}(?![{_WORD}])"),),
    "Stripe Webhook Secret": (("whsec_", r"\bwhsec_[0-9A-Za-z+/=]{32,}"),),
    "Supabase Token": (("sb", rf"\bsb(?:p_[{_HEX}]{{40}}|_secret_[{_WORD}]{{22,}})"),),
    "Tailscale Key": (("tskey-", r"\btskey-[a-z]+-[0-9A-Za-z]+-[0-9A-Za-z]{20,}"),),
    "Terraform Cloud Token": ((".atlasv1.", rf"\b[0-9A-Za-z]{{14}}\.atlasv1\.[{_WORD}=]{{60,}}"),),
    "Weights & Biases Key": (("wandb_v1_", r"\bwandb_v1_\w{40,}"),),
    "xAI API Key": (("xai-", r"\bxai-[0-9A-Za-z]{80}\b"),),
}  # fmt: skip
# A setting named like a credential, with its value, quoted or not.
ASSIGNED = re.compile(
    r"""(?ix)(?:passw(?:or)?d|passphrase|pwd|secret|token|(?:api|access|private)[_-]?key)
    [\w-]{0,24}["']?\s{0,4}(?::=|=>|[:=])\s{0,4}
    (?:(["'])(?P<quoted>[^"'\s]{8,128})\1|(?P<bare>[-0-9A-Za-z/+=_]{12,128})(?=["'`\s]|$))"""
)
# Placeholder values: templates, and short ones with a telltale word.
PLACEHOLDER = re.compile(
    r"""(?ix)[<>{}()\[\]|\\*]|^[$%@]|\.\.|https?:|^[\w.-]*\.[a-z]{2,4}$|^(?=.{1,24}$).*(?:example
    |sample|dummy|placeholder|redacted|change|your|^my|test|foo|bar|abc|123|xxx|pass|secret|token|key
    |demo|fake|none|null)"""
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
