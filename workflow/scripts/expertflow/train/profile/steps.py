"""Watch some steps of a run with torch's profiler: a table of kernels, and a trace to look at."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from expertflow.core.files import remove
from expertflow.core.records import write_record
from expertflow.train.profile.files import BEGUN, KERNELS, PROFILE, TRACE, nothing_watched
from expertflow.train.profile.table import N_KERNELS, Span, busy_us, kernel_table
from expertflow.train.profile.trace import spans_of, write_trace
from expertflow.train.profile.window import Window, choose_window, cut_short
from expertflow.train.records import Kernel, KernelProfile
from expertflow.train.run import Run, one_line

log = logging.getLogger(__name__)

NO_NEIGHBOURS = "no other step than the first one of the session came before"
NOT_A_DEVICE = "counted on CUDA devices only; this run was on the CPU"


class StepProfiler:
    """Watches steps of a run once, in its first process; a state that has a profile keeps it.

    Nothing of a profiler that fails, or is broken off, reaches the run. Stacks, shapes and memory
    are not recorded: they cost most of a profiler's time, and the table does not need them.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._folder = run, run.state / PROFILE
        self._first, self._window = run.progress.step, self._chosen()
        self._profiler: profile | None = None
        self._reason: str | None = None
        self._mark_s = self._neighbours_s = self._start_s = self._pause_s = 0.0

    def __enter__(self) -> Self:
        if self._run.processes.is_first:
            self._tidy()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        profiler, window = self._profiler, self._window
        if profiler is not None and window is not None:
            if kind is None:
                self._finish(profiler, window)
            else:
                self._drop(profiler, error)
        if kind is None and (self._reason is not None or self._is_wanted()):
            self._write_reason(self._reason or self._too_short())

    def begin(self) -> None:
        """Call before each step."""
        window, step = self._window, self._run.progress.step
        if window is None:
            return
        if step == window.neighbours.start:
            self._mark_s = self._stepped_s()
        if step == window.steps.start:
            self._neighbours_s = self._stepped_s() - self._mark_s
            start_s = time.perf_counter()
            with self._apart():
                self._start()
            self._pause_s = time.perf_counter() - start_s

    def end(self) -> None:
        """Call after each step, before anything else that is due."""
        window, profiler = self._window, self._profiler
        if window is None or profiler is None or self._run.progress.step < window.steps.stop:
            return
        self._finish(profiler, window)

    def _tidy(self) -> None:
        """Remove what a session that was killed left half-written."""
        try:
            for partial in self._folder.glob(".*.partial"):
                remove(partial)
        except OSError as error:
            log.warning("parts of a profile are left lying: %s", error)

    def _is_wanted(self) -> bool:
        run = self._run
        wanted = run.plan.profile_steps > 0 and run.processes.is_first
        return wanted and not (self._folder / KERNELS).is_file()

    def _chosen(self) -> Window | None:
        """Choose the steps, and have no other measurement fall on them."""
        run = self._run
        if not self._is_wanted():
            return None
        window = choose_window(run.plan, run.progress.step)
        if window is not None:
            run.timer.left_out = window.steps
        return window

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        missing = set(activities) - supported_activities()  # type: ignore[no-untyped-call]
        if missing:
            names = ", ".join(sorted(activity.name for activity in missing))
            self._fail(f"this build of torch cannot watch {names}")
            return
        if not self._write_reason(BEGUN):
            self._fail("its folder cannot be written")
            return
        try:
            profiler = profile(activities=activities)
            profiler.start()
        except (RuntimeError, MemoryError) as error:
            self._fail(f"the profiler did not start: {one_line(error)}")
            return
        self._profiler, self._start_s = profiler, self._stepped_s()

    def _finish(self, profiler: profile, window: Window) -> None:
        """End the profile and write what it tells; the device is done with the steps first."""
        taken_s = self._stepped_s() - self._start_s
        self._profiler, start_s = None, time.perf_counter()
        with self._apart():
            try:
                profiler.stop()
                spans = spans_of(profiler, cuda=self._run.device.type == "cuda")
            except (RuntimeError, MemoryError) as error:
                self._fail(f"the profiler failed: {one_line(error)}")
                return
            if not spans:
                self._fail("the profiler saw no kernel; CUPTI may be missing, or not allowed")
                return
            try:
                trace = write_trace(profiler, self._folder / TRACE)
                pause_s = self._pause_s + time.perf_counter() - start_s
                record = self._record(window, spans, taken_s, trace, pause_s)
                write_record(self._folder / KERNELS, record)
            except (OSError, MemoryError) as error:
                self._fail(f"it could not be written ({one_line(error)})")
                return
        log.info(
            "profiled steps %d to %d at %.3f s a step (%s before); training waited %.1f s for it",
            window.steps.start + 1, self._run.progress.step, taken_s / record.n_steps,
            "not known" if record.neighbour_step_s is None else f"{record.neighbour_step_s:.3f} s",
            pause_s,
        )  # fmt: skip

    def _record(
        self,
        window: Window,
        spans: list[Span],
        taken_s: float,
        trace: tuple[int | None, str | None],
        pause_s: float,
    ) -> KernelProfile:
        run, (n_trace_bytes, no_trace) = self._run, trace
        on_cpu, n_neighbours = run.device.type == "cpu", len(window.neighbours)
        table = kernel_table(spans)
        rest, notes = table[N_KERNELS:], cut_short(run.plan)
        if rest:
            notes += (f"the {len(rest):,} shortest of {len(table):,} names are summed as one",)
        span_us = max(s.end_us for s in spans) - min(s.start_us for s in spans)
        busy = busy_us((span.start_us, span.end_us) for span in spans)
        unavailable = {"device_busy_fraction": NOT_A_DEVICE} if on_cpu else {}
        if not n_neighbours:
            unavailable["neighbour_step_s"] = NO_NEIGHBOURS
        if no_trace is not None:
            unavailable |= dict.fromkeys(("trace", "n_trace_bytes"), no_trace)
        return KernelProfile(
            n_wanted_steps=run.plan.profile_steps,
            n_steps=run.progress.step - window.steps.start,
            first_step=window.steps.start + 1,
            device=run.device.type,
            wall_s=taken_s,
            n_neighbour_steps=n_neighbours,
            neighbour_step_s=self._neighbours_s / n_neighbours if n_neighbours else None,
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
            reason=None,
            unavailable=unavailable,
            notes=notes,
        )

    def _drop(self, profiler: profile, broken_by: BaseException | None) -> None:
        """Stop the profiler and forget what it saw: the run was broken off amid the steps.

        The next session watches anew, but for want of memory, which watching may have taken.
        """
        self._profiler = None
        try:
            profiler.stop()
        except (RuntimeError, MemoryError) as error:
            log.warning("the profiler failed as it was stopped: %s", one_line(error))
        if isinstance(broken_by, MemoryError):
            self._fail("host memory ran out while steps were watched")
            return
        log.info("the profile is left out: the run was broken off amid its steps")
        try:
            remove(self._folder / KERNELS)
        except OSError as error:
            log.warning("the next session will not watch either: %s", error)

    def _fail(self, reason: str) -> None:
        """Say it at once: a session that goes on from here later is not to fail the same way."""
        log.warning("no profile: %s", reason)
        self._reason = reason
        self._write_reason(reason)

    def _too_short(self) -> str:
        first, last = self._first, self._run.progress.step
        if self._window is None:
            return f"this session did the steps {first + 1} to {last}, none to spare"
        return f"the run ended after step {last}, before step {self._window.steps.start + 1}"

    def _write_reason(self, reason: str) -> bool:
        """Write a record without a profile; tell whether that was possible."""
        run = self._run
        record = nothing_watched(reason, device=run.device.type, n_wanted=run.plan.profile_steps)
        try:
            write_record(self._folder / KERNELS, record)
        except OSError as error:
            log.warning("why there is no profile could not be written: %s", error)
            return False
        return True

    def _stepped_s(self) -> float:
        """Give the run's seconds of stepping so far, when the device is done with them."""
        clock, device = self._run.clock, self._run.device
        if device.type == "cuda":
            with clock.part("steps"):
                torch.cuda.synchronize(device)
        return clock.seconds["steps"]

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Book a block apart from the steps, and from what these share between two fetches."""
        start_s = time.perf_counter()
        try:
            with self._run.clock.part("other"):
                yield
        finally:
            self._run.fetched_at_s += time.perf_counter() - start_s
