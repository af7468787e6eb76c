"""Refuse settings of an expert that contradict each other, or that nothing reads."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from expertflow.config.read_yaml import Settings, suggest_name
from expertflow.core.errors import ConfigError, EvaluationError
from expertflow.core.records import from_json
from expertflow.core.settings import without_auto
from expertflow.data.settings import FieldCheck
from expertflow.data.shapes import parse_template
from expertflow.data.sources.registry import source_kinds
from expertflow.evaluate.scoring import find_task, is_own_task, task_names
from expertflow.plan.settings import TrainingSection
from expertflow.plan.switches import check_settings

# The keys that only go with a list of turns.
OF_MESSAGES = ("tools", "role_key", "content_key", "roles")


def check_durations(manifest: Settings, *, where: str) -> None:
    """Refuse a duration that YAML made a number of, before the schema does without the reason."""
    claims = manifest.get("claims")
    for claim in claims if isinstance(claims, list) else []:
        duration = claim.get("duration") if isinstance(claim, dict) else None
        if isinstance(duration, int | float):
            raise ConfigError(
                f"{where}: claims.duration is the number {duration}, which is what YAML makes of"
                ' 46:47 and the like; quote it: "46:47"'
            )


def refuse_idle_keys(expert: Settings, *, where: str) -> None:
    """Refuse the first key of a source that would do nothing; call before filling in defaults."""
    for source in expert["sources"]:
        for key, problem in _idle(source):
            raise ConfigError(f"{where}: source {source['name']}: {key} {problem}")
        with _name_place(f"{where}: source {source['name']}"):
            source_kinds()[source["kind"]].option_type.from_manifest(source.get("options", {}))
    if _is_set(expert.get("data", {}), "max_per_category"):
        if not any(_is_set(source, "category") for source in expert["sources"]):
            raise ConfigError(
                f"{where}: data.max_per_category has no effect, as no source names the field to"
                " count by; add category to a source, or remove it"
            )


def _idle(source: Settings) -> Iterator[tuple[str, str]]:
    kinds = source_kinds()
    kind = kinds[source["kind"]]
    for key in source:
        readers = [name for name, one in kinds.items() if key in one.required + one.optional]
        if readers and kind.kind not in readers and _is_set(source, key):
            only = " and ".join(readers)
            yield key, f"is read of {only} sources only, not of {kind.kind}; remove it"
    whole = next((key for key in ("text", "messages") if _is_set(source, key)), None)
    for key in ("prompt", "completion"):
        if whole is not None and _is_set(source, key):
            yield key, f"has no effect beside {whole}; remove one of them"
    for key in OF_MESSAGES:
        if whole != "messages" and _is_set(source, key):
            yield key, "has no effect without messages; remove it, or name the field of the turns"


def _is_set(settings: Settings, key: str) -> bool:
    return settings.get(key) not in (None, [], {})


def check_contradictions(
    expert: Settings, *, where: str, bundled: Collection[str] | None = None
) -> None:
    """Check complete settings; ConfigError names the key and the fix.

    ``bundled``, of an opened bundle, names user files that may be absent; no code in it is run.
    """
    from_bundle, bundled = bundled is not None, bundled or ()
    training = from_json(TrainingSection, without_auto(expert["training"]), where=where)
    check_settings(training, name=lambda setting: f"{where}: training.{setting}")
    if training.torch_compile_mode != "default" and training.packing == "none":
        raise ConfigError(
            f"{where}: training.torch_compile_mode {training.torch_compile_mode} wants rows of one"
            " length, and training.packing is none; use bfd, or mode default"
        )
    # New rows of the embedding learn only if it is trained itself, with the head.
    whole = training.lora.modules_to_save if training.lora else ()
    if expert["data"]["added_tokens"] and training.method != "full" and len(set(whole)) < 2:
        raise ConfigError(
            f"{where}: data.added_tokens would stay untrained beside the adapter; set"
            " training.lora.modules_to_save to [embed_tokens, lm_head], or use method full"
        )
    if expert["acceptance"]:
        # It reads the declaration of the report, for 50 ms.
        from expertflow.config.bars import check_bars

        check_bars(expert["acceptance"], where=where)
    names = [source["name"] for source in expert["sources"]]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where}: two sources are named {repeated[0]!r}; rename one")
    for benchmark in expert["data"]["benchmarks"]:
        with _name_place(f"{where}: benchmark {benchmark['path']}"):
            parse_template(benchmark["text"])
        if benchmark["path"] not in bundled and not Path(benchmark["path"]).is_file():
            raise ConfigError(
                f"{where}: data.benchmarks names {benchmark['path']}, which is not there; correct"
                " the path"
            )
    template = expert["data"]["chat_template"]
    if "{" in template:
        raise ConfigError(
            f"{where}: data.chat_template is {template[:40]!r}…, a template itself; write it to a"
            " file, and name that"
        )
    # A name without slash and ending is one of the tokenizer's own templates.
    is_path = "/" in template or bool(Path(template).suffix)
    if is_path and template not in bundled and not Path(template).expanduser().is_file():
        raise ConfigError(
            f"{where}: data.chat_template is {template!r}, and no such file is there; use auto,"
            " chatml, the path of a Jinja file, or a name that the tokenizer gives a template"
        )
    # Loading an own task runs its code, which a bundle's user may not have allowed.
    if not (from_bundle and is_own_task(expert["evaluation"]["task"])):
        check_task(expert["evaluation"], where)
    for source in expert["sources"]:
        _check_source(source, task=expert["evaluation"]["task"], where=where)


def _check_source(source: Settings, *, task: str, where: str) -> None:
    for key in ("prompt", "completion", "text"):
        # An empty text has no fields, and passes.
        with _name_place(f"{where}: source {source['name']}, {key}"):
            parse_template(source.get(key) or "")
    if checks := from_json(tuple[FieldCheck, ...], source["checks"], where=where):
        from expertflow.data.checks.registry import build_checks

        with _name_place(where):
            build_checks(checks, source=source["name"])
    if "text" in source and task != "held_out_loss":
        raise ConfigError(
            f"{where}: evaluation.task {task} asks questions and source {source['name']} has"
            " none, only text; use held_out_loss, or prompt and completion"
        )


@contextmanager
def _name_place(where: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, EvaluationError) as error:
        raise ConfigError(f"{where}: {error}") from error


def check_task(evaluation: Settings, where: str) -> None:
    """Refuse a task without what it reads: training would be over before it is missed.

    An artifact of another task is no mistake, as presets and overrides change the task alone; nor
    is another task's field where nothing is scored.
    """
    task, fields, artifacts = evaluation["task"], evaluation["fields"], evaluation["artifacts"]
    with _name_place(f"{where}: evaluation.task"):
        scorer = find_task(task)
    # The record's field names the artifact, whatever that is called.
    by_record = task == "sql_execution" and "database" in fields
    if fields:
        known = frozenset(scorer.fields) if scorer else _read_by_any("fields")
        _refuse_unknown(fields, known, known, f"{where}: evaluation.fields", task)
    own = frozenset(scorer.artifacts if scorer else ())
    if not by_record and not own.issuperset(artifacts):
        known = own | _read_by_any("artifacts")
        _refuse_unknown(artifacts, known, own, f"{where}: evaluation.artifacts", task)
    for needed in scorer.required if scorer else ():
        ways = [way.split(".") for way in needed.split(" or ")]
        there = (by_record and artifacts) or any(name in evaluation[key] for key, name in ways)
        if not there:
            raise ConfigError(
                f"{where}: evaluation.task {task} reads evaluation.{needed}, which is not set;"
                " set it, or use another task"
            )


def _read_by_any(what: str) -> frozenset[str]:
    tasks = filter(None, map(find_task, task_names()))
    return frozenset[str]().union(*(getattr(task, what) for task in tasks))


def _refuse_unknown(
    names: Collection[str], known: frozenset[str], own: frozenset[str], place: str, task: str
) -> None:
    for name in sorted(set(names) - known, key=str):
        takes = f"task {task} takes {', '.join(sorted(own)) or 'none'}"
        raise ConfigError(f"{place}.{name} is read by nothing; {suggest_name(name, known, takes)}")
