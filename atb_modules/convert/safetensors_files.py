"""Safetensors files: headers checked by name and byte, tensors read through the safetensors library."""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .source import parse_json
from .tensors import TensorInfo, TensorSource

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2}
_OTHER_SIZES |= {"I32": 4, "U32": 4, "I64": 8, "U64": 8}
_MAX_HEADER = 100_000_000
_REOPEN_BYTES = 16 << 20


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor that the file's header promises, checked against the file's size.

    Raises:
        ValueError: naming the file, and the tensor where one is at fault.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"{path}: {size} bytes are too few for a safetensors file")
        (length,) = struct.unpack("<Q", start)
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path}: the header claims {length} bytes; the file has {size}")
        raw = file.read(length)
    header = parse_json(raw, f"{path}: the header")
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a {type(header).__name__}; allowed: an object")
    header.pop("__metadata__", None)
    infos: dict[str, TensorInfo] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        info, begin, end = _checked_entry(path, name, entry, size - 8 - length)
        infos[name] = info
        ranges.append((begin, end, name))
    ranges.sort()
    for (_, end, name), (begin, _, other) in pairwise(ranges):
        if begin < end:
            raise ValueError(f"{path}: tensors {name!r} and {other!r} overlap")
    return infos


def _checked_entry(path: Path, name: str, entry: Any, data_bytes: int) -> tuple[TensorInfo, int, int]:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError(f"{where}: the header has no dtype, shape and data_offsets for it")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in _DTYPES and dtype not in _OTHER_SIZES):
        raise ValueError(f"{where}: dtype is {dtype!r}; allowed: {', '.join(_DTYPES)}")
    for what, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
            raise ValueError(f"{where}: {what} is {values!r}; allowed: a list of integers of at least 0")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where}: data_offsets is {offsets!r}; allowed: [begin, end]")
    begin, end = offsets
    if end > data_bytes:
        raise ValueError(f"{where} ends at byte {end} of the data, but the file has only {data_bytes}: it is cut short")
    count = 1
    for extent in shape:
        count *= extent
    item = _DTYPES[dtype].itemsize if dtype in _DTYPES else _OTHER_SIZES[dtype]
    if count * item != end - begin:
        raise ValueError(f"{where}: shape {shape} of {dtype} takes {count * item} bytes, it has {end - begin}")
    return TensorInfo(name, tuple(shape), _DTYPES.get(dtype, torch.uint8), str(path)), begin, end


class SafetensorsSource(TensorSource):
    """One or many safetensors files of a directory."""

    def __init__(self, paths: list[Path]) -> None:
        self.infos = {}
        for path in paths:
            for name, info in read_header(path).items():
                if name in self.infos:
                    raise ValueError(f"{path}: tensor {name!r} is also in {self.infos[name].path}")
                self.infos[name] = info
        self._handle: Any = None
        self._path = ""
        self._mapped = 0

    @classmethod
    def from_directory(cls, directory: Path) -> SafetensorsSource:
        """The files named by model.safetensors.index.json, or else model.safetensors, or else all there
        are.
        """
        index = directory / "model.safetensors.index.json"
        if not index.exists():
            single = directory / "model.safetensors"
            found = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
            if not found:
                raise FileNotFoundError(f"{directory}: no *.safetensors file is in this directory")
            return cls(found)
        try:
            weight_map = parse_json(index.read_bytes(), str(index))["weight_map"]
            shards = {str(name): str(shard) for name, shard in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not an index with a weight_map: {error!r}") from None
        for name, shard in shards.items():
            if os.path.basename(shard) != shard or not (directory / shard).is_file():
                raise FileNotFoundError(f"{index}: tensor {name!r} is in {shard!r}, which is not there")
        source = cls([directory / shard for shard in sorted(set(shards.values()))])
        for name, shard in shards.items():
            if name not in source.infos:
                raise ValueError(f"{index}: tensor {name!r} is not in {shard!r}, as the index says")
        return source

    def read_into(self, name: str, out: Tensor) -> None:
        info = self.infos[name]
        if not info.dtype.is_floating_point:
            raise ValueError(f"{info.path}: tensor {name!r} holds integers; allowed: {', '.join(_DTYPES)}")
        try:
            # Pages of a mapped file count as ours until it is closed.
            if self._path != info.path or self._mapped > _REOPEN_BYTES:
                self.close()
                self._handle = safe_open(info.path, framework="pt")
                self._path = info.path
            self._copy(info, out)
        except SafetensorError as error:
            raise ValueError(f"{info.path}: tensor {name!r} cannot be read: {error}") from None

    def _copy(self, info: TensorInfo, out: Tensor) -> None:
        if not info.shape or out.numel() * info.dtype.itemsize <= _REOPEN_BYTES:
            out.copy_(self._handle.get_tensor(info.name))
            self._mapped += out.numel() * info.dtype.itemsize
            return
        rows = max(1, _REOPEN_BYTES // (out.numel() // info.shape[0] * info.dtype.itemsize))
        for begin in range(0, info.shape[0], rows):
            out[begin : begin + rows].copy_(self._handle.get_slice(info.name)[begin : begin + rows])
            self.close()
            self._handle = safe_open(info.path, framework="pt")
            self._path = info.path

    def close(self) -> None:
        self._handle = None
        self._path = ""
        self._mapped = 0
