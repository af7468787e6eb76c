"""Refuse settings of an expert that contradict each other, or that nothing reads."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from expertflow.config.read_yaml import Settings, suggest_name
from expertflow.core.errors import ConfigError, EvaluationError, list_faults
from expertflow.core.records import from_json
from expertflow.core.settings import name_of, without_auto
from expertflow.data.settings import FieldCheck
from expertflow.data.shapes import parse_template
from expertflow.data.sources.registry import source_kinds
from expertflow.evaluate.records import LM_EVAL_FILES
from expertflow.evaluate.scoring import find_task, is_own_task, task_names
from expertflow.plan.settings import TrainingSection
from expertflow.plan.switches import check_settings

# The schedule with a decay of its own.
WITH_DECAY = "warmup_stable_decay"
# Keys that only apply to a list of turns.
OF_MESSAGES = ("tools", "role_key", "content_key", "roles")


def find_idle_keys(expert: Settings) -> Iterator[str]:
    """Yield a line for each key that would do nothing; call before filling in defaults."""
    for source in expert["sources"]:
        place = f"source {source['name']}: "
        yield from (f"{place}{key} {problem}" for key, problem in _idle(source))
        from_manifest = source_kinds()[source["kind"]].option_type.from_manifest
        yield from _raised(place, from_manifest, source.get("options", {}))
    if _is_set(expert.get("data", {}), "max_per_category"):
        if not any(_is_set(source, "category") for source in expert["sources"]):
            yield (
                "data.max_per_category has no effect, because no source names the field to"
                " count by; add category to a source, or remove it"
            )


def _raised(place: str, check: Callable[..., object], *arguments: Any) -> Iterator[str]:
    """Yield the faults that a check raises."""
    try:
        check(*arguments)
    except (ConfigError, EvaluationError) as error:
        yield from (f"{place}{fault}" for fault in list_faults(error))


def _idle(source: Settings) -> Iterator[tuple[str, str]]:
    kinds = source_kinds()
    kind = kinds[source["kind"]]
    for key in source:
        readers = [name for name, one in kinds.items() if key in one.required + one.optional]
        if readers and kind.kind not in readers and _is_set(source, key):
            only = " and ".join(readers)
            yield key, f"applies only to {only} sources, not to {kind.kind}; remove it"
    text_key = next((key for key in ("text", "messages") if _is_set(source, key)), None)
    for key in ("prompt", "completion"):
        if text_key is not None and _is_set(source, key):
            yield key, f"has no effect with {text_key}; remove one of them"
    for key in OF_MESSAGES:
        if text_key != "messages" and _is_set(source, key):
            yield key, "has no effect without messages; remove it, or set messages"


def _is_set(settings: Settings, key: str) -> bool:
    return settings.get(key) not in (None, [], {})


def find_idle_overrides(told: Settings, complete: Settings) -> Iterator[str]:
    """Yield a line for each training setting of the command line that another one silences."""
    training = from_json(TrainingSection, without_auto(complete), where="training")
    section, packing, low = TrainingSection, training.packing, training.warmup_steps_min
    is_pinned = low == training.warmup_steps_max and not training.override_min_warmup
    is_alone = training.world_size == 1 and training.parallel != "ddp"
    by_thread = packing != "none" and training.loader is None
    schedule = training.lr_scheduler_type
    silenced: tuple[tuple[Any, bool, str], ...] = (
        (section.lora, training.method == "full", "method full; use lora"),
        (section.lr_decay_ratio, schedule != WITH_DECAY, f"{schedule}; use {WITH_DECAY}"),
        (
            section.torch_compile_mode,
            training.torch_compile is False,
            "torch_compile false; use auto",
        ),
        (section.overflow, packing == "concat", "packing concat; use bfd"),
        (section.parallel, is_alone, "world_size 1; raise that"),
        (section.warmup_ratio, is_pinned, f"{low} warmup_steps_min and _max; set those"),
        (section.dataloader_num_workers, by_thread, "packed rows; add loader: workers"),
    )
    for setting, is_idle, why in silenced:
        if is_idle and told.get(name_of(setting)):
            yield f"training.{name_of(setting)} has no effect with {why}, or remove it"


def find_contradictions(
    expert: Settings, *, bundled: Collection[str] | None = None
) -> Iterator[str]:
    """Yield a line with key and fix for each contradiction in complete settings.

    ``bundled`` names user files of an opened bundle, which may be absent; none of them is run.
    """
    from_bundle, bundled = bundled is not None, bundled or ()
    training = from_json(TrainingSection, without_auto(expert["training"]), where="training")
    yield from _raised("", check_settings, training, "training.{}".format)
    if training.torch_compile_mode != "default" and training.packing == "none":
        yield (
            f"training.torch_compile_mode {training.torch_compile_mode} needs rows of one length,"
            " but training.packing is none; use bfd, or mode default"
        )
    # New embedding rows learn only if the embedding itself is trained, with the head.
    modules = training.lora.modules_to_save if training.lora else ()
    if expert["data"]["added_tokens"] and training.method != "full" and len(set(modules)) < 2:
        yield (
            "data.added_tokens would stay untrained with an adapter; set"
            " training.lora.modules_to_save to [embed_tokens, lm_head], or use method full"
        )
    names = [source["name"] for source in expert["sources"]]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two sources are named {name!r}; rename one"
    for benchmark in expert["data"]["benchmarks"]:
        yield from _raised(f"benchmark {benchmark['path']}: ", parse_template, benchmark["text"])
        if benchmark["path"] not in bundled and not Path(benchmark["path"]).is_file():
            yield (
                f"data.benchmarks names {benchmark['path']}, which does not exist; correct the path"
            )
    template = expert["data"]["chat_template"]
    # A name without a slash or an extension is one of the tokenizer's own templates.
    is_path = "/" in template or bool(Path(template).suffix)
    if "{" in template:
        yield (
            f"data.chat_template is {template[:40]!r}…, a template itself; save it to a file, and"
            " set its path"
        )
    elif is_path and template not in bundled and not Path(template).expanduser().is_file():
        yield (
            f"data.chat_template is {template!r}, but there is no such file; use auto, chatml, the"
            " path of a Jinja file, or the name of one of the tokenizer's templates"
        )
    # Loading a task of the user's runs its code, which a bundle's user may not have allowed.
    if not (from_bundle and is_own_task(expert["evaluation"]["task"])):
        yield from find_task_faults(expert["evaluation"])
    for task in (expert["evaluation"]["lm_eval"] or {}).get("tasks", ()):
        if task.endswith(LM_EVAL_FILES) and not Path(task).is_file():
            yield (
                f"evaluation.lm_eval.tasks names {task}, which does not exist; correct the path, or"
                " copy the file here, because a bundle does not carry it"
            )
    for source in expert["sources"]:
        yield from _source_faults(source, task=expert["evaluation"]["task"])
    if expert["acceptance"]:
        # It reads the declaration of the report, which takes 50 ms.
        from expertflow.config.bars import find_wrong_bars

        yield from find_wrong_bars(expert["acceptance"])


def _check_template(key: str, template: str) -> None:
    names_field = any(name for _, name, _ in parse_template(template))
    word = template.strip("{ }")
    # A question may be the same for all, but not a word that could be a field.
    if template and not names_field and (key != "prompt" or word.isidentifier()):
        example = word if word.isidentifier() else "field"
        raise ConfigError(f"template {template[:40]!r}: it names no field; write {{{example}}}")


def _source_faults(source: Settings, *, task: str) -> Iterator[str]:
    name = source["name"]
    for key in ("prompt", "completion", "text"):
        yield from _raised(f"source {name}, {key}: ", _check_template, key, source.get(key) or "")
    if source["checks"]:
        from expertflow.data.checks.registry import build_checks

        for check in from_json(tuple[FieldCheck, ...], source["checks"], where=f"source {name}"):
            yield from _raised("", partial(build_checks, source=name), (check,))
    if "text" in source and task != "held_out_loss":
        yield (
            f"evaluation.task {task} asks questions, but source {name} has only text; use"
            " held_out_loss, or set prompt and completion"
        )


def find_task_faults(evaluation: Settings) -> Iterator[str]:
    """Yield the inputs that a task lacks, which would otherwise be noticed only after training.

    An artifact of another task is not a fault, because presets and overrides may change only the
    task; nor is another task's field where nothing is scored.
    """
    task, fields, artifacts = evaluation["task"], evaluation["fields"], evaluation["artifacts"]
    try:
        scorer = find_task(task)
    except EvaluationError as error:
        yield f"evaluation.task: {error}"
        return
    # The record's field names the artifact, whatever its key.
    by_record = task == "sql_execution" and "database" in fields
    unread: list[str] = []
    if fields:
        known = frozenset(scorer.fields) if scorer else _read_by_any("fields")
        unread += _unread("fields", fields, known, known, task)
    own = frozenset(scorer.artifacts if scorer else ())
    if not by_record and not own.issuperset(artifacts):
        known = own | _read_by_any("artifacts")
        unread += _unread("artifacts", artifacts, known, own, task)
    yield from unread
    for needed in scorer.required if scorer and not unread else ():
        ways = [way.split(".") for way in needed.split(" or ")]
        is_set = (by_record and artifacts) or any(name in evaluation[key] for key, name in ways)
        if not is_set:
            yield (
                f"evaluation.task {task} reads evaluation.{needed}, which is not set; set it, or"
                " use another task"
            )


def _read_by_any(what: str) -> frozenset[str]:
    tasks = filter(None, map(find_task, task_names()))
    return frozenset[str]().union(*(getattr(task, what) for task in tasks))


def _unread(
    key: str, names: Collection[str], known: Collection[str], own: Collection[str], task: str
) -> Iterator[str]:
    takes = f"task {task} takes {', '.join(sorted(own)) or 'none'}"
    for name in sorted({*names}.difference(known), key=str):
        hint = suggest_name(name, known, takes)
        yield f"evaluation.{key}.{name} has no effect; {hint}"
