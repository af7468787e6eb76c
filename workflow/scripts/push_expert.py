#!/usr/bin/env python3
"""Push an expert to the Hugging Face hub, with its model card.

    python workflow/scripts/push_expert.py results/expert-sql --repository you/expert-sql

No other part of the workflow uploads. A new repository is private unless --public is given.
"""

from pathlib import Path

from expertflow.core import cli
from expertflow.export.push import push_expert


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("results", type=Path, help="results/{expert}")
    parser.add_argument("--repository", required=True, help="owner/name on the hub")
    parser.add_argument("--adapter", action="store_true", help="the adapter, not the merged model")
    parser.add_argument("--public", action="store_true", help="a new repository is for everybody")
    args = parser.parse_args()
    done = push_expert(args.results, args.repository, adapter=args.adapter, public=args.public)
    print(f"pushed: {done}")


if __name__ == "__main__":
    cli.run(main)
