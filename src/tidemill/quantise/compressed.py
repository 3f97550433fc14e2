"""compressed-tensors: how a quantised matrix is written, read back, and announced in config.json.

pack-quantized: `weight_packed`, int32 [outputs, words] with the first input in the lowest bits and codes counted
from 0, and `weight_shape`. int-quantized and float-quantized: `weight`, int8 or float8_e4m3fn. All of them:
`weight_scale` [outputs, groups]. Packed and asymmetric: `weight_zero_point`, packed as codes are, but along outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tidemill.quantise.grid import Grid, Rounded, Steps
from tidemill.quantise.settings import Target

Tensors = Mapping[str, torch.Tensor]


def tensors_of(prefix: str, rounded: Rounded, grid: Grid, target: Target) -> dict[str, torch.Tensor]:
    """Rows in the checkpoint's order, on the CPU."""
    codes = rounded.codes.cpu()
    found = {f"{prefix}.weight_scale": rounded.steps.scales.to(grid.scale_dtype).cpu().contiguous()}
    if target.format == "pack-quantized":
        found[f"{prefix}.weight_packed"] = pack(codes.to(torch.int8), grid.bits)
        found[f"{prefix}.weight_shape"] = torch.tensor(codes.shape, dtype=torch.int64)
        if rounded.steps.zeros is not None:
            zeros = rounded.steps.zeros.cpu().to(torch.int8)
            found[f"{prefix}.weight_zero_point"] = pack(zeros.t(), grid.bits).t().contiguous()
    else:
        dtype = torch.float8_e4m3fn if grid.kind == "fp8" else torch.int8
        found[f"{prefix}.weight"] = codes.to(dtype).contiguous()
    return found


def is_quantised(prefix: str, tensors: Tensors) -> bool:
    return f"{prefix}.weight_scale" in tensors


def dense_of(prefix: str, tensors: Tensors, grid: Grid) -> torch.Tensor:
    scales = tensors[f"{prefix}.weight_scale"].float()
    if (packed := tensors.get(f"{prefix}.weight_packed")) is None:
        return Rounded(tensors[f"{prefix}.weight"].float(), Steps(scales, None)).dense()
    outputs, inputs = tensors[f"{prefix}.weight_shape"].tolist()
    zeros = None
    if (packed_zeros := tensors.get(f"{prefix}.weight_zero_point")) is not None:
        zeros = unpack(packed_zeros.t(), grid.bits, outputs).t().float()
    return Rounded(unpack(packed, grid.bits, inputs).float(), Steps(scales, zeros)).dense()


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 of int8 codes of 4 or 8 bits."""
    counted = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    counted = F.pad(counted, (0, -counted.shape[1] % (32 // bits)))
    if bits == 4:
        counted = counted[:, 0::2] | (counted[:, 1::2] << 4)
    return counted.contiguous().view(torch.int32)


def unpack(packed: torch.Tensor, bits: int, inputs: int) -> torch.Tensor:
    counted = packed.contiguous().view(torch.uint8)
    if bits == 4:
        counted = torch.stack((counted & 15, counted >> 4), dim=-1).flatten(1)
    return counted[:, :inputs].to(torch.int16) - 2 ** (bits - 1)


def quantization_config(target: Target, grid: Grid, ignore: Sequence[str]) -> dict[str, Any]:
    """What config.json says of it: all linear layers are quantised but those of these names."""
    kind = "float" if target.kind == "fp8" else "int"
    weights: dict[str, Any] = {
        "num_bits": target.bits,
        "type": kind,
        "symmetric": not grid.asymmetric,
        "strategy": "channel" if grid.group_size is None else "group",
        "group_size": grid.group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    inputs = None
    if target.activations:
        inputs = {**weights, "strategy": "token", "group_size": None, "dynamic": True, "observer": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": target.format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }
