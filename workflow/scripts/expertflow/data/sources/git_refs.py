"""Say which branches and tags a commit has to do with."""


def names_by_commit(refs: dict[str, str], prefixes: tuple[str, ...]) -> dict[str, list[str]]:
    """Give the short names of the refs that point at each commit, in the order of the full ones."""
    names: dict[str, list[str]] = {}
    for name in sorted(refs):
        for prefix in prefixes:
            if name.startswith(prefix):
                raw = name.removeprefix(prefix).encode("utf-8", "surrogateescape")
                names.setdefault(refs[name], []).append(raw.decode("utf-8", "replace"))
    return names


def first_tags(parents: dict[str, tuple[str, ...]], tags: dict[str, list[str]]) -> dict[str, str]:
    """Give each commit the first tag of the walk, parents before children, that contains it.

    Every commit is visited once, whatever the number of tags.
    """
    found: dict[str, str] = {}
    for tagged in parents:
        ahead = [tagged] if tagged in tags else []
        while ahead:
            commit_id = ahead.pop()
            if commit_id not in found:
                found[commit_id] = tags[tagged][0]
                ahead.extend(parent for parent in parents[commit_id] if parent not in found)
    return found
