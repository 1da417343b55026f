"""Tensors of files as views of mapped memory: nothing is read before it is used, nothing is copied."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import torch

from megappo.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def map_bytes(file: Path) -> torch.Tensor:
    """The file as a tensor of uint8. Writing to it changes a private copy, never the file."""
    if file.stat().st_size == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c"))


def typed_view(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes as a tensor of `shape`; copied only where the file does not align them."""
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def map_safetensors(file: Path) -> dict[str, torch.Tensor]:
    """`{name: view}` of a safetensors file.

    Raises:
        UserError: the file is damaged or cut short, or holds a dtype that is not known.
    """
    raw = map_bytes(file)
    try:
        length = int.from_bytes(bytes(raw[:8].tolist()), "little")
        header = json.loads(raw[8 : 8 + length].numpy().tobytes())
        header.pop("__metadata__", None)
        body, tensors, end = raw[8 + length :], {}, 0
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            if not 0 <= start <= stop <= len(body) or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"tensor {name} does not lie inside the file")
            tensors[name] = typed_view(body[start:stop], dtype, shape)
            end = max(end, stop)
        if end != len(body):
            raise ValueError(f"{len(body) - end} bytes follow the last tensor")
    except KeyError as err:
        raise UserError(f"{file}: cannot read its header (missing or unknown {err})") from None
    except (ValueError, TypeError, AttributeError) as err:
        raise UserError(f"{file} is damaged or cut short ({' '.join(str(err).split())}): copy it again") from None
    return tensors
