#!/usr/bin/env python3
"""Store the base model on disk, with hashes."""

from expertflow.core import cli
from expertflow.train.model.base import prepare_model

if __name__ == "__main__":
    cli.run_stage(prepare_model)
