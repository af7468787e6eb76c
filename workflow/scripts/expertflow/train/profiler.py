"""Profile some steps of a run with torch's profiler: a table of kernels and a trace."""

import gzip
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import torch
from msgspec.structs import replace
from torch.autograd.profiler_util import StringTable
from torch.profiler import ProfilerActivity, profile, supported_activities

from expertflow.core.errors import ExpertflowError
from expertflow.core.files import link_or_copy, remove, replacing
from expertflow.core.records import read_record, write_record
from expertflow.plan.records import TrainPlan
from expertflow.train.records import Kernel, KernelProfile, RunSummary
from expertflow.train.run import TrainingRun, one_line
from expertflow.train.timing import is_sampled

log = logging.getLogger(__name__)

PROFILE, KERNELS, TRACE = "profile", "kernels.json", "trace.json.gz"
NOT_ASKED = "training.profile_steps is 0"
# Stored in a state while steps are profiled, so that a process killed by profiling is not killed
# again on every resume.
BEGUN = (
    "it started and never finished: the process was killed while steps were profiled or read,"
    " perhaps for lack of memory"
)
AFTERWARDS = (
    "it was requested after this training had finished, which is not repeated for it; to train"
    " again with it, rm -r its folder in state/ and run with --forcerun train_expert"
)
# Steps of a session after which everything is compiled and memory is allocated.
N_WARM = 10
# A large model's micro-batch has some ten thousand events, kilobytes each until they are read.
MAX_MICRO_BATCHES = 16
NO_NEIGHBORS = "only the first step of the session came before"
NOT_A_DEVICE = "counted on CUDA devices only; this run was on the CPU"
# Prefixes of annotations on the device's time line above the kernels.
ANNOTATIONS = ("## ", "Optimizer.", "ProfilerStep")
# Names recorded, and characters per name; compiled code may have a kernel per shape.
N_KERNELS, N_CHARS = 1_000, 1_000
# About the most that a browser's viewer can load; training also waits while it is written.
MAX_TRACE_BYTES = 1 << 30
HOST = b'"host_name"'


class KernelLaunch(NamedTuple):
    """One launch of a kernel. ``self_us`` is its time without nested calls."""

    name: str
    start_us: float
    end_us: float
    self_us: float


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time during which any span runs.

    >>> busy_us([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def kernel_table(spans: Iterable[KernelLaunch]) -> tuple[Kernel, ...]:
    n_calls: defaultdict[str, int] = defaultdict(int)
    taken_us: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        n_calls[span.name] += 1
        taken_us[span.name] += span.self_us
    return tuple(
        Kernel(name=name[:N_CHARS], n_calls=n_calls[name], total_s=us / 1e6)
        for name, us in sorted(taken_us.items(), key=lambda item: (-item[1], item[0]))
    )


def device_spans(profiler: profile, device: str = "CUDA") -> list[KernelLaunch]:
    """Return a device's spans from the profiler's list; its tree takes kilobytes per event."""
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        return []
    # Names and times as in the tree: demangled C++, and counted from the start of the profile,
    # since a float of microseconds since 1970 would be off by a quarter of one.
    names, zero_ns, spans = StringTable(), results.trace_start_ns(), []
    for event in results.events():
        if event.device_type().name != device or event.is_user_annotation():
            continue
        name = names[event.name()]
        if event.is_hidden_event() or name.startswith(ANNOTATIONS):
            continue
        start_us, end_us = (event.start_ns() - zero_ns) / 1e3, (event.end_ns() - zero_ns) / 1e3
        spans.append(KernelLaunch(name, start_us, end_us, end_us - start_us))
    return spans


def operator_spans(profiler: profile) -> list[KernelLaunch]:
    spans = []
    for event in profiler.events() or ():  # type: ignore[no-untyped-call]
        is_mark = getattr(event, "is_user_annotation", False) or event.name.startswith(ANNOTATIONS)
        if event.device_type.name == "CUDA" or is_mark:
            continue
        start_us, end_us = float(event.time_range.start), float(event.time_range.end)
        spans.append(KernelLaunch(event.name, start_us, end_us, float(event.self_cpu_time_total)))
    return spans


def write_trace(profiler: profile, path: Path) -> tuple[int | None, str | None]:
    plain = path.with_name(f".{path.stem}.{os.getpid()}.partial")
    try:
        profiler.export_chrome_trace(str(plain))
        n_bytes = plain.stat().st_size
        if n_bytes > MAX_TRACE_BYTES:
            return None, (
                f"its {n_bytes / 2**20:,.0f} MiB exceed {MAX_TRACE_BYTES / 2**20:,.0f} MiB;"
                " lower training.profile_steps"
            )
        with replacing(path) as partial, partial.open("wb") as raw, plain.open("rb") as source:
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                # Readers of kernels need neither host name nor paths.
                lines = (line for line in source if not line.lstrip().startswith(HOST))
                packed.writelines(line.replace(str(plain).encode(), b"trace") for line in lines)
        return path.stat().st_size, None
    except (RuntimeError, MemoryError) as error:
        return None, f"the profiler did not write it: {one_line(error)}"
    finally:
        remove(plain)


class Window(NamedTuple):
    neighbors: range
    steps: range


def choose_window(plan: TrainPlan, first: int) -> Window | None:
    """Choose the steps to profile from step ``first`` on; null if the session is too short.

    In order of preference: the first ones after ``N_WARM`` steps, or earlier in a short session,
    with no step timed on the device and no save or evaluation between them; the first without timed
    steps; the first. A session's first step, which compiles, is never among them.
    """
    n_left = plan.n_steps - first
    n_steps = min(_n_allowed(plan), n_left - 1)
    if n_steps < 1:
        return None
    earliest, last = first + min(N_WARM, n_left - n_steps), plan.n_steps - n_steps
    starts = [*range(earliest, last + 1), *range(earliest - 1, first, -1)]
    quiet = (start for start in starts if _is_quiet(plan, range(start, start + n_steps)))
    plain = (start for start in starts if not any(map(is_sampled, range(start, start + n_steps))))
    start = next(quiet, next(plain, earliest))
    neighbors = range(max(first + 1, start - n_steps), start)
    return Window(neighbors, range(start, start + n_steps))


def _n_allowed(plan: TrainPlan) -> int:
    return min(plan.profile_steps, max(1, MAX_MICRO_BATCHES // plan.gradient_accumulation_steps))


def _is_quiet(plan: TrainPlan, steps: range) -> bool:
    due = (step % every == 0 for step in steps[1:] for every in (plan.eval_steps, plan.save_steps))
    return not any(map(is_sampled, steps)) and not any(due)


class StepProfiler:
    """Profiles some steps of a run once, in rank 0; a state with a profile keeps it.

    A profiler that fails or is interrupted does not affect the run.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._folder = run, run.state / PROFILE
        self._first = run.progress.step
        self._profiler: profile | None = None
        self._reason: str | None = None
        self._mark_s = self._neighbors_s = self._start_s = self._pause_s = 0.0
        self._window = choose_window(run.plan, self._first) if self._is_wanted() else None
        if self._window is not None:
            # No other measurement may fall on these steps.
            run.timer.left_out = self._window.steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        window, last = self._window, self._run.progress.step
        if self._profiler is not None and window is not None:
            if error is None:
                self._finish(self._profiler, window)
            else:
                self._drop(self._profiler, error)
        if error is None and (self._reason is not None or self._is_wanted()):
            too_short = f"this session ran only steps {self._first + 1} to {last}, too few"
            if window is not None:
                too_short = f"the run ended after step {last}, before step {window.steps.start + 1}"
            with suppress(OSError):
                self._write_reason(self._reason or too_short)

    def begin(self) -> None:
        window, step = self._window, self._run.progress.step
        if window is None:
            return
        if step == window.neighbors.start:
            self._mark_s = self._stepped_s()
        if step == window.steps.start:
            self._neighbors_s = self._stepped_s() - self._mark_s
            start_s = time.perf_counter()
            with self._apart():
                self._start()
            self._pause_s = time.perf_counter() - start_s

    def end(self) -> None:
        """Call after each step, before all other step hooks."""
        window, profiler = self._window, self._profiler
        if window is None or profiler is None or self._run.progress.step < window.steps.stop:
            return
        self._finish(profiler, window)

    def _is_wanted(self) -> bool:
        run = self._run
        wanted = run.plan.profile_steps > 0 and run.processes.is_first
        return wanted and not (self._folder / KERNELS).is_file()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with self._failing("the profiler did not start"):
            missing = set(activities) - supported_activities()  # type: ignore[no-untyped-call]
            if missing:
                names = ", ".join(sorted(activity.name for activity in missing))
                raise RuntimeError(f"this build of torch cannot profile {names}")
            self._write_reason(BEGUN)
            profiler = profile(activities=activities)
            profiler.start()
            self._profiler, self._start_s = profiler, self._stepped_s()

    def _finish(self, profiler: profile, window: Window) -> None:
        taken_s = self._stepped_s() - self._start_s
        self._profiler, start_s = None, time.perf_counter()
        with self._apart(), self._failing("the profiler failed"):
            profiler.stop()
            cuda = self._run.device.type == "cuda"
            spans = device_spans(profiler) if cuda else operator_spans(profiler)
            if not spans:
                raise RuntimeError("it recorded no kernels; CUPTI may be missing or forbidden")
            trace = write_trace(profiler, self._folder / TRACE)
            pause_s = self._pause_s + time.perf_counter() - start_s
            record = self._record(window, spans, taken_s, trace, pause_s)
            write_record(self._folder / KERNELS, record)
            log.info(
                "profiled steps %d to %d at %.3f s per step; training waited %.1f s for it",
                window.steps.start + 1, self._run.progress.step, taken_s / record.n_steps, pause_s,
            )  # fmt: skip

    def _record(
        self,
        window: Window,
        spans: list[KernelLaunch],
        taken_s: float,
        trace: tuple[int | None, str | None],
        pause_s: float,
    ) -> KernelProfile:
        run, (n_trace_bytes, no_trace) = self._run, trace
        on_cpu, n_neighbors = run.device.type == "cpu", len(window.neighbors)
        table, notes = kernel_table(spans), []
        rest, n_allowed = table[N_KERNELS:], _n_allowed(run.plan)
        if n_allowed < run.plan.profile_steps:
            n_micro = run.plan.gradient_accumulation_steps
            notes.append(
                f"at most {n_allowed} of the {run.plan.profile_steps} requested steps could be"
                f" profiled: each has {n_micro} micro-batches, and a profile of more than"
                f" {MAX_MICRO_BATCHES} in all may not fit into memory"
            )
        if rest:
            notes.append(f"the {len(rest):,} shortest of {len(table):,} names are added up as one")
        span_us = max(s.end_us for s in spans) - min(s.start_us for s in spans)
        busy = busy_us((s.start_us, s.end_us) for s in spans)
        unavailable = {"device_busy_fraction": NOT_A_DEVICE} if on_cpu else {}
        if not n_neighbors:
            unavailable["neighbor_step_s"] = NO_NEIGHBORS
        if no_trace is not None:
            unavailable |= dict.fromkeys(("trace", "n_trace_bytes"), no_trace)
        return KernelProfile(
            n_wanted_steps=run.plan.profile_steps,
            n_steps=run.progress.step - window.steps.start,
            first_step=window.steps.start + 1,
            device=run.device.type,
            wall_s=taken_s,
            n_neighbor_steps=n_neighbors,
            neighbor_step_s=self._neighbors_s / n_neighbors if n_neighbors else None,
            pause_s=pause_s,
            device_busy_fraction=None if on_cpu or not span_us else busy / span_us,
            n_kernels=len(table),
            kernels_s=sum(kernel.total_s for kernel in table),
            kernels=table[:N_KERNELS],
            rest=Kernel(
                name="",
                n_calls=sum(kernel.n_calls for kernel in rest),
                total_s=sum(kernel.total_s for kernel in rest),
            ),
            trace=TRACE if no_trace is None else None,
            n_trace_bytes=n_trace_bytes,
            unavailable=unavailable,
            notes=tuple(notes),
        )

    def _drop(self, profiler: profile, broken_by: BaseException | None) -> None:
        """Stop the profiler and discard its data: the run stopped during the profiled steps.

        The next session profiles again, unless memory ran out, which profiling may have caused.
        """
        self._profiler = None
        with suppress(RuntimeError, MemoryError):
            profiler.stop()
        if isinstance(broken_by, MemoryError):
            self._fail("host memory ran out while steps were profiled")
            return
        log.info("no profile: the run stopped during the profiled steps")
        with suppress(OSError):
            remove(self._folder / KERNELS)

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError, MemoryError) as error:
            self._fail(f"{what}: {one_line(error)}")

    def _fail(self, reason: str) -> None:
        """Record the failure immediately, so that a resumed session does not repeat it."""
        log.warning("no profile: %s", reason)
        self._reason = reason
        with suppress(OSError):
            self._write_reason(reason)

    def _write_reason(self, reason: str) -> None:
        n_wanted, device = self._run.plan.profile_steps, self._run.device.type
        record = KernelProfile(n_wanted_steps=n_wanted, device=device, reason=reason)
        write_record(self._folder / KERNELS, record)

    def _stepped_s(self) -> float:
        """Return the run's seconds of stepping so far, after waiting for the device."""
        clock, device = self._run.clock, self._run.device
        if device.type == "cuda":
            with clock.part("steps"):
                torch.cuda.synchronize(device)
        return clock.seconds["steps"]

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Book a block separately from the steps and from their shared time between fetches."""
        start_s = time.perf_counter()
        try:
            with self._run.clock.part("other"):
                yield
        finally:
            self._run.fetched_at_s += time.perf_counter() - start_s


def publish_profile(state: Path, target: Path, run: RunSummary, *, n_wanted: int) -> None:
    record = _read_profile(state / PROFILE, run, n_wanted)
    with replacing(target) as partial:
        partial.mkdir()
        if record.trace is not None:
            link_or_copy(state / PROFILE / record.trace, partial / TRACE)
        write_record(partial / KERNELS, record)


def _read_profile(folder: Path, run: RunSummary, n_wanted: int) -> KernelProfile:
    nothing = KernelProfile(n_wanted_steps=n_wanted, device=run.device)
    if not (folder / KERNELS).is_file():
        lost = "it is missing from the state"
        reason = lost if run.profile_steps else AFTERWARDS if n_wanted else NOT_ASKED
        return replace(nothing, reason=reason)
    try:
        record = read_record(KernelProfile, folder / KERNELS)
    except ExpertflowError as error:
        log.warning("the profile is left out: %s", error)
        return replace(nothing, reason=f"the state's copy cannot be read ({error})")
    trace = folder / TRACE
    if record.trace is None or (trace.is_file() and trace.stat().st_size == record.n_trace_bytes):
        return record
    reason = "the state's copy is no longer complete"
    log.warning("%s is left out: %s", trace, reason)
    missing = record.unavailable | dict.fromkeys(("trace", "n_trace_bytes"), reason)
    return replace(record, trace=None, n_trace_bytes=None, unavailable=missing)
