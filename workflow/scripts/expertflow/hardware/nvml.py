"""Open the GPUs that a job sees through NVML, following CUDA_VISIBLE_DEVICES."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pynvml

from expertflow.core.records import Record
from expertflow.hardware.nvml_device import Device

NO_DRIVER = "no NVIDIA driver on this machine"
SIMULATED = "SIMULATED"
HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"
MIG = "the card is in MIG mode; a share of a card is not monitored"
UNORDERED = (
    "cards of several kinds: CUDA numbers them by speed and the driver by the bus, so the card"
    " monitored may not be the one in use; set CUDA_DEVICE_ORDER=PCI_BUS_ID or use a UUID"
)


class Gpus(Record, frozen=True, kw_only=True):
    devices: tuple[Device, ...] = ()
    driver: str | None = None
    reason: str | None = None
    simulated: bool = False
    remarks: tuple[str, ...] = ()


@contextmanager
def open_gpus(n_gpus: int | None = None) -> Iterator[Gpus]:
    """Open the (first) cards visible through CUDA_VISIBLE_DEVICES for a block."""
    reason = None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        reason = NO_DRIVER if error.value in absent else f"NVML: {error}"
    if reason is not None:
        yield Gpus(reason=reason)
        return
    gpus = Gpus()
    try:
        gpus = _find(n_gpus)
        yield gpus
    finally:
        with suppress(pynvml.NVMLError):
            for device in gpus.devices:
                device.close()
            pynvml.nvmlShutdown()


def _find(n_gpus: int | None) -> Gpus:
    try:
        count, driver = pynvml.nvmlDeviceGetCount(), str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return Gpus(reason=f"NVML: {error}")
    devices, why_none = list[Device](), "the NVIDIA driver finds no GPU"
    for i in range(count):
        # The driver also counts cards that a batch system hides from this job, which CUDA and
        # nvidia-smi skip.
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            devices.append(Device(index=len(devices), handle=handle))
        except pynvml.NVMLError as error:
            why_none = f"NVML: {error}"
    if not devices:
        return Gpus(driver=driver, reason=why_none)
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    indexes, reason = visible_gpus(setting, [device.read_figure("uuid") for device in devices])
    by_uuid = setting is not None and setting.strip().startswith("GPU-")
    is_ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or by_uuid
    is_mixed = len({device.read_figure("gpu_name") for device in devices}) > 1
    chosen = tuple(devices[i] for i in indexes)[:n_gpus]
    if any(device.is_split() for device in chosen):
        # Its figures cover all instances together, but a job has only one of them.
        chosen, reason = (), MIG
    remarks = (UNORDERED,) if is_mixed and not is_ordered else ()
    names = [device.read_figure("gpu_name") or "" for device in chosen]
    simulated = any(text.startswith(SIMULATED) for text in (driver, *names))
    return Gpus(devices=chosen, driver=driver, reason=reason, simulated=simulated, remarks=remarks)


def visible_gpus(
    setting: str | None, uuids: Sequence[str | None]
) -> tuple[tuple[int, ...], str | None]:
    """Return the indexes of the cards that ``setting`` shows a job, or the reason for none.

    A list ends at the first entry without a card.

    >>> visible_gpus("1,0", ["GPU-a", "GPU-b"])
    ((1, 0), None)
    """
    if setting is None:
        return tuple(range(len(uuids))), None
    if "MIG-" in setting:
        return (), MIG
    found: list[int] = []
    for entry in setting.split(","):
        index = gpu_index(entry.strip(), uuids)
        if index is None:
            break
        found.append(index)
    return tuple(found), None if found else HIDDEN


def gpu_index(entry: str, uuids: Sequence[str | None]) -> int | None:
    """Return the index of the card that an index or (the start of) a UUID names; null if none."""
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    matches = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
