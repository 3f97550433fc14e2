"""Quantised matrices of a GGUF as they stay in memory: the file's own integers, in a scheme told from headers alone."""

import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch

from tests.test_gguf_dequant import QUANTISED
from tidemill.quant.packed import empty
from tidemill.quant.scheme import STORED_GROUP_SIZES, TABLES
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.gguf_schemes import SCHEMES
from tidemill.weights.location import ModelFiles, locate

EMBEDDING = "model.embed_tokens.weight"
ROWS, COLUMNS = 32, 512
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Where blocks keep their float16 numbers; the others at their start."""
BITS = {
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 8.5, "Q5_1": 9, "Q8_0": 8.5,
    "Q2_K": 6, "Q3_K": 5, "Q4_K": 5, "Q5_K": 9, "Q6_K": 9,
    "IQ1_S": 4.5, "IQ1_M": 5, "IQ2_XXS": 4.5, "IQ2_XS": 5, "IQ2_S": 5, "IQ3_XXS": 4.5, "IQ3_S": 4.5,
    "IQ4_NL": 4.5, "IQ4_XS": 4.5, "TQ1_0": 4.125, "TQ2_0": 4.125, "MXFP4": 5, "NVFP4": 5,
}  # fmt: skip
"""What a weight takes in memory, scales included."""


def likely_blocks(name: str, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Random integers with scales as trained weights have them, a few thousandths for the largest number."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    random = np.random.default_rng(11)
    blocks = random.integers(0, 256, (rows * columns // elements, nbytes), dtype=np.uint8)
    scales = random.uniform(1e-4, 4e-4, (len(blocks), 2)).astype(np.float16)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(100, 125, len(blocks))
    elif name == "IQ1_M":
        # Spread over the highest four bits of four words.
        word = scales[:, 0].view(np.uint16)
        for place in range(4):
            blocks[:, 49 + 2 * place] = (blocks[:, 49 + 2 * place] & 15) | (((word >> (4 * place)) & 15) << 4)
    elif name != "NVFP4":
        for place, at in enumerate(HALVES.get(name, (0,))):
            blocks[:, at : at + 2] = scales[:, place : place + 1].copy().view(np.uint8)
    return blocks.reshape(rows, -1)


def write_llama(path, name: str, **tensors: np.ndarray):
    """A llama of one layer's worth of names, all of one block type."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(COLUMNS)
    writer.add_feed_forward_length(COLUMNS)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if any("exps" in tensor for tensor in tensors):
        writer.add_expert_count(3)
        writer.add_expert_used_count(2)
    kind = gguf.GGMLQuantizationType[name]
    for tensor, blocks in tensors.items():
        writer.add_tensor(tensor.replace("__", "."), blocks, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(COLUMNS, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(ModelFiles("gguf", path, "m"))


@pytest.fixture(scope="module", params=QUANTISED)
def stored(request, tmp_path_factory):
    name = request.param
    blocks = likely_blocks(name)
    path = tmp_path_factory.mktemp(name) / "m.gguf"
    return name, write_llama(path, name, token_embd__weight=blocks, blk__0__attn_q__weight=blocks)


class TestEveryType:
    def test_numbers_are_those_of_the_dense_reading(self, stored):
        _, checkpoint = stored
        for name in (EMBEDDING, "model.layers.0.self_attn.q_proj.weight"):
            dense = checkpoint.read(name)
            assert torch.equal(checkpoint.read_stored(name).dense(), dense), name
            assert dense.abs().max() > 0

    def test_codes_are_as_the_scheme_says(self, stored):
        name, checkpoint = stored
        scheme, matrix = checkpoint.schemes[EMBEDDING], checkpoint.read_stored(EMBEDDING)
        assert scheme.name == name and scheme is SCHEMES[name]
        assert scheme.group_size in STORED_GROUP_SIZES and matrix.group_size % scheme.group_size == 0
        assert matrix.table == scheme.table and (scheme.table is None or scheme.table in TABLES)
        assert (matrix.offsets is not None) == scheme.zeros
        signed = scheme.kind == "int" and not scheme.zeros
        low, high = (-(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1) if signed else (0, 2**scheme.bits - 1)
        assert low <= matrix.codes.min().item() and matrix.codes.max().item() <= high
        assert matrix.scales.dtype == torch.float32

    @pytest.mark.parametrize("layout", ["words", "tiles"])
    def test_packed_memory_holds_them_and_no_scale_is_lost(self, stored, layout):
        name, checkpoint = stored
        scheme, matrix = checkpoint.schemes[EMBEDDING], checkpoint.read_stored(EMBEDDING)
        packed = empty(scheme, ROWS, COLUMNS, lambda shape, dtype: torch.zeros(shape, dtype=dtype), layout)
        packed.store(matrix)
        assert packed.num_bytes * 8 / matrix.codes.numel() == BITS[name]
        assert packed.scales.isfinite().all()
        assert (packed.scales == 0).sum() <= (matrix.spread(matrix.scales, scheme.group_size) == 0).sum()
        dense = matrix.dense()
        error = (packed.unpack() - dense).abs().max() / dense.abs().max()
        assert error < 1e-3


def test_experts_have_an_entry_each(tmp_path):
    stack = np.stack([likely_blocks("Q4_K")] * 3)
    stack[1, :, 16:] ^= 255
    checkpoint = write_llama(
        tmp_path / "m.gguf", "Q4_K", token_embd__weight=likely_blocks("Q4_K"), blk__0__ffn_up_exps__weight=stack
    )
    names = [f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight" for expert in range(3)]
    assert set(names) < set(checkpoint.schemes)
    parts = [checkpoint.read_stored(name) for name in names]
    assert torch.equal(parts[0].codes, parts[2].codes) and not torch.equal(parts[0].codes, parts[1].codes)
    assert torch.equal(parts[1].dense(), checkpoint.read(names[1]))


def test_what_is_dense_has_no_scheme(tmp_path):
    checkpoint = write_llama(tmp_path / "m.gguf", "Q8_0", token_embd__weight=likely_blocks("Q8_0"))
    assert set(checkpoint.schemes) == {EMBEDDING} and checkpoint.format == "gguf"
    with pytest.raises(KeyError):
        checkpoint.read_stored("model.norm.weight")


def test_all_of_smollm2_stays_as_it_is():
    checkpoint = open_checkpoint(locate("smollm2"))
    matrices = {name for name, info in checkpoint.tensors.items() if len(info.shape) == 2}
    assert set(checkpoint.schemes) == matrices
    for name in [name for name in matrices if ".layers.7." in name]:
        assert torch.equal(checkpoint.read_stored(name).dense(), checkpoint.read(name))


def test_schemes_are_told_without_torch(tmp_path):
    write_llama(tmp_path / "m.gguf", "IQ2_XS", token_embd__weight=likely_blocks("IQ2_XS"))
    code = "import sys; from pathlib import Path; from tidemill.weights.location import ModelFiles; "
    code += "from tidemill.weights.checkpoint import open_checkpoint; "
    code += "schemes = open_checkpoint(ModelFiles('gguf', Path(sys.argv[1]), 'm')).schemes; "
    code += "print(schemes['model.embed_tokens.weight'].name, 'torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.gguf")], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.split() == ["IQ2_XS", "False"], ended.stderr
