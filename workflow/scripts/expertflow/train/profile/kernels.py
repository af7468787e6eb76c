"""Read the torch profiler's results: launches summed by name, and the trace as a file."""

import gzip
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from torch.autograd.profiler_util import StringTable
from torch.profiler import profile

from expertflow.core.files import remove, replacing
from expertflow.core.records import Record
from expertflow.train.records import Kernel
from expertflow.train.run import one_line

# Prefixes of annotations on the device's time line above the kernels.
ANNOTATIONS = ("## ", "Optimizer.", "ProfilerStep")
# Names recorded, and characters per name; compiled code may have a kernel per shape.
N_KERNELS, N_CHARS = 1_000, 1_000
# About the most that a browser's viewer loads; training also waits while it is written.
MAX_TRACE_BYTES = 1 << 30
HOST = b'"host_name"'


class Span(Record, frozen=True, kw_only=True):
    """One launch of a kernel. ``self_us`` is its time without nested calls."""

    name: str
    start_us: float
    end_us: float
    self_us: float


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time in which any of some spans runs.

    >>> busy_us([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def kernel_table(spans: Iterable[Span]) -> tuple[Kernel, ...]:
    n_calls: defaultdict[str, int] = defaultdict(int)
    taken_us: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        n_calls[span.name] += 1
        taken_us[span.name] += span.self_us
    return tuple(
        Kernel(name=name[:N_CHARS], n_calls=n_calls[name], total_s=us / 1e6)
        for name, us in sorted(taken_us.items(), key=lambda item: (-item[1], item[0]))
    )


def spans_of(profiler: profile, *, cuda: bool) -> list[Span]:
    return device_spans(profiler) if cuda else _operator_spans(profiler)


def device_spans(profiler: profile, device: str = "CUDA") -> list[Span]:
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
        spans.append(Span(name=name, start_us=start_us, end_us=end_us, self_us=end_us - start_us))
    return spans


def _operator_spans(profiler: profile) -> list[Span]:
    spans = []
    for event in profiler.events() or ():  # type: ignore[no-untyped-call]
        is_mark = getattr(event, "is_user_annotation", False) or event.name.startswith(ANNOTATIONS)
        if event.device_type.name == "CUDA" or is_mark:
            continue
        start_us, end_us = float(event.time_range.start), float(event.time_range.end)
        own_us = float(event.self_cpu_time_total)
        spans.append(Span(name=event.name, start_us=start_us, end_us=end_us, self_us=own_us))
    return spans


def write_trace(profiler: profile, path: Path) -> tuple[int | None, str | None]:
    plain = path.with_name(f".{path.stem}.{os.getpid()}.partial")
    try:
        profiler.export_chrome_trace(str(plain))
        n_bytes = plain.stat().st_size
        if n_bytes > MAX_TRACE_BYTES:
            return None, (
                f"its {n_bytes / 2**20:,.0f} MiB are more than {MAX_TRACE_BYTES / 2**20:,.0f} MiB;"
                " lower training.profile_steps"
            )
        with replacing(path) as partial, partial.open("wb") as raw, plain.open("rb") as source:
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                # Host name and paths do not concern a reader of kernels.
                lines = (line for line in source if not line.lstrip().startswith(HOST))
                packed.writelines(line.replace(str(plain).encode(), b"trace") for line in lines)
        return path.stat().st_size, None
    except (RuntimeError, MemoryError) as error:
        return None, f"the profiler did not write it: {one_line(error)}"
    finally:
        remove(plain)
