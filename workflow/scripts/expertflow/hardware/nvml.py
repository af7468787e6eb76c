"""Open the GPUs that a job sees through NVML, following CUDA_VISIBLE_DEVICES."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pynvml

from expertflow.core.records import Record
from expertflow.hardware.nvml_device import Device

NO_DRIVER = "no NVIDIA driver on this machine"
SIMULATED = "SIMULATED"
HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"
MIG = "CUDA_VISIBLE_DEVICES names a MIG instance; its share of a card is not monitored"
MIG_MODE = "the card is in MIG mode; a share of a card is not monitored"
UNORDERED = (
    "cards of several kinds: CUDA numbers them by speed and the driver by the bus, so the card"
    " monitored may not be the one in use; set CUDA_DEVICE_ORDER=PCI_BUS_ID or use a UUID"
)
# An entry counts up to where it stops being a number.
_NUMBER = re.compile(r"[+-]?[0-9]+")


class Gpus(Record, frozen=True, kw_only=True):
    devices: tuple[Device, ...] = ()
    driver: str | None = None
    reason: str | None = None
    simulated: bool = False
    remarks: tuple[str, ...] = ()


@contextmanager
def open_gpus(which: str | None = None, n_gpus: int | None = None) -> Iterator[Gpus]:
    """Open the cards visible through CUDA_VISIBLE_DEVICES, or only ``which``, for a block."""
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
        gpus = _find(which, n_gpus)
        yield gpus
    finally:
        with suppress(pynvml.NVMLError):
            for device in gpus.devices:
                device.close()
            pynvml.nvmlShutdown()


def _find(which: str | None, n_gpus: int | None) -> Gpus:
    handles, refused = [], {}
    try:
        count, driver = pynvml.nvmlDeviceGetCount(), str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return Gpus(reason=f"NVML: {error}")
    # The driver also counts cards that a batch system hides from this job, which CUDA and
    # nvidia-smi skip; and one that fell off the bus must not hide the others.
    for i in range(count):
        try:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(i))
        except pynvml.NVMLError as error:
            refused[i] = error
    if refused and not handles:
        return Gpus(driver=driver, reason=f"NVML: {next(iter(refused.values()))}")
    # A card that is hidden from this job is not reported; one that is lost should be.
    remarks = tuple(
        f"the driver's card {i} cannot be opened (NVML: {error}): CUDA may number those after it"
        " differently, unless UUIDs are used"
        for i, error in refused.items()
        if error.value != pynvml.NVML_ERROR_NO_PERMISSION
    )
    devices = [Device(index=i, handle=handle) for i, handle in enumerate(handles)]
    uuids = [device.read_figure("uuid") for device in devices]
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if which is not None:
        index = gpu_index(which, uuids)
        indexes: tuple[int, ...] = () if index is None else (index,)
        reason = f"no GPU {which} here" if index is None else None
    else:
        indexes, reason = visible_gpus(setting, uuids)
        by_uuid = setting is not None and setting.strip().startswith("GPU-")
        is_ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or by_uuid
        if not is_ordered and len({device.read_figure("gpu_name") for device in devices}) > 1:
            remarks += (UNORDERED,)
    chosen = tuple(devices[i] for i in indexes)[:n_gpus]
    if any(device.is_split() for device in chosen):
        # Its figures cover all instances together, but a job has only one of them.
        chosen, reason = (), MIG_MODE
    if not chosen and reason is None:
        reason = "the NVIDIA driver finds no GPU"
    names = [device.read_figure("gpu_name") or "" for device in chosen]
    simulated = any(text.startswith(SIMULATED) for text in (driver, *names))
    return Gpus(devices=chosen, driver=driver, reason=reason, simulated=simulated, remarks=remarks)


def visible_gpus(
    setting: str | None, uuids: Sequence[str | None]
) -> tuple[tuple[int, ...], str | None]:
    """Return the indexes of the cards that ``setting`` shows a job, or the reason for none.

    A list ends at the first entry without a card; no card, or a repeated one, hides all.

    >>> visible_gpus("1,0", ["GPU-a", "GPU-b"])
    ((1, 0), None)
    """
    if setting is None:
        return tuple(range(len(uuids))), None
    found: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.startswith("MIG-"):
            return (), MIG
        number = _NUMBER.match(entry)
        # 1x and +1 are 1, and -1 is not a card.
        index = gpu_index(number[0].removeprefix("+") if number else entry, uuids)
        if index is None:
            break
        if index in found:
            return (), HIDDEN
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
