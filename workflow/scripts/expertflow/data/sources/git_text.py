"""Write out a commit for a reader: its list of changes, and an account of the whole."""

import json
from typing import Any


def changes_text(files: list[dict[str, Any]]) -> str:
    """Give one line a file: ``path | +added -deleted``; renames and binary files are shown."""
    return "".join(f"{_name(file)} | {_counts(file)}\n" for file in files)


def narrative(record: dict[str, Any]) -> str:
    """Tell what a commit did: when, by whom, where, why, and how."""
    written = f"Written {_when(record['authored_at'])} by {record['author'] or 'an unknown author'}"
    where = f", on {record['branch']}" if record["branch"] else ""
    since = f", in {record['tag']}" if record["tag"] else ""
    merge = f"It merges {len(record['parents'])} lines of work.\n" if record["is_merge"] else ""
    total = f"{record['n_files']} {'file' if record['n_files'] == 1 else 'files'}"
    counts = f"+{record['n_added']} -{record['n_deleted']}"
    cut = "(The diff goes on.)\n" if record["diff_truncated"] else ""
    parts = (
        f"Commit {record['commit'][:12]}\n{written}{where}{since}.\n{merge}",
        record["message"].strip("\n") + "\n",
        f"Changes in {total}, {counts}:\n{record['changes']}",
        record["diff"] + cut,
    )
    return "\n".join(part for part in parts if part.strip())


def _when(authored_at: str | None) -> str:
    return f"on {authored_at[:10]}" if authored_at else "at an unknown time"


def _name(file: dict[str, Any]) -> str:
    path = shown(file["path"])
    return f"{shown(file['renamed_from'])} => {path}" if file["renamed_from"] else path


def _counts(file: dict[str, Any]) -> str:
    if file["n_added"] is None:
        return "binary"
    return f"+{file['n_added']} -{file['n_deleted']}"


def shown(path: str) -> str:
    """Quote a path that would not stay on its line."""
    return path if path.isprintable() else json.dumps(path)
