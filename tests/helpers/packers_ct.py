"""compressed-tensors checkpoints by the package's own compressors, and FP8 and MXFP4 ones by their definitions.

`METHODS` are for `packers.write_quantised`, which takes them as it takes its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.helpers.packers import Method, Packed

FP8_LARGEST = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TOKENS = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
"""A config group's `input_activations`, less their type."""


def weights_of(strategy: str = "group", **changes: Any) -> dict[str, Any]:
    """A config group's `weights`."""
    group_size = changes.pop("group_size", 32 if strategy in ("group", "tensor_group") else None)
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size, **changes}


def config_of(weights: dict[str, Any], stored_as: str, **changes: Any) -> dict[str, Any]:
    inputs = changes.pop("input_activations", None)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        **changes,
    }


def pack_compressed(
    weight: torch.Tensor,
    weights: dict[str, Any],
    stored_as: str,
    order: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Packed:
    """`order` is the group of each input; `dtype` that of scales."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(stored_as)
    scales, zeros, over = _choose(weight, scheme.weights, order, dtype)
    parts = {"weight": weight.to(scales.dtype), "weight_scale": scales, "weight_zero_point": zeros}
    parts |= {} if over is None else {"weight_global_scale": over}
    parts |= {} if order is None else {"weight_g_idx": order.to(torch.int32)}
    packed = compressor.compress({**parts, "weight_shape": torch.tensor(weight.shape)}, scheme)
    if "weight_packed" not in packed or packed["weight_packed"].dtype == torch.uint8:
        del packed["weight_shape"]
    # Widened scales, so that the package rounds nothing to a half when it multiplies.
    wide = {name: part.float() if part.dtype in (torch.half, torch.bfloat16) else part for name, part in packed.items()}
    if scheme.weights.strategy == "block":
        # Its decompressor takes blocks for smaller ones where they do not divide the matrix.
        meant = dequantize(wide["weight"], wide["weight_scale"], wide.get("weight_zero_point"), scheme.weights)
    else:
        meant = compressor.decompress(wide, scheme)["weight"].float()
    return Packed({name: part.contiguous() for name, part in packed.items()}, meant)


def _choose(weight: torch.Tensor, args: Any, order: torch.Tensor | None, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The package's own scales and zero points for what its observers would see."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    columns = weight if order is None else weight[:, torch.argsort(order, stable=True)]
    outputs, inputs = columns.shape
    over = None
    if args.strategy == "tensor":
        blocks = columns.reshape(1, -1)
    elif args.strategy == "channel":
        blocks = columns[:, None]
    elif args.strategy == "block":
        rows, cols = args.block_structure
        padded = torch.nn.functional.pad(columns, (0, -inputs % cols, 0, -outputs % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, cols)).transpose(1, 2).flatten(2)
    else:
        blocks = columns.unflatten(1, (-1, args.group_size))
        if args.strategy == "tensor_group":
            over = generate_gparam(columns.min(), columns.max()).reshape(1)
    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
    scales, zeros = calculate_qparams(low, high, args, global_scale=over)
    return scales.to(dtype), zeros, over


def pack_fp8(
    weight: torch.Tensor, block: tuple[int, int] | None = None, by_row: bool = False, name: str = "weight_scale_inv"
) -> Packed:
    outputs, inputs = weight.shape
    rows, columns = block or (1 if by_row else outputs, inputs)
    padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / FP8_LARGEST
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:outputs, :inputs]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    stored = scales if block or by_row else scales.reshape(())
    return Packed({"weight": codes, name: stored.contiguous()}, codes.float() * spread)


def pack_mxfp4(weight: torch.Tensor) -> Packed:
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / torch.exp2(exponents)[..., None]
    table = torch.tensor(E2M1)
    nearest = (scaled.abs()[..., None] - table).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    meant = table[nearest] * torch.where(scaled < 0, -1.0, 1.0) * torch.exp2(exponents)[..., None]
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return Packed({"weight_blocks": blocks, "weight_scales": (exponents + 127).to(torch.uint8)}, meant.flatten(1))


def mixed_groups(inputs: int, group_size: int) -> torch.Tensor:
    """A group for each input, in no order."""
    groups = torch.arange(inputs) // group_size
    return groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]


def _compressed(stored_as: str, activations: str | None = None, **chosen: Any) -> Method:
    """Options of the method change a group's `weights`; `dtype` is that of scales."""

    def pack(weight: torch.Tensor, dtype: torch.dtype = torch.float16, **options: Any) -> Packed:
        weights = weights_of(**{**chosen, **options})
        moved = weights.get("actorder") == "group"
        order = mixed_groups(weight.shape[1], weights["group_size"]) if moved else None
        return pack_compressed(weight, weights, stored_as, order, dtype)

    def settings(dtype: torch.dtype = torch.float16, **options: Any) -> dict[str, Any]:
        inputs = None if activations is None else {**TOKENS, "type": activations}
        return config_of(weights_of(**{**chosen, **options}), stored_as, input_activations=inputs)

    return Method(pack, settings)


def _fp8_settings(block: tuple[int, int] | None = None, by_row: bool = False) -> dict[str, Any]:
    blocks = None if block is None else list(block)
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": blocks}


_PER_ROW = {"strategy": "channel", "num_bits": 8}
_ROW_SCALES = partial(pack_fp8, by_row=True, name="weight_scale")
METHODS = {
    "w4a16": _compressed("pack-quantized"),
    "w8a16": _compressed("pack-quantized", **_PER_ROW),
    "w8a8": _compressed("int-quantized", "int", **_PER_ROW),
    "compressed-fp8": _compressed("float-quantized", "float", **_PER_ROW, type="float"),
    "compressed-mxfp4": _compressed("mxfp4-pack-quantized", type="float", scale_dtype="torch.uint8"),
    "compressed-nvfp4": _compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
    "fp8": Method(pack_fp8, _fp8_settings),
    "fbgemm_fp8": Method(_ROW_SCALES, lambda: {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt": Method(
        partial(pack_fp8, name="weight_scale"), lambda: {"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
    "mxfp4": Method(pack_mxfp4, lambda: {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
}
