"""Whole small models written as GGUF say what transformers says: the architectures whose files need more than names."""

import gguf
import numpy as np
import pytest
import torch

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_writing import MODEL_ARCH, convert
from tests.helpers.parity import assert_greedy, assert_same_logits, prompts_for, reference_of
from tidemill import LLM, SamplingParams
from tidemill.text.tokenizer import load_tokenizer
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import ModelFiles

EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12}
CASES = {
    "gpt2": ("GPT2", MODEL_ARCH.GPT2, "gpt-2", {"n_inner": 72, "tie_word_embeddings": True}, {}),
    "phi2": ("Phi", MODEL_ARCH.PHI2, "phi-2", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}, {}),
    "mistral": ("Mistral", MODEL_ARCH.LLAMA, "default", {"sliding_window": 9, "head_dim": 12}, {}),
    "mixtral": ("Mixtral", MODEL_ARCH.LLAMA, "default", EXPERTS, {"split_max_tensors": 9}),
    "mixtral-one-by-one": ("Mixtral", MODEL_ARCH.LLAMA, "default", EXPERTS, {"stacked": False}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    family, arch, pre, config, how = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(folder, family, **config)
    source = open_checkpoint(ModelFiles("folder", folder, str(folder)))
    written = convert(source, folder / "m.gguf", arch, model.config, vocabulary=pre, **how)
    return reference_of(model), str(written.files.path)


def test_same_tokens_as_transformers(case):
    """What batching and the cache do to a family is tested with its folders; here a few prompts are enough."""
    reference, path = case
    prompts = prompts_for(1)[3:7]
    llm = LLM(path, dtype="float32", max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert_greedy(reference, prompt, output.outputs[0].token_ids)


def test_same_logits_as_transformers(case):
    assert_same_logits(*case)


@pytest.mark.parametrize("family", ["GPT2", "Phi", "Mixtral"])
def test_quantised_rows_are_those_of_the_dense_reading(tmp_path, family):
    """Of fused, stacked and turned matrices too: 64 inputs are two blocks of Q8_0."""
    _, arch, _, config, _ = next(case for case in CASES.values() if case[0] == family)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    model = write_checkpoint(tmp_path, family, **config | sizes | {"n_inner": 96, "head_dim": 16})
    source = open_checkpoint(ModelFiles("folder", tmp_path, "m"))
    checkpoint = convert(source, tmp_path / "m.gguf", arch, model.config, kind="Q8_0")
    assert len(checkpoint.schemes) == {"GPT2": 4, "Phi": 6, "Mixtral": 19}[family]
    for name, scheme in checkpoint.schemes.items():
        assert scheme.name == "Q8_0"
        assert torch.equal(checkpoint.read_stored(name).dense(), checkpoint.read(name)), name


def test_phi2_with_queries_keys_and_values_in_one_tensor(tmp_path):
    """As files made before transformers had the model hold them."""
    rows = {part: np.full((32, 32), value, np.float32) for value, part in enumerate("qkv")}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "phi2")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    kind = gguf.GGMLQuantizationType.Q8_0
    stack = np.concatenate(list(rows.values()))
    writer.add_tensor("blk.0.attn_qkv.weight", gguf.quants.quantize(stack, kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_qkv.bias", np.ascontiguousarray(stack[:, 0]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(ModelFiles("gguf", tmp_path / "m.gguf", "m"))
    for part, expected in rows.items():
        name = f"model.layers.0.self_attn.{part}_proj"
        torch.testing.assert_close(checkpoint.read(f"{name}.weight"), torch.from_numpy(expected), rtol=1e-3, atol=0)
        assert torch.equal(checkpoint.read_stored(f"{name}.weight").dense(), checkpoint.read(f"{name}.weight"))
        assert torch.equal(checkpoint.read(f"{name}.bias"), torch.from_numpy(expected[:, 0]))


@pytest.mark.parametrize("pre", ["gpt-2", "phi-2"])
def test_their_vocabularies_cut_text_as_gpt2_does(tmp_path, pre, caplog):
    folder = tmp_path / "folder"
    model = write_checkpoint(folder, "GPT2", n_inner=72, tie_word_embeddings=True)
    source = open_checkpoint(ModelFiles("folder", folder, "m"))
    written = convert(source, tmp_path / "m.gguf", MODEL_ARCH.GPT2, model.config, vocabulary=pre)
    tokenizer = load_tokenizer(written.files)
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str("It's 1234 words")
    assert [word for word, _ in cut] == ["It", "'s", "Ġ1234", "Ġwords"]
    assert not caplog.records
