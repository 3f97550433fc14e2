"""Quantised checkpoints written from the definitions of their formats, and what they hold as plain numbers.

Nothing here is shared with the readers under test: streams of bits are Python integers, and dequantised matrices are
computed number by number from the codes. A further format is a `Method` of its own, given to `write_quantised`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import write_checkpoint
from tidemill.weights.dtypes import DTYPES

SMALL = {"vocab_size": 224, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
"""Of a Llama whose matrices every format can hold."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4_TABLE = [sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3)]


@dataclass(frozen=True)
class Packed:
    tensors: dict[str, torch.Tensor]
    """By what follows the module's name and its dot: "qweight", "weight.absmax"."""
    dense: torch.Tensor
    """float32 [outputs, inputs]: the numbers those stand for."""


@dataclass(frozen=True)
class Method:
    pack: Callable[..., Packed]
    """Takes a weight [outputs, inputs] and the options."""
    settings: Callable[..., dict[str, Any]]
    """config.json's quantization_config for the same options."""


@dataclass(frozen=True)
class Header:
    shape: tuple[int, ...]
    dtype: str
    file: str = "model.safetensors"


def directory(tensors: Mapping[str, torch.Tensor]) -> dict[str, Header]:
    """What a file's header says about tensors."""
    names = {f"torch.{torch_name}": name for name, (torch_name, _) in DTYPES.items()}
    return {name: Header(tuple(tensor.shape), names[str(tensor.dtype)]) for name, tensor in tensors.items()}


def write_quantised(
    folder: Path, method: str | Method, *, head: bool = False, config: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Path, Path]:
    """A small Llama in a format, and the same numbers in float32: two folders. `head`: lm_head is quantised too."""
    chosen = METHODS[method] if isinstance(method, str) else method
    dense_folder, quantised_folder = folder / "dense", folder / "quantised"
    write_checkpoint(dense_folder, "Llama", **{**SMALL, **(config or {})})
    shutil.copytree(dense_folder, quantised_folder)
    dense = load_file(dense_folder / "model.safetensors")
    quantised: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(dense.items()):
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight") or (head and module == "lm_head"):
            packed = chosen.pack(tensor, **options)
            quantised.update({f"{module}.{part}": stored.contiguous() for part, stored in packed.tensors.items()})
            dense[name] = packed.dense.contiguous()
        else:
            quantised[name] = tensor
    save_file(dense, dense_folder / "model.safetensors", metadata={"format": "pt"})
    save_file(quantised, quantised_folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((quantised_folder / "config.json").read_text())
    written["quantization_config"] = chosen.settings(**options)
    (quantised_folder / "config.json").write_text(json.dumps(written))
    return quantised_folder, dense_folder


@dataclass(frozen=True)
class Integers:
    """number = (code - zero) * scale."""

    codes: torch.Tensor
    """[outputs, inputs] int64."""
    zeros: torch.Tensor
    """[outputs, groups] int64."""
    scales: torch.Tensor
    """[outputs, groups] of the type they are stored in."""
    index: torch.Tensor
    """[inputs]: the group of each."""

    def dense(self) -> torch.Tensor:
        steps = (self.codes - self.zeros[:, self.index]).double()
        return (steps * self.scales[:, self.index].double()).float()


def groups_of(inputs: int, group_size: int, mixed: bool) -> torch.Tensor:
    index = torch.arange(inputs) // (inputs if group_size == -1 else group_size)
    return index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))] if mixed else index


def random_integers(
    outputs: int,
    inputs: int,
    bits: int,
    group_size: int,
    *,
    sym: bool = False,
    mixed: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Integers:
    """Any codes; zero points of both extremes and in between."""
    generator = torch.Generator().manual_seed(outputs + inputs + bits)
    index, last = groups_of(inputs, group_size, mixed), 2**bits - 1
    shape = (outputs, int(index.max()) + 1)
    zeros = torch.randint(0, last + 1, shape, generator=generator)
    zeros[::3], zeros[1::3] = 0, last
    zeros[::5] = torch.randint(0, last + 1, zeros[::5].shape, generator=generator)
    if sym:
        zeros = torch.full(shape, 2 ** (bits - 1))
    codes = torch.randint(0, last + 1, (outputs, inputs), generator=generator)
    return Integers(codes, zeros, (torch.rand(shape, generator=generator) / last + 1e-3).to(dtype), index)


def rounded(weight: torch.Tensor, bits: int, group_size: int, *, sym: bool, mixed: bool) -> Integers:
    """The nearest codes of a weight."""
    inputs = weight.shape[1]
    index, last = groups_of(inputs, group_size, mixed), 2**bits - 1
    zeros, scales = [], []
    for group in range(int(index.max()) + 1):
        part = weight[:, index == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if sym:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / last).clamp(min=1e-6).half()
        scales.append(scale)
        middle = torch.full_like(low, 2 ** (bits - 1))
        zeros.append((middle if sym else (-low / scale).round().clamp(0, last)).long())
    zero, scale = torch.stack(zeros, 1), torch.stack(scales, 1)
    codes = (weight / scale[:, index].float() + zero[:, index]).round().clamp(0, last).long()
    return Integers(codes, zero, scale, index)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, words] of [rows, codes]: each row one long integer, cut every 32 bits."""
    rows = []
    for row in codes.tolist():
        stream = sum(code << (bits * place) for place, code in enumerate(row))
        rows.append([_signed((stream >> start) & 0xFFFFFFFF) for start in range(0, len(row) * bits, 32)])
    return torch.tensor(rows, dtype=torch.int32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def awq_tensors(matrix: Integers) -> dict[str, torch.Tensor]:
    def packed(numbers: torch.Tensor) -> torch.Tensor:
        by_eight = numbers.t().reshape(numbers.shape[1], -1, 8)[:, :, list(AWQ_ORDER)]
        return words(by_eight.flatten(1), 4)

    scales = matrix.scales.t().contiguous()
    return {"qweight": packed(matrix.codes), "qzeros": packed(matrix.zeros), "scales": scales}


def gptq_tensors(
    matrix: Integers, bits: int, *, less_one: bool = True, borrowed: bool = False, indexed: bool = True
) -> dict[str, torch.Tensor]:
    """`borrowed`: the one is taken from whole words, as GPTQModel does; else a zero of 0 becomes the highest code."""
    zeros = matrix.zeros.t()
    if less_one and borrowed and bits != 3:
        ones = sum(1 << place for place in range(0, 32, bits))
        stored = [[_signed((word - ones) % 2**32) for word in row] for row in words(zeros, bits).tolist()]
        qzeros = torch.tensor(stored, dtype=torch.int32)
    else:
        qzeros = words((zeros - 1) % 2**bits if less_one else zeros, bits)
    tensors = {
        "qweight": words(matrix.codes, bits).t().contiguous(),
        "qzeros": qzeros,
        "scales": matrix.scales.t().contiguous(),
    }
    return {**tensors, "g_idx": matrix.index.int()} if indexed else tensors


def pack_awq(weight: torch.Tensor, group_size: int = 32) -> Packed:
    matrix = rounded(weight, 4, group_size, sym=False, mixed=False)
    return Packed(awq_tensors(matrix), matrix.dense())


def awq_settings(group_size: int = 32) -> dict[str, Any]:
    return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group_size, "zero_point": True}


def pack_gptq(
    weight: torch.Tensor,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    checkpoint_format: str = "gptq",
) -> Packed:
    matrix = rounded(weight, bits, group_size, sym=sym, mixed=desc_act)
    return Packed(gptq_tensors(matrix, bits, less_one=checkpoint_format == "gptq"), matrix.dense())


def gptq_settings(
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    checkpoint_format: str = "gptq",
) -> dict[str, Any]:
    settings = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": desc_act}
    return {"quant_method": "gptq", **settings, "checkpoint_format": checkpoint_format}


def nf4_table() -> list[float]:
    """Quantiles of a normal distribution: eight above 0, seven below, and 0."""

    def quantiles(count: int) -> list[float]:
        high = 0.9677083
        return [NormalDist().inv_cdf(high + (0.5 - high) * step / count) for step in range(count)]

    below, above = quantiles(7), quantiles(8)
    return [-number / below[0] for number in below] + [0.0] + [number / above[0] for number in reversed(above)]


def pack_bnb4(weight: torch.Tensor, kind: str = "nf4", block: int = 64, double: bool = True) -> Packed:
    table = torch.tensor(nf4_table() if kind == "nf4" else FP4_TABLE, dtype=torch.float64)
    flat = weight.double().flatten()
    blocks = torch.arange(len(flat)) // block
    absmax = torch.stack([part.abs().max() for part in flat.split(block)]).clamp(min=1e-6).float()
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {"weight.quant_map": table.float()}
    if double:
        numbers = torch.linspace(-1, 1, 256) ** 3
        offset = float(absmax.mean())
        tops = torch.stack([part.abs().max() for part in (absmax - offset).split(256)]).clamp(min=1e-6)
        wide = tops[torch.arange(len(absmax)) // 256]
        codes = ((absmax - offset) / wide)[:, None].sub(numbers).abs().argmin(1)
        tensors |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": tops}
        tensors["weight.nested_quant_map"] = numbers
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        absmax = numbers[codes] * wide + offset
    else:
        tensors["weight.absmax"] = absmax
    scaled = flat / absmax.double()[blocks]
    codes = scaled[:, None].sub(table).abs().argmin(1)
    pairs = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2)
    tensors["weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return Packed(tensors, (table[codes] * absmax.double()[blocks]).float().view(weight.shape))


def bnb4_settings(kind: str = "nf4", block: int = 64, double: bool = True) -> dict[str, Any]:
    chosen = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, **chosen}


def pack_bnb8(weight: torch.Tensor) -> Packed:
    tops = weight.abs().amax(1)
    codes = (weight * (127 / tops[:, None])).round()
    tensors = {"weight": codes.to(torch.int8), "SCB": tops, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Packed(tensors, (codes.double() * tops.double()[:, None] / 127).float())


def bnb8_settings() -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}


METHODS = {
    "awq": Method(pack_awq, awq_settings),
    "gptq": Method(pack_gptq, gptq_settings),
    "bitsandbytes-4bit": Method(pack_bnb4, bnb4_settings),
    "bitsandbytes-8bit": Method(pack_bnb8, bnb8_settings),
}
