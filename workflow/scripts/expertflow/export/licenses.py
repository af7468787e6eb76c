"""Infer what licenses require of a model's users from their names. This is not legal advice.

Whether a model is an adaptation of its training data is disputed, so every term that may bind is
listed and nothing is decided.
"""

import re

from expertflow.core.records import Record

# Terms, most severe first: a pattern for license names as ``normalize_name`` returns them (null:
# not found by pattern), and what they mean.
TERMS = {
    "non-commercial": (
        r"\bnc\b|non-?commercial|\bresearch\b|\bacademic|\bamlr\b|\bc-uda\b",
        "it allows no commercial use; a model trained on it may be bound, too",
    ),
    "no-derivatives": (
        r"\bnd\b|no-?deriv",
        "it allows no distribution of adaptations; a model may count as one",
    ),
    "reserved": (
        r"rights-reserved|\bproprietary\b",
        "it permits nothing by itself; ask the rights holder before you use the model",
    ),
    "not stated": (None, "no license is stated, which by itself permits nothing"),
    "unknown terms": (
        None,
        "its terms are not known by its name; read them before you use the model",
    ),
    "own terms": (
        r"llama|\bgemma|rail\b",
        "it sets its own conditions, such as forbidden uses and required names; read it before you"
        " distribute the model",
    ),
    "share-alike": (
        r"\bsa\b|share-?alike|\ba?gpl|\bodbl\b|\bgfdl\b|\bcdla-sharing\b|\bosl\b|\beupl\b",
        "adaptations must be distributed under the same license; a model may count as one",
    ),
    "weak copyleft": (
        r"\blgpl|\bmpl\b|\bepl\b|\bcddl\b|\bms-pl\b",
        "changed files stay under the same license, works built with them need not; it is unsettled"
        " which of the two a model is",
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
ATTRIBUTION = re.compile(r"\bby\b")
# Separators between the names of several licenses.
SEVERAL = re.compile(r"[,;/]|\s(?:and|or)\s", re.IGNORECASE)


class Licensed(Record, frozen=True, kw_only=True):
    """The base model or a data source; null ``license``: none is stated."""

    name: str
    license: str | None
    is_base: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The normalized names in a text that may list several licenses, without duplicates."""
        return tuple(
            sorted({normalize_name(part) for part in SEVERAL.split(self.license or "")} - {""})
        )

    @property
    def terms(self) -> set[str]:
        """The keys of ``TERMS`` that apply to it."""
        known = {
            term: {part for part in self.parts if pattern and re.search(pattern, part)}
            for term, (pattern, _) in TERMS.items()
        }
        known["not stated"] = set() if self.parts else {""}
        # Names that the hub does not know and no pattern matches.
        known["unknown terms"] = set(self.parts).difference(HUB_LICENSES, *known.values())
        return {term for term, parts in known.items() if parts}

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
    found = {term: [item for item in made_from if term in item.terms] for term in TERMS}
    lines = [f"{term}: {_list(found[term])} - {TERMS[term][1]}." for term in TERMS if found[term]]
    strict = [item for item in made_from if not set(item.parts) <= PERMISSIVE]
    for item in found["share-alike"]:
        # Two sources under the same share-alike license are compatible.
        if others := [other for other in strict if other.parts != item.parts]:
            lines.append(
                f"incompatible: {item.words} requires its own license, and {_list(others)}"
                " another one; whoever distributes the model may be unable to comply with both."
            )
    return lines


def _list(items: list[Licensed]) -> str:
    return ", ".join(item.words for item in items)


def list_remarks(made_from: list[Licensed]) -> list[str]:
    """Return the licenses' other consequences, which prevent nothing."""
    lines = []
    if len({item.parts for item in made_from if not item.is_base}) > 1:
        lines.append("The sources have different licenses; the table lists each.")
    named = [
        item
        for item in made_from
        if any(ATTRIBUTION.search(part) or part == "odbl" for part in item.parts)
    ]
    if named:
        lines.append(f"Attribution is required: {_list(named)}.")
    return lines


def hub_license(made_from: list[Licensed]) -> str | None:
    """Return the hub's license: the base's (null if not stated), or ``other`` in a conflict."""
    if not any(item.parts for item in made_from if item.is_base):
        return None
    one = only_license(made_from)
    return one if one in HUB_LICENSES else "other"


def only_license(made_from: list[Licensed]) -> str | None:
    [base] = [item.parts for item in made_from if item.is_base]
    clear = all(item.parts and set(item.parts) <= PERMISSIVE | set(base) for item in made_from)
    return base[0] if clear and len(base) == 1 else None
