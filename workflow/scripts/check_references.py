#!/usr/bin/env python3
"""Check, before training, that the references of held-out questions can be judged."""

from expertflow.core import cli
from expertflow.evaluate.questions import check_references

if __name__ == "__main__":
    cli.run_stage(check_references)
