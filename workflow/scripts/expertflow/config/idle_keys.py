"""Refuse settings of a manifest that nothing would read.

They are looked for before defaults are filled in: what stands there is what somebody meant.
"""

from collections.abc import Iterator
from typing import Any

from expertflow.core.errors import ConfigError

# The keys that only sources of some kinds read.
KINDS = {
    "path": ("local", "git"),
    "id": ("hub",),
    "revision": ("hub",),
    "config": ("hub",),
    "split": ("hub",),
    "generator": ("generated",),
    "n_documents": ("generated",),
    "seed": ("generated",),
}
# The keys that only go with a list of turns.
OF_MESSAGES = ("tools", "role_key", "content_key", "roles")
# Options of the kinds that do not check their own when they are locked.
OPTIONS: dict[str, tuple[str, ...]] = {"hub": ("data_dir", "data_files"), "generated": ()}


def refuse_idle_keys(expert: dict[str, Any], *, where: str) -> None:
    """Refuse the first key of a source that would do nothing.

    Raises:
        ConfigError: names the manifest, the source, the key and the fix.
    """
    for source in expert["sources"]:
        for key, problem in _idle(source):
            raise ConfigError(f"{where}: source {source['name']}: {key} {problem}")
    if _is_set(expert.get("data", {}), "max_per_category"):
        if not any(_is_set(source, "category") for source in expert["sources"]):
            raise ConfigError(
                f"{where}: data.max_per_category has no effect, as no source names the field to"
                " count by; add category to a source, or remove it"
            )


def _idle(source: dict[str, Any]) -> Iterator[tuple[str, str]]:
    kind = source["kind"]
    for key, kinds in KINDS.items():
        if _is_set(source, key) and kind not in kinds:
            yield key, f"is read of {' and '.join(kinds)} sources only, not of {kind}; remove it"
    whole = next((key for key in ("text", "messages") if _is_set(source, key)), None)
    for key in ("prompt", "completion"):
        if whole is not None and _is_set(source, key):
            yield key, f"has no effect beside {whole}; remove one of them"
    for key in OF_MESSAGES:
        if whole != "messages" and _is_set(source, key):
            yield key, "has no effect without messages; remove it, or name the field of the turns"
    if kind in OPTIONS:
        known = OPTIONS[kind]
        for key in sorted(set(source.get("options", {})) - set(known)):
            fix = f"use {' or '.join(known)}" if known else "remove it: it has no options"
            yield f"options.{key}", f"is unknown for a {kind} source; {fix}"


def _is_set(settings: dict[str, Any], key: str) -> bool:
    """Tell whether a key says anything: null, an empty list and an empty object do not."""
    return settings.get(key) not in (None, [], {})
