"""Infer what licenses require of a model's users from their names. This is not legal advice.

Whether a model is an adaptation of its training data is disputed, so every term that may bind is
listed and nothing is decided.
"""

import re

from expertflow.core.records import Record

# For license names as ``normalize_name`` returns them.
PATTERNS = {
    "non-commercial": r"\bnc\b|non-?commercial|\bresearch\b|\bacademic|\bamlr\b|\bc-uda\b",
    "no derivatives": r"\bnd\b|\bno-?deriv",
    "share-alike": (
        r"\bsa\b|share-?alike|\ba?gpl|\bodbl\b|\bgfdl\b|\bcdla-sharing\b|\bosl\b|\beupl\b"
    ),
}
# What each of the terms means, most severe first.
MEANINGS = {
    "non-commercial": "it allows no commercial use; a model trained on it may be bound, too",
    "no derivatives": "it allows no distribution of adaptations; a model may count as one",
    "not stated": "no license is stated, which by itself permits nothing",
    "other terms": "read the license before you use or distribute the model",
    "share-alike": (
        "adaptations must be distributed under the same license; a model may count as one"
    ),
}
# These require no more than attribution.
PERMISSIVE = frozenset({
    "apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "isc",
    "zlib", "unlicense", "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0",
    "cdla-permissive-1.0", "cdla-permissive-2.0", "odc-by", "pddl", "wtfpl", "postgresql", "ncsa",
    "afl-3.0", "ecl-2.0", "bsl-1.0",
})  # fmt: skip
# Licenses known to the hub under which a model can be distributed.
HUB_LICENSES = PERMISSIVE | {
    "mpl-2.0", "ms-pl", "artistic-2.0", "openrail", "bigscience-openrail-m", "bigcode-openrail-m",
    "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4", "gemma", "cc-by-sa-3.0",
    "cc-by-sa-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc-sa-2.0",
    "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0",
    "gpl-2.0", "gpl-3.0", "agpl-3.0", "lgpl-2.1", "lgpl-3.0", "odbl", "gfdl",
}  # fmt: skip


class Licensed(Record, frozen=True, kw_only=True):
    """The base model or a data source; null ``license``: none is stated."""

    name: str
    license: str | None
    is_base: bool = False

    @property
    def short(self) -> str:
        return normalize_name(self.license or "")

    @property
    def terms(self) -> list[str]:
        """The keys of ``MEANINGS`` that apply; ``other terms`` for a name that says nothing."""
        if not self.short:
            return ["not stated"]
        if self.short in PERMISSIVE:
            return []
        found = [term for term, pattern in PATTERNS.items() if re.search(pattern, self.short)]
        return found or ["other terms"]

    @property
    def words(self) -> str:
        what = "base model " if self.is_base else ""
        return f"{what}{self.name} ({self.license or 'not stated'})"


def normalize_name(name: str) -> str:
    """Normalize a license's name to its short form: ``Apache License 2.0`` is apache-2.0."""
    short = re.sub(r"[\s_()-]+", "-", name.casefold())
    return re.sub(r"^the-|(^|-)licen[cs]e(?=-|$)", "", short.strip("-")).strip("-")


def find_conflicts(made_from: list[Licensed]) -> list[str]:
    """Return what may prevent using or distributing the model, most severe first, one line each."""
    found = {term: [item.words for item in made_from if term in item.terms] for term in MEANINGS}
    return [f"{term}: {', '.join(w)} - {MEANINGS[term]}." for term, w in found.items() if w]


def hub_license(made_from: list[Licensed]) -> str | None:
    """Return the hub's license: the base's (null if not stated), or ``other`` in a conflict."""
    if not any(item.short for item in made_from if item.is_base):
        return None
    one = only_license(made_from)
    return one if one in HUB_LICENSES else "other"


def only_license(made_from: list[Licensed]) -> str | None:
    """Return the base's license if the sources are under the same or a permissive one."""
    [base] = [item.short for item in made_from if item.is_base]
    return base if all(item.short in PERMISSIVE | {base} for item in made_from) else None
