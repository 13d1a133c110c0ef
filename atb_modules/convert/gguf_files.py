"""GGUF files: metadata and tensor table read with every length checked, tensors dequantised by the gguf
package.

The layout is that of the GGUF specification, version 2 and 3, little endian. The table is read here and not
by `gguf.GGUFReader`, which trusts the lengths in the file: a cut file ends there in errors that name neither
file nor tensor.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import torch
from torch import Tensor

from .tensors import TensorInfo, TensorSource

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 64 << 20
_MAX_DIMS = 4
_CHUNK_ELEMENTS = 1 << 17
# The keys whose arrays are wanted; vocabularies are skipped, which is most of the time of reading a header.
_WANTED_ARRAYS = ("head_count", "head_count_kv", "sliding_window_pattern", "feed_forward_length")


class _Reader:
    """Reads the beginning of a GGUF; every length is checked against the file before it is used."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = path.stat().st_size
        self.what = "the header"

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {message}")

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise self.error(
                f"{self.what} needs {count} bytes at {self.file.tell()}, but the file has only {self.size}: "
                "it is cut short or not a GGUF"
            )
        return self.file.read(count)

    def unpack(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.unpack("Q")
        if length > _MAX_STRING:
            raise self.error(f"{self.what} has a string of {length} bytes; allowed: {_MAX_STRING}")
        return self.take(length).decode("utf-8", errors="replace")

    def value(self, kind: int, wanted: bool) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.error(f"{self.what} has a value of type {kind}; allowed: 0 to 12")
        item, count = self.unpack("I"), self.unpack("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            raw = self.take(count * struct.calcsize(code))
            return list(struct.unpack(f"<{count}{code}", raw)) if wanted else None
        if item != _STRING:
            raise self.error(f"{self.what} has an array of type {item}; allowed: scalars and strings")
        for _ in range(count):
            self.string()
        return None


class GGUFSource(TensorSource):
    """One GGUF file.

    Attributes:
        metadata: the scalars and short arrays of the header.
        infos: every tensor; shapes as torch has them.

    Raises:
        ValueError: naming the file, and the key or tensor where one is at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.infos = {}
        self._places: dict[str, tuple[gguf.GGMLQuantizationType, int, int]] = {}
        with path.open("rb") as file:
            reader = _Reader(file, path)
            if reader.take(4) != b"GGUF":
                raise reader.error("it does not begin with GGUF")
            version = reader.unpack("I")
            if version not in (2, 3):
                raise reader.error(f"GGUF version is {version}; allowed: 2, 3 (little endian)")
            num_tensors, num_keys = reader.unpack("Q"), reader.unpack("Q")
            for _ in range(num_keys):
                self._read_key(reader)
            reader.what = "the tensor table"
            table = [self._read_entry(reader) for _ in range(num_tensors)]
            self._place(reader, table)

    def _read_key(self, reader: _Reader) -> None:
        reader.what = "the metadata"
        key = reader.string()
        reader.what = f"the metadata key {key!r}"
        if key in self.metadata:
            raise reader.error(f"the metadata key {key!r} is there twice")
        self.metadata[key] = reader.value(reader.unpack("I"), key.endswith(_WANTED_ARRAYS))

    def _read_entry(self, reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
        name = reader.string()
        num_dims = reader.unpack("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise reader.error(f"tensor {name!r} has {num_dims} dimensions; allowed: 1 to {_MAX_DIMS}")
        # GGUF counts from the innermost dimension.
        shape = tuple(reversed([reader.unpack("Q") for _ in range(num_dims)]))
        return name, shape, reader.unpack("I"), reader.unpack("Q")

    def _place(self, reader: _Reader, table: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise reader.error(f"general.alignment is {alignment!r}; allowed: a power of two")
        base = -(-reader.file.tell() // alignment) * alignment
        ranges = []
        for name, shape, kind_id, offset in table:
            if name in self.infos:
                raise reader.error(f"tensor {name!r} is there twice")
            known = {kind.value: kind for kind in gguf.GGML_QUANT_SIZES}
            if kind_id not in known:
                raise reader.error(f"tensor {name!r} has type {kind_id}; allowed: {sorted(known)}")
            kind = known[kind_id]
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            count = 1
            for extent in shape:
                count *= extent
            if shape[-1] % block or not count:
                raise reader.error(f"tensor {name!r} of {kind.name} has shape {shape}; rows hold blocks of {block}")
            begin, size = base + offset, count // block * block_bytes
            if begin + size > reader.size:
                raise reader.error(
                    f"tensor {name!r} ends at byte {begin + size}, but the file has only {reader.size}: it is cut short"
                )
            ranges.append((begin, begin + size, name))
            self._places[name] = (kind, begin, size)
            self.infos[name] = TensorInfo(name, shape, torch.float32, str(self.path))
        ranges.sort()
        for (_, end, name), (begin, _, other) in pairwise(ranges):
            if begin < end:
                raise reader.error(f"tensors {name!r} and {other!r} overlap")

    def read_into(self, name: str, out: Tensor) -> None:
        kind, begin, size = self._places[name]
        shape = self.infos[name].shape
        flat = out.view(-1, shape[-1])
        row_bytes = size // flat.shape[0]
        rows = max(1, _CHUNK_ELEMENTS // shape[-1])
        with self.path.open("rb") as file:
            file.seek(begin)
            for row in range(0, flat.shape[0], rows):
                count = min(rows, flat.shape[0] - row)
                raw = np.frombuffer(file.read(count * row_bytes), dtype=np.uint8).reshape(count, row_bytes)
                flat[row : row + count].copy_(torch.from_numpy(self._dequantize(name, raw, kind)))

    def _dequantize(self, name: str, raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        plain = {gguf.GGMLQuantizationType.F16: np.float16, gguf.GGMLQuantizationType.F64: np.float64}
        if kind in plain:
            return raw.view(plain[kind]).astype(np.float32)
        try:
            # A copy: what comes back may be a read-only view of the bytes.
            return np.array(gguf.quants.dequantize(raw, kind), dtype=np.float32)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name!r} of type {kind.name}: {error}") from None
