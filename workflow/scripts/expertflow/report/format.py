"""Format numbers for people: two or three digits, a unit, and a non-breaking space."""

import re
from typing import Any

from expertflow.core import format as core

# Keeps a number and its unit on one line.
NBSP = "\u00a0"
MINUS = "\u2212"
LEAST_USD = 0.0001
THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number_of(n: int, one: str) -> str:
    return f"{n:,} {one}" if n == 1 else f"{n:,} {one}s"


def count(value: float) -> str:
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Return three digits with a suffix for the power of a thousand."""
    for scale, name in THOUSANDS:
        # From here three digits of the smaller unit would round to 1000: 999,600 is 1.00M.
        if abs(value) >= 0.9995 * scale:
            return f"{_three_digits(value / scale)}{name}"
    return _three_digits(value)


def percent(fraction: float) -> str:
    """Format a fraction as a percentage, with a decimal only if it is small."""
    return _percent(fraction, 0 if abs(fraction) >= 0.0995 or fraction == 0 else 1)


def tenths(fraction: float) -> str:
    return _percent(fraction, 1)


def percent_with_sign(fraction: float) -> str:
    return with_sign(100 * fraction, 0 if abs(fraction) >= 0.0995 else 1) + f"{NBSP}%"


def points(fraction: float) -> str:
    return with_sign(100 * fraction, 1)


def with_sign(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    # What rounds to zero has no sign: -0.0001 is 0.00.
    return text.replace("-", MINUS) if float(text) else text[1:]


def loss(value: float) -> str:
    return f"{value:.3f}".replace("-", MINUS)


def usd(value: float) -> str:
    """Format dollars with cents, or with two digits below a cent."""
    # A job of a tenth of a second on a card would cost $6.9e-05.
    if 0 < value < LEAST_USD:
        return f"<${LEAST_USD}"
    return f"${value:,.2f}" if value >= 0.01 or value == 0 else f"${value:.2g}"


def duration(seconds: float) -> str:
    """Format seconds in the unit that keeps the number between 1 and 100."""
    for scale, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * scale:
            return f"{_two_digits(seconds / scale)}{NBSP}{unit}"
    return f"{_two_digits(seconds)}{NBSP}s"


def short_time(seconds: float) -> str:
    """Format seconds in the unit that keeps the number above 1."""
    if seconds >= 999.5:
        return duration(seconds)
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        # 999.6 ms would be written as 1e+03 ms.
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g}{NBSP}{unit}"
    return f"{seconds * 1e6:.3g}{NBSP}\u00b5s"


def calls(n_a_step: float) -> str:
    return count(n_a_step) if n_a_step == int(n_a_step) else f"{n_a_step:,.1f}"


def usd_rate(value: float) -> str:
    """Format a unit price: two digits below a dollar, since cents are too coarse."""
    # The # keeps a trailing zero: $0.020, not $0.02.
    return f"${value:#.2g}" if LEAST_USD <= value < 0.0995 else usd(value)


def factor(value: float) -> str:
    """Format a ratio of two speeds in three digits."""
    # If rounding adds a leading digit, a trailing one is dropped: 0.9994 is ×0.999, 0.9996 ×1.00.
    bounds = (0.09995, 0.9995, 9.995, 99.95)
    digits = 4 - sum(value >= bound for bound in bounds)
    return f"\u00d7{value:,.{digits}f}"


def flops(flops_per_s: float) -> str:
    return f"{_three_digits(flops_per_s / 1e12)}{NBSP}TFLOP/s"


def hours(value: float) -> str:
    return duration(3600 * value)


def size(n_bytes: float) -> str:
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= 0.9995 * scale:
            return f"{_three_digits(n_bytes / scale)}{NBSP}{unit}"
    return f"{n_bytes:.0f}{NBSP}B"


def energy(kwh: float) -> str:
    # Small runs are not shown as 0.04 kWh.
    if kwh >= 0.1:
        return f"{_two_digits(kwh)}{NBSP}kWh"
    return f"{_two_digits(1000 * kwh)}{NBSP}Wh"


def words(name: str) -> str:
    return name.replace("_", " ")


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def hold(text: str) -> str:
    """Join numbers to their units, so that no line breaks between them."""
    # 95 % of 12 min -> two non-breaking spaces; in 12 sources the s begins a word.
    return re.sub(r"(?<=\d) (?=(?:%|s|min|h|points|[kMGT]?B)(?!\w))", NBSP, text)


def plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def short_hash(text: str) -> str:
    """Shorten a hash to its first digits; return any other text unchanged."""
    # An id such as "expert-sql-3" or a short digest has no 32 hex digits, and is kept.
    return re.sub(r"\b([0-9a-f]{16})[0-9a-f]{16,}\b", "\\1…", text)


def clip(text: str, n_chars: int) -> str:
    if not text.strip():
        return f"({len(text):,} whitespace characters)" if text else "(empty)"
    gone = len(text) - n_chars
    return text if gone <= 0 else f"{text[:n_chars]}\u2026 ({gone:,} more characters)"


def clip_middle(text: str, n_chars: int) -> str:
    """Shorten a piece of a decoded document in the middle: the ends matter most."""
    half = n_chars // 2
    return text if len(text) <= n_chars else f"{text[:half]} […] {text[-half:]}"


def _percent(fraction: float, digits: int) -> str:
    return core.percent(fraction, digits).replace(" ", NBSP).replace("-", MINUS)


def _three_digits(value: float) -> str:
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}"


def _two_digits(value: float) -> str:
    digits = 0 if value >= 9.95 or value == 0 else 1 if value >= 0.995 else 2
    text = f"{value:.{digits}f}"
    # 2.0 h reads as 2 h.
    return text.removesuffix(".0")
