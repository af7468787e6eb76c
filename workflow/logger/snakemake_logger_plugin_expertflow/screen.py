"""Print lines about jobs; on a terminal, running jobs are shown below them, redrawn in place.

Elsewhere, a long job gets a line after 1, 2, 4, 8, 16 minutes, and then every ten.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from snakemake_logger_plugin_expertflow.jobs import Job, format_duration

REDRAWS_PER_S = 2
LONGEST_S = 600.0
POLL_S = 1.0


class Screen:
    """Where a run's lines go; ``running`` returns the running jobs."""

    def __init__(
        self, stream: TextIO, running: Callable[[], Sequence[Job]], *, color: bool
    ) -> None:
        self._stream, self._running, self._color = stream, running, color
        self._live: Any = None
        self._is_over: threading.Event | None = None
        self._lock = threading.Lock()  # Live must not stop while it prints

    def print(self, line: str, *, style: str = "") -> None:
        with self._lock:
            if self._live is not None:
                from rich.text import Text

                self._live.console.print(Text(line, style=style), soft_wrap=True)
            else:
                if style and self._color and self._stream.isatty():
                    line = f"\x1b[{31 if style == 'red' else 33}m{line}\x1b[0m"
                print(line, file=self._stream, flush=True)

    def show_running(self) -> None:
        if self._live is not None or self._is_over is not None:  # shown already
            return
        if self._stream.isatty():
            self._live = self._start_live()
        else:
            self._is_over = threading.Event()
            arguments = (self._is_over,)
            threading.Thread(target=self._print_running, args=arguments, daemon=True).start()

    def hide_running(self) -> None:
        if self._live is not None:
            with self._lock:
                self._live.stop()
                self._live = None
        if self._is_over is not None:
            self._is_over.set()
            self._is_over = None

    def _start_live(self) -> Any:
        # Imported here: few starts of Snakemake need it.
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream, no_color=not self._color, highlight=False)
        live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=REDRAWS_PER_S,
            transient=True,  # erased when it stops
            redirect_stdout=False,  # else it would go to this stream, stderr
            vertical_overflow="ellipsis",
        )
        live.start()
        return live

    def _draw(self) -> Any:
        from rich.text import Text

        lines = [_describe(job) for job in self._running()]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis", style="cyan")

    def _print_running(self, is_over: threading.Event) -> None:
        while not is_over.wait(POLL_S):
            for job in self._running():
                if job.elapsed_s >= job.next_line_s:
                    job.next_line_s = min(2 * job.elapsed_s, job.elapsed_s + LONGEST_S)
                    self.print(_describe(job))


def _describe(job: Job) -> str:
    line = f"  {job.name}  {format_duration(job.elapsed_s)}"
    return f"{line}  {last}" if (last := job.read_last_line()) else line
