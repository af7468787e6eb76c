"""Format memory and disk sizes, and untrusted text, for people; cut long texts."""

import re
from collections.abc import Iterator
from typing import AnyStr

GB, GIB = 10**9, 1 << 30
# Control characters, which a terminal obeys, marks that reverse the direction of text, and lone
# surrogates, which cannot be encoded.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_DRIVE = re.compile(r"([A-Za-z]):[\\/](.*)")


def gb(n_bytes: float, digits: int = 1) -> str:
    """Format bytes in decimal gigabytes, as GPU and disk makers do.

    >>> gb(24e9), gb(1_234_000_000, 2)
    ('24.0 GB', '1.23 GB')
    """
    return f"{n_bytes / GB:.{digits}f} GB"


def gib(n_bytes: float, digits: int = 1) -> str:
    """Format bytes in binary gigabytes, as allocators count.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{n_bytes / GIB:.{digits}f} GiB"


def size(n_bytes: float) -> str:
    """Format a size in decimal units, small ones too.

    >>> size(1.2e6), size(24e9), size(7), size(999_980)
    ('1.2 MB', '24.0 GB', '7 B', '1.0 MB')
    """
    for scale, unit in ((1e12, "TB"), (GB, "GB"), (1e6, "MB"), (1e3, "kB")):
        # A size that rounds to 1000 of a unit is one of the next.
        if n_bytes >= 0.99995 * scale:
            return f"{n_bytes / scale:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction as a percentage; only 0 itself is 0 %, and only 1 itself is 100 %.

    >>> percent(0.5), percent(1), percent(0.9996), percent(0.0004), percent(0.996, 0)
    ('50.0 %', '100.0 %', '>99.9 %', '<0.1 %', '99.6 %')
    """
    text = f"{100 * fraction:.{digits}f}"
    # With 4 of 10,000 answers wrong, 100.0 % would be false. Sums of shares may miss 1 by 1e-16.
    if 0 < round(fraction, 9) < 1 and float(text) in (0, 100):
        text = f"{100 * fraction:.1f}"
        text = {"0.0": "<0.1", "100.0": ">99.9"}.get(text, text)
    return f"{text} %"


def show_hidden(text: str) -> str:
    r"""Replace control characters and direction marks by code points; keep white space.

    >>> show_hidden("a\u202eb")
    'a<U+202E>b'
    """
    return _HIDDEN.sub(lambda match: f"<U+{ord(match[0]):04X}>", text)


def unescape(text: str) -> str:
    r"""Replace ``\n``, ``\t`` and ``\"``, which hide where words begin in JSON and source code."""
    return text.replace(r"\n", "\n").replace(r"\t", "\t").replace(r"\"", '"')


def cut_text(text: AnyStr, end: AnyStr, length: int, *, overlap: int = 0) -> Iterator[AnyStr]:
    """Cut a text at the last ``end`` within ``length``, dropping it, or else anywhere."""
    start = 0
    while len(text) - start > length:
        found = text.rfind(end, start, start + length)
        # Within a line; with an overlap, whatever is cut here is complete in the next part.
        stop = found if found >= 0 else start + length
        yield text[start:stop]
        start = found + 1 if found >= 0 else stop - overlap
    yield text[start:]


def linux_path(name: str) -> str:
    """Translate a Windows path into its WSL path.

    >>> linux_path("F:/models/Qwen3-0.6B"), linux_path("Qwen/Qwen3-0.6B")
    ('/mnt/f/models/Qwen3-0.6B', 'Qwen/Qwen3-0.6B')
    """
    found = _DRIVE.fullmatch(name)
    if found is None:
        return name
    drive, rest = found.groups()
    return f"/mnt/{drive.lower()}/" + rest.replace("\\", "/")
