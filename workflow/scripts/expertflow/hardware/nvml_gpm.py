"""The card's own counters of what its multiprocessors did (GPM): Hopper and newer, no daemon."""

import math
import time
from typing import Any

import pynvml

MIB = 2**20
# The driver refreshes these counters every 100 ms; two readings closer together tell nothing.
LEAST_GAP_S = 0.1
TENSOR, SM = pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, pynvml.NVML_GPM_METRIC_SM_UTIL
RX, TX = pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC
# Figure: the metric, and what one of its units is in ours.
METRICS = {
    "tensor_active_percent": (TENSOR, 1),
    "sm_active_percent": (SM, 1),
    "pcie_rx_bytes_per_s": (RX, MIB),
    "pcie_tx_bytes_per_s": (TX, MIB),
}


def is_supported(handle: Any) -> bool:
    """Tell whether the card has these counters.

    Raises:
        NVMLError: the driver is older than they are.
    """
    return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)


class Gpm:
    """Counters of one card between two readings; ``refused`` has the last one's error codes."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._earlier, self._later = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self._read_at: float | None = None
        self.refused: dict[str, int] = {}

    def read(self) -> dict[str, float] | None:
        """Give the figures since the reading before; null at the first and where that is too near.

        Raises:
            NVMLError: the driver gave no reading; the next one starts afresh.
        """
        self.refused = {}
        now = time.monotonic()
        if self._read_at is not None and now - self._read_at < LEAST_GAP_S:
            return None
        started, self._read_at = self._read_at is not None, None
        pynvml.nvmlGpmSampleGet(self._handle, self._later)
        figures = self._between() if started else None
        self._earlier, self._later = self._later, self._earlier
        self._read_at = now
        return figures

    def close(self) -> None:
        """Give the buffers back."""
        for sample in (self._earlier, self._later):
            pynvml.nvmlGpmSampleFree(sample)

    def _between(self) -> dict[str, float]:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(METRICS)
        request.sample1, request.sample2 = self._earlier, self._later
        for i, (metric, _) in enumerate(METRICS.values()):
            request.metrics[i].metricId = metric
        pynvml.nvmlGpmMetricsGet(request)
        figures = {}
        for i, (name, (_, unit)) in enumerate(METRICS.items()):
            answer = request.metrics[i]
            if answer.nvmlReturn != pynvml.NVML_SUCCESS:
                self.refused[name] = answer.nvmlReturn
            elif math.isfinite(answer.value):
                figures[name] = answer.value * unit
        return figures
