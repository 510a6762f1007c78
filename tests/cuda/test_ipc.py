"""The driver's calls that share memory between processes, with a driver that only answers."""

import ctypes
import importlib.util
from typing import Any
from unittest import mock

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

from relay.kernels.cuda import ipc
from relay.kernels.kv_frames import SharingFailed

POINTER = 0x7F12_3456_7000  # as the driver gives them: more than an int of C holds


class Call:
    """One function of the library, which knows no more of its parameters than what is declared."""

    argtypes: tuple[Any, ...] = ()

    def __init__(self, driver: "Driver", name: str) -> None:
        self.driver, self.name = driver, name

    def __call__(self, *arguments: object) -> int:
        if self.name.startswith(("cuMem", "cuIpc")):
            for kind, argument in zip(self.argtypes, arguments, strict=True):
                kind.from_param(argument)
                assert not isinstance(argument, int) or kind(argument).value == argument, "cut off"
        return self.driver.answer(self.name, arguments)


class Driver:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.opened = b""

    def __getattr__(self, name: str) -> Call:
        call = Call(self, name)
        self.__dict__[name] = call
        return call

    def answer(self, name: str, arguments: tuple[object, ...]) -> int:
        if name == "cuGetErrorString":
            arguments[1]._obj.value = b"peer access is not supported"  # type: ignore[attr-defined]
            return 0
        self.calls.append(name)
        if name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
            arguments[0]._obj.value = POINTER  # type: ignore[attr-defined]
        if name == "cuIpcGetMemHandle":
            ctypes.memset(arguments[0], 7, ipc.HANDLE_BYTES)  # type: ignore[arg-type]
        if name == "cuIpcOpenMemHandle_v2":
            self.opened = bytes(arguments[1].reserved)  # type: ignore[attr-defined]
            assert arguments[2] == 1
        return self.fails.get(name, 0)


@pytest.fixture
def driver():
    with mock.patch.object(ipc.torch, "as_tensor", lambda area: area.__cuda_array_interface__):
        yield Driver()


def test_an_area_is_named_by_64_bytes_and_opened_by_them(driver: Driver) -> None:
    memory = ipc.DeviceMemory("cuda:1", driver)
    area = memory.allocate(4096)
    handle = memory.handle(area)
    assert handle == bytes([7]) * 64
    assert area.tensor["data"] == (POINTER, False)
    assert area.tensor["shape"] == (4096,)
    other = memory.open(handle, 4096)
    assert driver.opened == handle
    memory.close(other)
    memory.close(area)
    shared = [call for call in driver.calls if call.startswith(("cuMem", "cuIpc"))]
    assert shared == [
        "cuMemAlloc_v2",
        "cuIpcGetMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle",
        "cuMemFree_v2",
    ]
    assert driver.calls.count("cuCtxSetCurrent") == 5, "any thread may call"
    assert driver.calls.count("cuDevicePrimaryCtxRetain") == 1


def test_what_the_driver_refuses_is_said_in_its_words(driver: Driver) -> None:
    memory = ipc.DeviceMemory("cuda:0", driver)
    driver.fails["cuIpcOpenMemHandle_v2"] = 217
    with pytest.raises(SharingFailed, match=r"cuIpcOpenMemHandle_v2: peer access is not supported \(217\)"):
        memory.open(bytes(64), 4096)
    with pytest.raises(SharingFailed, match="3 bytes instead of 64"):
        memory.open(b"abc", 4096)
