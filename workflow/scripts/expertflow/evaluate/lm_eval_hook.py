"""Run tasks of lm-evaluation-harness on both models, if it is installed.

Prompts are the tasks' plain texts, without a chat template. Nothing is downloaded: a task's data
must be in the cache of ``datasets`` or in files that its YAML names.
"""

import importlib
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.generate import end_ids, generation_mode, shrink_batches
from expertflow.evaluate.isolation.rows import one_line
from expertflow.evaluate.lm_eval_tasks import find_tasks
from expertflow.evaluate.records import LmEvalScore, LmEvalSpec
from expertflow.train.model.packed import causal_lm

log = logging.getLogger(__name__)
# For metrics without a formula for their standard error.
N_BOOTSTRAP = 1000
# The harness sums log-probabilities in the type of the logits. In bf16 a text of 5,000 nats would
# be exact to 32, and similar options would tie; the first one wins a tie.
SOFTMAX_DTYPE = "float32"
# Modules that read offline switches at import, with the names of their variables.
SWITCHES = {
    "huggingface_hub.constants": ("HF_HUB_OFFLINE",),
    "datasets.config": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}


# Score and standard error by task and metric.
Figures = dict[tuple[str, str], tuple[float | None, float | None]]


def pair_scores(before: Figures, after: Figures) -> list[LmEvalScore]:
    scores = []
    for task, metric in sorted(before.keys() | after.keys()):
        figures = {}
        for name, side in (("before", before), ("after", after)):
            figures[name], figures[f"{name}_stderr"] = side.get((task, metric), (None, None))
        scores.append(LmEvalScore(task=task, metric=metric, **figures))
    return scores


def run_tasks(model: Any, spec: LmEvalSpec, *, tokenizer: Path, batch_size: int) -> Figures:
    """Run tasks, given by name or as the path of a YAML file of that name, on a loaded model.

    The harness keeps the logits of all tokens of a batch, so it may need smaller batches than
    generation. Raises EvaluationError if a task is unknown, its data is not on this machine, or a
    single text does not fit into memory.
    """
    from transformers import AutoTokenizer

    lm = causal_lm(model)
    with _offline():
        evaluator: Any = importlib.import_module("lm_eval.evaluator")
        models: Any = importlib.import_module("lm_eval.models.huggingface")
        manager, names = find_tasks(spec)
        words = AutoTokenizer.from_pretrained(
            tokenizer, local_files_only=True, trust_remote_code=False
        )
        pad = words.eos_token_id if words.pad_token_id is None else words.pad_token_id
        ends = end_ids(lm.generation_config, words.eos_token_id, pad)

        def run(batch_size: int) -> dict[str, Any]:
            wrapped = models.HFLM(
                pretrained=lm, tokenizer=words, batch_size=batch_size, softmax_dtype=SOFTMAX_DTYPE
            )
            results: dict[str, Any] = evaluator.simple_evaluate(
                model=wrapped,
                tasks=names,
                num_fewshot=spec.n_shots,
                limit=spec.limit,
                bootstrap_iters=N_BOOTSTRAP,
                log_samples=False,
                task_manager=manager,
            )
            return results

        try:
            with generation_mode(lm, ends=ends, pad_id=pad):
                results = shrink_batches(run, batch_size)
        # All of these are raised by loaders if a task's data is missing.
        except (OSError, ValueError, KeyError) as error:
            raise EvaluationError(
                f"evaluation.lm_eval.tasks {', '.join(names)}: {one_line(error)}; use known tasks,"
                " and download their data first"
            ) from error
    return read_figures(results["results"], names)


def read_figures(results: dict[str, dict[str, object]], names: list[str]) -> Figures:
    """Read the results, without the members of groups that have their own figures."""
    have_own = all(any("," in key for key in results.get(name, {})) for name in names)
    wanted = set(names) if have_own else set(results)
    found: Figures = {}
    for task in sorted(wanted):
        values = results[task]
        for key, value in values.items():
            # Keys are metric and filter: `acc,none`, `acc_stderr,none`.
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            name = metric if how == "none" else f"{metric} ({how})"
            found[task, name] = _known(value), _known(values.get(f"{metric}_stderr,{how}"))
    return found


def _known(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@contextmanager
def _offline() -> Iterator[None]:
    with ExitStack() as undo:
        for module_name, names in SWITCHES.items():
            module = importlib.import_module(module_name)
            for name in names:
                # Set in the modules, which read the environment only once, at import.
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, True)
        yield
