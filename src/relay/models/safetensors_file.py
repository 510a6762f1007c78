"""One .safetensors file, mapped: 8 bytes of header length, a JSON header, then the tensors' bytes."""

import json
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from relay.errors import CorruptModelError
from relay.kernels.weights import Encoding

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_ENCODINGS = {"F32": Encoding.F32, "F16": Encoding.F16, "BF16": Encoding.BF16}


class TensorPlace(NamedTuple):
    """Where a tensor's bytes begin in its file."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    encoding: Encoding


class SafetensorsFile:
    """Names, shapes and bytes of one file. The header is checked against the file's size when opened."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptModelError naming the file, and the tensor where one is at fault."""
        self._path = path
        try:
            self._data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise CorruptModelError(f"{path}: cannot be read ({error})") from error
        header_bytes = int.from_bytes(self._data[:8].tobytes(), "little")
        self._start = 8 + header_bytes
        if len(self._data) < 8 or header_bytes > _MAX_HEADER_BYTES or self._start > len(self._data):
            self._refuse("truncated: the header is incomplete")
        try:
            header = json.loads(self._data[8 : self._start].tobytes())
        except (ValueError, RecursionError) as error:
            raise CorruptModelError(f"{path}: the header is not JSON ({error})") from error
        if not isinstance(header, dict):
            self._refuse("the header is not a JSON object")
        header.pop("__metadata__", None)
        self._entries: dict[str, Any] = header
        for name, entry in header.items():
            self._check(name, entry)

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def tensor(self, name: str) -> np.ndarray:
        """The mapped tensor: fp32, fp16, or uint16 for BF16's bits. KeyError if the file has no such tensor."""
        entry = self._served(name)
        dtype = _DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        raw: np.ndarray = np.asarray(self._data[self._start + begin : self._start + end])
        if raw.ctypes.data % dtype.itemsize:
            raw = raw.copy()
        return raw.view(dtype).reshape(entry["shape"])

    def place(self, name: str) -> TensorPlace:
        """Where ``tensor`` would read. KeyError if the file has no such tensor."""
        entry = self._served(name)
        offset = self._start + entry["data_offsets"][0]
        return TensorPlace(self._path, offset, tuple(entry["shape"]), _ENCODINGS[entry["dtype"]])

    def _served(self, name: str) -> Any:
        entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            self._refuse(f"tensor {name} has dtype {entry['dtype']}; served: {', '.join(_DTYPES)}")
        return entry

    def _check(self, name: str, entry: Any) -> None:
        try:
            begin, end = entry["data_offsets"]
            shape, dtype = entry["shape"], entry["dtype"]
            sound = all(type(number) is int for number in (begin, end, *shape)) and isinstance(dtype, str)
            sound = sound and 0 <= begin <= end and min(shape, default=0) >= 0
        except (TypeError, KeyError, ValueError):
            self._refuse(f"tensor {name} has a damaged header entry")
        if not sound:
            self._refuse(f"tensor {name} has a damaged header entry")
        if self._start + end > len(self._data):
            missing = self._start + end - len(self._data)
            self._refuse(f"truncated: tensor {name} ends {missing} bytes after the end of the file")
        if dtype in _DTYPES:
            size = _DTYPES[dtype].itemsize
            for extent in shape:
                size *= extent
            if size != end - begin:
                self._refuse(f"tensor {name} of shape {shape} and dtype {dtype} needs {size} bytes, not {end - begin}")

    def _refuse(self, why: str) -> NoReturn:
        raise CorruptModelError(f"{self._path}: {why}")
