"""Memory of one GPU that another process writes to: CUDA's inter-process handles, 64 bytes each, by the driver's own calls.

The driver's library is asked and not torch, because torch shares memory by objects that must be unpickled or counted between
processes, and because a handle of an allocation of its own names exactly that memory. Works within one GPU and between GPUs that
reach each other (NVLink or PCIe peer access); whatever the driver refuses is one exception with its words.
"""

import ctypes
import threading
from typing import Any

import torch

from relay.kernels.kv_frames import SharingFailed

HANDLE_BYTES = 64
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_LIBRARY = "libcuda.so.1"


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class DeviceArea:
    """``size`` bytes at ``pointer``; ``tensor`` is the uint8 view that kernels are given."""

    def __init__(self, pointer: int, size: int, *, opened: bool) -> None:
        self.pointer, self.size, self.opened = pointer, size, opened
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }
        self.tensor: torch.Tensor = torch.as_tensor(self)


class DeviceMemory:
    """Allocates, names and opens memory in the primary context of ``device``, from any thread."""

    def __init__(self, device: str, driver: Any = None) -> None:
        """Raises SharingFailed without a driver."""
        self._lock = threading.Lock()
        self._device = torch.device(device).index or 0
        try:
            self._driver = driver if driver is not None else ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise SharingFailed(f"no CUDA driver: {error}") from error
        self._context: ctypes.c_void_p | None = None
        self._driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
        self._driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
        self._driver.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
        self._driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
        self._driver.cuMemFree_v2.argtypes = [ctypes.c_uint64]

    def allocate(self, size: int) -> DeviceArea:
        """Raises SharingFailed, for example where memory runs out."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), size)
        return DeviceArea(pointer.value, size, opened=False)

    def total_bytes(self) -> int:
        """Of the device. Raises SharingFailed."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value

    def handle(self, area: DeviceArea) -> bytes:
        """What names ``area`` in other processes of this machine. Raises SharingFailed."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), area.pointer)
        return bytes(handle.reserved)

    def open(self, handle: bytes, size: int) -> DeviceArea:
        """Map what ``handle`` names. Raises SharingFailed: no peer access, a process that is gone, another machine."""
        if len(handle) != HANDLE_BYTES:
            raise SharingFailed(f"a memory handle of {len(handle)} bytes instead of {HANDLE_BYTES}")
        named = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*handle))
        pointer = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), named, _PEER_ACCESS)
        return DeviceArea(pointer.value, size, opened=True)

    def close(self, area: DeviceArea) -> None:
        """No kernel uses ``area`` any more: unmap it, or free it where it is our own. Raises SharingFailed."""
        self._call("cuIpcCloseMemHandle" if area.opened else "cuMemFree_v2", area.pointer)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(self._current()))
        self._check(name, getattr(self._driver, name)(*arguments))

    def _current(self) -> ctypes.c_void_p:
        """The context that torch uses too; kept for as long as the process lives."""
        with self._lock:
            if self._context is None:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self._check("cuInit", self._driver.cuInit(0))
                self._check("cuDeviceGet", self._driver.cuDeviceGet(ctypes.byref(device), self._device))
                retained = self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
                self._check("cuDevicePrimaryCtxRetain", retained)
                self._context = context
            return self._context

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise SharingFailed(f"{name}: {(text.value or b'unknown error').decode()} ({status})")
