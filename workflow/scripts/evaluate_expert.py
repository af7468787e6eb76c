#!/usr/bin/env python3
"""Score an expert before and after training, on held-out documents."""

from expertflow.core import cli
from expertflow.evaluate.evaluation import EvalInputs, evaluate_expert

if __name__ == "__main__":
    cli.run_stage(evaluate_expert, takes=EvalInputs)
