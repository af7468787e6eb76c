"""Attach the workflow to a run of its own Snakefile, or of one that uses it as a module.

In a module, Snakemake ignores ``configfile``, ``onstart``, ``onsuccess`` and ``onerror``. So what
every run needs is done here: checks while the Snakefile is read, and hooks registered when the
graph is built, after those of the including Snakefile, which run, too.
"""

import atexit
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from snakemake.persistence.file import FilePersistence  # type: ignore[import-untyped]
from snakemake.resources import Resources  # type: ignore[import-untyped]

from expertflow.chain import STAGES
from expertflow.config import guard, recovery, run_lock
from expertflow.config.code_digest import SCRIPTS
from expertflow.config.expert import RunContext, check_writable
from expertflow.config.read_yaml import Settings, read_yaml
from expertflow.config.workflow import Workflow

# How a rule calls its script; a module's rule may have another name.
SCRIPT = re.compile(r'"\$EXPERTFLOW"/(\w+)\.py')
REPORT = re.compile(r"results/[^/]+/report\.json")
# Options with which Snakemake runs nothing, besides --dry-run.
LOOKS = {
    "--dag", "--delete-all-output", "--detailed-summary", "-D", "--filegraph", "--lint", "--list",
    "-l", "--report", "--rulegraph", "--summary", "-S", "--touch", "-t", "--unlock",
}  # fmt: skip
# All attached in this process: a Snakefile is read once for each ``use rule``.
_attached: list[Workflow] = []


@guard.one_line
def attach(run: Any, config: Settings, basedir: Path) -> Workflow:
    """Return the bridge between a Snakefile in ``basedir`` and ``run``, Snakemake's workflow."""
    # Not main: a job that Snakemake starts as a separate process, which reads this file, too.
    main, is_dry = run.is_main_process, run.output_settings.dryrun
    limit = getattr(run.global_resources.get("gpu"), "value", None)
    looks = only_looks(sys.argv[1:], dryrun=is_dry)
    paths = run.modifier.path_modifier
    if paths.prefix or paths.modifies_prefixes:
        guard.fail(
            "results/ and state/ take no prefix; remove it from the module, and use --directory"
        )
    overrides = _read_overrides(run, config)
    if run.modifier.skip_configfile:
        config = {**read_yaml(basedir / "config" / "config.yaml"), **config}
    # Refuse repeated keys, of which Snakemake takes the last, except in an including Snakefile's.
    for path in run.configfiles if main and len(run.modifier_stack) == 1 else ():
        read_yaml(Path(path))
    if main:
        # On a full disk, --delete-all-output makes room.
        check_writable(Path(".snakemake"), needs_room=is_dry or not looks)
        recovery.remove_corrupt_records(Path("results"), looks=looks)
        recovery.note_missing_files(Path("results"))
    wf = Workflow(
        RunContext(
            config=config,
            main=main,
            told=overrides,
            looks=looks,
            gpu_limit=limit,
            elsewhere=run.resource_settings.nodes is not None,
            checks=is_dry or not looks,
        ),
        # Jobs of a group must agree on every text, so only its training gets one.
        shows_forecast=lambda rule: is_dry and has_forecast(rule, run.group_settings),
        # Parsing all modules takes a second.
        reads_code=cache(lambda: not is_dry or has_records(run.persistence)),
        on_first_use=lambda: _register_hooks(run),
        # Snakemake may have looked into the folder before the lock was written there.
        on_lock=lambda path: run.iocache.exists_local.__setitem__(path, True),
    )
    guard.set_environment(SCRIPTS, main=main)
    if main:
        run_lock.sign_jobs()
        # To Snakemake, a resource that is undeclared, or 0, is unlimited.
        if not looks and not limit:
            guard.fail(
                "resource gpu is not limited, so any number of trainings could start at once; add"
                " --resources gpu=1, or use the profiles next to the Snakefile"
            )
        note_missing_table(run.output_settings, basedir)
        _attached.append(wf)
    return wf


def add_forecasts(run: Any, wf: Workflow) -> None:
    """Add a resource to the rules, by which Snakemake passes forecasts to a dry run's logger."""
    for rule in run.rules:
        found = SCRIPT.search(rule.shellcmd or "")
        stage = found and found[1]
        # Rules of a module that was read before have theirs, by its own configuration.
        is_new = stage in STAGES and "forecast" not in rule.resources
        if stage and is_new and "expert" in rule.wildcard_names:
            rule.resources.update(Resources.from_mapping({"forecast": wf.forecast(stage)}))


def has_forecast(rule: str, groups: Any) -> bool:
    # A module's rules have names of their own before ours.
    is_alone = not any(name.endswith(rule) for name in groups.overwrite_groups)
    return not groups.group_components and (rule == "train_expert" or is_alone)


def has_records(persistence: Any) -> bool:
    """Return whether Snakemake may have recorded a job in this folder; if not, all jobs run."""
    is_known = isinstance(persistence, FilePersistence)
    return not is_known or any((Path(persistence.path) / "metadata").iterdir())


def _read_overrides(run: Any, config: Settings) -> Settings:
    """Return the command line's part of a configuration, which may be nested below a key."""
    # A module's configuration is part of the complete one, under a key that its user chose.
    overrides = run.config_settings.overwrite_config
    complete = run.modifier_stack[0].globals["config"]
    keys = [key for key, part in complete.items() if part is config]
    return dict(overrides.get(keys[0], {}) if keys else overrides)


def _register_hooks(run: Any) -> None:
    if not run.is_main_process or getattr(run, "has_hooks_of_expertflow", False):
        return
    # If attached several times, a run would print everything as many times.
    run.has_hooks_of_expertflow = True
    recovery.use_sidecars(run.persistence, stage_of)
    if run.execution_settings is not None and run.execution_settings.no_hooks:
        guard.fail("--no-hooks would disable the locks on experts; run without it")
    before, after, otherwise = run._onstart, run._onsuccess, run._onerror

    def start(log: Any) -> None:
        _before_first_job(run)
        before(log)

    def success(log: Any) -> None:
        after(log)
        experts = [expert for wf in _attached for expert in wf.experts]
        # The process's start, because every report of this run was made after it.
        start_s = psutil.Process().create_time()
        if reports := reports_to_sum_up(run.dag_settings.targets, experts, since_s=start_s):
            subprocess.run([sys.executable, SCRIPTS / "show_report.py", *reports], check=False)

    def failure(log: Any) -> None:
        otherwise(log)
        # Read now, because Snakemake leaves the folder of the run; printed after its own last
        # message, which does not say what is wrong.
        if message := guard.describe_failures(run):
            atexit.register(print, message, file=sys.stderr)

    run.onstart(start)
    run.onsuccess(success)
    run.onerror(failure)


def _name_experts_of_groups(plugin: Any) -> None:
    """Make the Slurm plugin name the expert in the comment of a group, as it does for single jobs.

    All jobs of a run share a name, which the plugin uses to query their states.
    """
    describe = plugin.get_job_wildcards

    def name(job: Any) -> str:
        jobs = job.jobs if job.is_group() else ()
        experts = {str(one.wildcards_dict.get("expert", "")) for one in jobs}
        return describe(job) or "_".join(sorted(experts - {""}))

    plugin.get_job_wildcards = name


def _before_first_job(run: Any) -> None:
    if run.execution_settings.keep_incomplete:
        guard.fail(
            "--keep-incomplete would record half-written outputs as complete; run without it:"
            " training resumes from state/ anyway"
        )
    slurm_run = None
    if run.executor_plugin.name == "slurm":
        if shutil.which("sbatch") is None:
            guard.fail(
                "profiles/slurm submits with sbatch, which is not found here; run Snakemake on a"
                " login node of the cluster, or leave the profile out"
            )
        _name_experts_of_groups(importlib.import_module("snakemake_executor_plugin_slurm"))
        # The name of all jobs of this run; the plugin shows it nowhere else before it submits.
        slurm_run = run.scheduler._executor.run_uuid
    if run.local_exec:
        # To limit its rate, Snakemake starts a timer each time it polls for jobs, and each timer
        # polls again: trainings waiting for one card would cost a fifth of a core.
        run.scheduler.job_rate_limiter = None
    ours = [job for job in run.dag.needrun_jobs() if stage_of(job)]
    run_lock.hold_experts(ours, slurm_run=slurm_run)


def stage_of(job: Any) -> str | None:
    """Return the stage that a job runs; null for jobs of other workflows."""
    found = SCRIPT.search(job.rule.shellcmd or "")
    return found and found[1]


def only_looks(arguments: Sequence[str], *, dryrun: bool) -> bool:
    """Return whether Snakemake was started only to show something.

    Snakemake itself does not say so until it has read the complete Snakefile.
    """
    # --touch=x or --touch: the part before the sign decides.
    options = {argument.partition("=")[0] for argument in arguments}
    return dryrun or bool(options & LOOKS and "--report-after-run" not in options)


def note_missing_table(settings: Any, basedir: Path) -> None:
    """Explain how to get the table of hours and dollars if a dry run will end without it."""
    if not settings.dryrun or "expertflow" in settings.log_handler_settings:
        return
    if importlib.util.find_spec("snakemake_logger_plugin_expertflow") is None:
        how = f"pip install --no-build-isolation {basedir}/workflow/logger"
    else:
        how = "add --logger expertflow, or logger: [expertflow] to your profile"
    guard.note(f"this dry run ends without hours and dollars; {how}")


def reports_to_sum_up(
    targets: Iterable[Any], experts: Iterable[str], *, since_s: float
) -> list[str]:
    """Pick the reports to end a run with: those asked for by name, or made since."""
    named = [str(target) for target in targets if REPORT.fullmatch(str(target))]
    places = [Path("results", expert, "report.json") for expert in experts]
    made = [str(p) for p in places if p.is_file() and p.stat().st_mtime >= since_s]
    return list(dict.fromkeys([*named, *made]))
