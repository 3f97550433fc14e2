"""Every block type becomes the numbers the gguf package gives, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from tidemill.errors import UnsupportedModel
from tidemill.weights import gguf_dequant
from tidemill.weights.gguf_checkpoint import GgufCheckpoint
from tidemill.weights.gguf_schemes import SCHEMES
from tidemill.weights.location import ModelFiles, locate

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
QUANTISED += ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"]
QUANTISED += ["TQ1_0", "TQ2_0", "MXFP4", "NVFP4"]


def random_blocks(kind: gguf.GGMLQuantizationType, count: int) -> np.ndarray:
    """Any bits are valid blocks; only scales that are no numbers are avoided."""
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(7)
    blocks = random.integers(0, 256, (4 * count, nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(gguf.quants.dequantize(blocks, kind)).all(axis=1)
    return np.ascontiguousarray(blocks[finite][:count])


@pytest.mark.parametrize("name", QUANTISED)
def test_random_blocks_are_bit_equal(name, monkeypatch):
    monkeypatch.setattr(gguf_dequant, "_CHUNK_ELEMENTS", 1 << 12)
    kind = gguf.GGMLQuantizationType[name]
    blocks = random_blocks(kind, 100)
    expected = gguf.quants.dequantize(blocks, kind)
    elements, _ = gguf.GGML_QUANT_SIZES[kind]
    actual = gguf_dequant.dequantize(torch.from_numpy(blocks).view(-1), name, (len(blocks), elements))
    assert actual.dtype == torch.float32
    # -0.0 and 0.0 count as equal: one side subtracts a minimum of zero, the other adds its negative
    assert torch.equal(actual, torch.from_numpy(expected))


@pytest.mark.parametrize("name", QUANTISED)
def test_the_extremes_of_every_field_are_bit_equal(name):
    """One stretch of bytes after the other is all set or all clear, in a block that is random otherwise."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = np.repeat(random_blocks(kind, 1), 64, axis=0)
    for row in range(1, 64):
        # What stops being a number by it is left out below.
        start = (row // 2) * blocks.shape[1] // 32
        blocks[row, start : start + 8] = 255 * (row % 2)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, kind).astype(np.float32)
    finite = np.isfinite(expected).all(axis=1)
    actual = gguf_dequant.dequantize(torch.from_numpy(blocks[finite]).view(-1), name, expected[finite].shape)
    assert finite.sum() > 16
    assert torch.equal(actual, torch.from_numpy(expected[finite]))


def test_every_type_of_the_gguf_package_that_holds_weights_is_read():
    held = {kind.name for kind in gguf.quants._type_traits} - {"BF16"}
    assert held == set(QUANTISED) == set(gguf_dequant.UNPACK) == set(SCHEMES)


def test_an_unsupported_type_names_the_tensor_and_what_is_supported():
    with pytest.raises(UnsupportedModel) as caught:
        gguf_dequant.check_supported("Q8_K", "blk.0.ffn_up.weight")
    assert "blk.0.ffn_up.weight" in caught.value.message and "Q8_K" in caught.value.message
    assert "Q4_K" in caught.value.cause


def write_model(path, kind: gguf.GGMLQuantizationType, endianess=gguf.GGUFEndian.LITTLE):
    """A llama of one tensor per kind of name, big enough for a block of 256."""
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if kind.name in ("F32", "F16", "BF16"):
        values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
        raw = gguf.quants.quantize(values, kind)
    else:
        raw = random_blocks(kind, 256 * 8 // gguf.GGML_QUANT_SIZES[kind][0]).reshape(8, -1)
    expected = gguf.quants.dequantize(raw.copy(), kind)
    stored = (swapped(raw.copy(), kind) if endianess == gguf.GGUFEndian.BIG else raw).view(np.uint8)
    writer.add_tensor("token_embd.weight", stored, raw_shape=stored.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(expected.reshape(8, 256).astype(np.float32))


def swapped(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    sizes = {"F32": 4, "F16": 2, "BF16": 2}
    flat = raw.view(np.uint8)
    if kind.name in sizes:
        return flat.reshape(-1, sizes[kind.name])[:, ::-1].reshape(flat.shape).copy()
    fields = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[kind.name]
    blocks = flat.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]).copy()
    for at in fields:
        blocks[:, at : at + 2] = blocks[:, at : at + 2][:, ::-1].copy()
    return blocks.reshape(flat.shape)


@pytest.mark.parametrize("endianess", list(gguf.GGUFEndian))
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_tensors_of_both_byte_orders(tmp_path, name, endianess):
    path = tmp_path / "m.gguf"
    expected = write_model(path, gguf.GGMLQuantizationType[name], endianess)
    actual = GgufCheckpoint(ModelFiles("gguf", path, "m")).read("model.embed_tokens.weight")
    assert torch.equal(actual.float(), expected)


def test_all_of_smollm2_is_bit_equal():
    files = locate("smollm2")
    checkpoint = GgufCheckpoint(files)
    assert len(checkpoint.tensors) == 272
    reference = gguf.GGUFReader(files.path)
    by_name = {tensor.name: tensor for tensor in reference.tensors}
    # the rows of q and k are reordered, which test_gguf_names checks against transformers
    for name, source in checkpoint._sources.items():
        if "q_proj" in name or "k_proj" in name:
            continue
        tensor = by_name[source.name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(checkpoint.read(name), torch.from_numpy(expected.reshape(source.shape).copy())), name
