"""Profile some steps of a run with torch's profiler: a table of kernels and a trace."""

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile, schedule

from expertflow.core.errors import ExpertflowError
from expertflow.core.files import link_or_copy, replacing
from expertflow.core.records import read_record, write_record
from expertflow.train.records import Kernel, KernelProfile
from expertflow.train.run import TrainingRun, one_line

log = logging.getLogger(__name__)

PROFILE, KERNELS, TRACE = "profile", "kernels.json", "trace.json.gz"
NOT_ASKED = "training.profile_steps is 0"
# Stored in a state while steps are profiled, so that a process killed by profiling is not killed
# again on every resume.
BEGUN = (
    "it started and never finished: the process ended while steps were profiled or read, perhaps"
    " for lack of memory"
)
NO_PROFILE = (
    "the training ended too early, or before it was requested; to train again with it, rm -r its"
    " folder in state/ and run with --forcerun train_expert"
)
# Steps of a session after which everything is compiled and memory is allocated.
N_WARM = 10
# A large model's micro-batch has some ten thousand events, kilobytes each until they are read.
MAX_MICRO_BATCHES = 16
# Prefixes of annotations, which are not operators or kernels.
ANNOTATIONS = ("## ", "Optimizer.", "ProfilerStep")


def list_kernels(profiler: profile, device: str) -> tuple[Kernel, ...]:
    """Return the device's kernels, or a CPU's operators by their own time, longest first."""
    found = []
    for row in profiler.key_averages():
        is_mark = row.is_user_annotation or row.key.startswith(ANNOTATIONS)
        if row.device_type.name == device.upper() and not is_mark:
            own_us = row.self_cpu_time_total if device == "cpu" else row.self_device_time_total
            found.append(Kernel(name=row.key, n_calls=row.count, total_s=own_us / 1e6))
    return tuple(sorted(found, key=lambda kernel: (-kernel.total_s, kernel.name)))


class StepProfiler:
    """Profiles some steps of a run once, in rank 0; a state with a profile keeps it.

    A profiler that fails does not affect the run.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._folder = run, run.state / PROFILE
        self._profiler: profile | None = None
        self._stepped_s = self._pause_s = 0.0
        n_left = run.plan.n_steps - run.progress.step
        n_fitting = max(1, MAX_MICRO_BATCHES // run.plan.gradient_accumulation_steps)
        # A session's first step compiles, and the one before the profiled ones warms up.
        n_steps = min(run.plan.profile_steps, n_fitting, n_left - 2)
        is_wanted = run.processes.is_first and not (self._folder / KERNELS).is_file()
        self._n_steps = max(0, n_steps) if is_wanted else 0
        self._start = run.progress.step + min(N_WARM, n_left - 1 - self._n_steps)
        if self._n_steps:
            # No other measurement may fall on these steps.
            run.clock.left_out = range(self._start, self._start + 1 + self._n_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Still there if the run stopped during the profiled steps.
        self._drop()

    def step(self) -> None:
        """Start, continue or finish the profile; call after each step, before its other hooks."""
        run, n_past = self._run, self._run.progress.step - self._start
        if self._profiler is None and not (self._n_steps and n_past == 0):
            return
        if run.device.type == "cuda" and n_past in (0, 1, 1 + self._n_steps):
            # Kernels that other steps queued are not the profile's.
            with run.clock.part("steps"):
                torch.cuda.synchronize(run.device)
        start_s = time.perf_counter()
        with run.clock.part("other"):
            try:
                self._advance(n_past, start_s)
            except Exception as error:  # noqa: BLE001 - whatever fails, the training continues
                self._fail(one_line(error))
        paused_s = time.perf_counter() - start_s
        self._pause_s += paused_s
        # Steps share the time since the last fetch, which this is not.
        run.fetched_at_s += paused_s

    def _advance(self, n_past: int, start_s: float) -> None:
        run, stepped_s = self._run, self._run.clock.seconds["steps"]
        if self._profiler is None:
            self._write(reason=BEGUN)
            activities = {ProfilerActivity.CPU}
            if run.device.type == "cuda":
                activities.add(ProfilerActivity.CUDA)
            steps = schedule(wait=0, warmup=1, active=self._n_steps, repeat=1)
            self._profiler = profile(activities=activities, schedule=steps)
            self._profiler.start()
            return
        self._profiler.step()
        if n_past == 1:
            self._stepped_s = stepped_s
        if n_past < 1 + self._n_steps:
            return
        kernels = list_kernels(self._profiler, run.device.type)
        if not kernels:
            raise RuntimeError("it recorded no kernels; CUPTI may be missing or forbidden")
        with replacing(self._folder / TRACE) as partial:
            self._profiler.export_chrome_trace(str(partial))
        self._drop()
        pause_s = self._pause_s + time.perf_counter() - start_s
        self._write(
            n_steps=self._n_steps,
            first_step=self._start + 2,
            wall_s=stepped_s - self._stepped_s,
            pause_s=pause_s,
            kernels=kernels,
            trace=TRACE,
            n_trace_bytes=(self._folder / TRACE).stat().st_size,
        )
        log.info("profiled %d steps; training waited %.1f s for it", self._n_steps, pause_s)

    def _drop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with suppress(Exception):
                profiler.stop()

    def _fail(self, reason: str) -> None:
        """Record the failure immediately, so that a resumed session does not repeat it."""
        self._drop()
        log.warning("no profile: %s", reason)
        with suppress(OSError):
            self._write(reason=f"the profiler failed: {reason}")

    def _write(self, **known: Any) -> None:
        record = KernelProfile(device=self._run.device.type, **known)
        write_record(self._folder / KERNELS, record)


def publish_profile(state: Path, target: Path, *, device: str, n_wanted: int) -> None:
    folder = state / PROFILE
    record = KernelProfile(device=device, reason=NO_PROFILE if n_wanted else NOT_ASKED)
    try:
        if (folder / KERNELS).is_file():
            record = read_record(KernelProfile, folder / KERNELS)
    except ExpertflowError as error:
        record = replace(record, reason=f"the state's copy cannot be read ({error})")
    if record.trace is not None and not (folder / record.trace).is_file():
        record = KernelProfile(device=device, reason="its trace is missing from the state")
    with replacing(target) as partial:
        partial.mkdir()
        if record.trace is not None:
            link_or_copy(folder / record.trace, partial / record.trace)
        write_record(partial / KERNELS, record)
