#!/usr/bin/env python3
"""Remove training states, tokens and staged copies that no result uses any more.

Also removes what killed jobs left half-written. Keeps what is published or in use, and the newest
unfinished state of each expert.
"""

from pathlib import Path

from expertflow.core import cli
from expertflow.core.files import remove
from expertflow.staging.store import prune_copies
from expertflow.tokens import store
from expertflow.train.saved.checkpoint_files import find_abandoned, prunable_states

TOKENS = ".tokens"


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--state", type=Path, default=Path("state"))
    parser.add_argument("--dry-run", action="store_true", help="only list them")
    args = parser.parse_args()
    found = prunable_states(args.results, args.state) + store.find_prunable(args.state / TOKENS)
    found += find_abandoned(args.results, args.state)
    for path in found if not args.dry_run else ():
        remove(path)
    for path in found + prune_copies(args.results, dry_run=args.dry_run):
        print(f"{'would remove' if args.dry_run else 'removed'} {path}")


if __name__ == "__main__":
    cli.run(main)
