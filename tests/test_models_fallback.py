"""Models run by transformers' own code over the paged cache: the same answers as transformers, as the native models, or
a refusal that says why."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers

from tests.helpers.checkpoints import greedy, reset_rope, write_checkpoint, write_model
from tests.helpers.parity import assert_same_logits, assert_same_tokens, prompts_for, reference_of
from tidemill import LLM, SamplingParams
from tidemill.errors import BadCheckpoint, StartupError, UnsupportedModel
from tidemill.layers.parameter import Placement
from tidemill.models import fallback_probe
from tidemill.models.fallback import TransformersModel
from tidemill.models.fallback_probe import probe
from tidemill.models.fallback_shape import describe_transformers

FLOAT32 = Placement(torch.float32, torch.device("cpu"))
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}

NATIVE = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0}),
    "phi3": ("Phi3", {"sliding_window": 11, "pad_token_id": 0}),
    "mixtral": ("Mixtral", EXPERTS),
}
OTHERS = {
    "olmo2": ("Olmo2", {}),
    "olmo3-windows": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 10}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0}),
    "starcoder2-window": ("Starcoder2", {"sliding_window": 12}),
    "youtu-latent": ("Youtu", {**LATENT, "tie_word_embeddings": True}),
    "granitemoe": ("GraniteMoe", {**EXPERTS, "logits_scaling": 3.0, "attention_multiplier": 0.3}),
    "ctrl-fixed-positions": (
        "CTRL",
        {"n_embd": 48, "n_head": 4, "n_layer": 3, "dff": 80, "n_positions": 128, "vocab_size": 203},
    ),
}


@pytest.fixture
def probing_here(monkeypatch):
    """The child process is tested below; here, where transformers is loaded already, its answer is found at once."""
    monkeypatch.setattr(fallback_probe, "probe", lambda path, trust: describe_transformers(path, trust).shape)


def write(name, folder):
    family, config = {**NATIVE, **OTHERS}[name]
    return write_checkpoint(folder, family, **config)


@pytest.mark.parametrize("name", [*NATIVE, *OTHERS])
def test_same_answers_as_transformers_in_a_mixed_batch_with_chunks_hits_and_preemption(name, tmp_path, probing_here):
    reference = reference_of(write(name, tmp_path))
    llm = assert_same_tokens(reference, str(tmp_path), model_impl="transformers")
    assert llm.config.model_impl == "transformers"
    assert_same_logits(reference, str(tmp_path), model_impl="transformers")


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_model_and_the_fallback_agree(name, tmp_path, probing_here):
    write(name, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
    scores = {}
    for impl in ("native", "transformers"):
        llm = LLM(str(tmp_path), model_impl=impl, dtype="float32", block_size=4, max_num_batched_tokens=13)
        outputs = llm.generate(prompts_for(3), params, use_tqdm=False)
        scores[impl] = [
            {token: score.logprob for token, score in step.items()}
            for output in outputs
            for step in output.outputs[0].logprobs
        ]
    for native, fallback in zip(scores["native"], scores["transformers"], strict=True):
        assert native == pytest.approx(fallback, abs=1e-4)


LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
BY_LENGTH = {
    "dynamic": (
        "Olmo2",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
        },
    ),
    "longrope": ("Olmo2", {"rope_parameters": LONGROPE}),
    "longrope-computed-anew": (
        "Phimoe",
        {
            **EXPERTS,
            "original_max_position_embeddings": 32,
            "rope_parameters": {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.5},
        },
    ),
}


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_rotations_by_length_do_not_depend_on_who_shares_the_batch(kind, tmp_path, probing_here):
    """transformers rotates all tokens of a pass for its longest position; only alone is that a sequence's own."""
    family, config = BY_LENGTH[kind]
    model = write_checkpoint(tmp_path, family, **config)
    prompts = prompts_for(1)
    want = [greedy(model, prompt, 20) for prompt in prompts]
    llm = LLM(
        str(tmp_path),
        model_impl="transformers",
        dtype="float32",
        block_size=4,
        max_model_len=96,
        max_num_batched_tokens=13,
        max_num_seqs=6,
        num_gpu_blocks_override=40,
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for _ in range(2):  # the second time the prompts are in the cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == want
    assert llm._core.stats.prefix_hits > 0 and llm._core.stats.preemptions > 0
    reset_rope(model)
    assert_same_logits(reference_of(model), str(tmp_path), model_impl="transformers", max_model_len=96)


def test_two_models_of_a_process_do_not_mix(tmp_path, probing_here):
    models = {}
    for name in ("olmo2", "gemma2"):
        (tmp_path / name).mkdir()
        reference = write(name, tmp_path / name)
        models[name] = (reference, LLM(str(tmp_path / name), model_impl="transformers", dtype="float32"))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for prompt in prompts_for(4)[:3]:
        for reference, llm in models.values():
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].token_ids == greedy(reference, prompt, 4)


def test_layers_keep_what_their_window_shows(tmp_path):
    write("olmo3-windows", tmp_path)
    shape = describe_transformers(tmp_path, False).shape
    assert [cache.window for cache in shape.caches] == [10, 10, 10, None]
    assert set(shape.layout.windows) == {10, None}


def test_bfloat16_and_pickled_weights_load(tmp_path):
    model = write("olmo2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = TransformersModel(tmp_path, Placement(torch.bfloat16, torch.device("cpu")))
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.bfloat16}
    assert not any(tensor.requires_grad for tensor in loaded.model.parameters())


def test_a_tensor_that_is_missing_is_named_instead_of_made_up(tmp_path):
    model = write("olmo2", tmp_path)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(BadCheckpoint, match=r"no tensor model\.layers\.1\.mlp\.up_proj"):
        TransformersModel(tmp_path, FLOAT32)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    write("olmo2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(BadCheckpoint, match=r"down_proj\.weight has shape \(48, 80\), the config makes it \(48, 64\)"):
        TransformersModel(tmp_path, FLOAT32)


def config_only(folder, family, architecture, **changes):
    config = getattr(transformers, f"{family}Config")(**changes)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


REFUSED = {
    "alibi inside its own attention": (("Bloom", "BloomForCausalLM"), "computes its attention itself"),
    "classes of its own per implementation": (("Falcon", "FalconForCausalLM"), "computes its attention itself"),
    "mamba": (("Mamba", "MambaForCausalLM"), "running state per sequence"),
    "rwkv": (("Rwkv", "RwkvForCausalLM"), "running state per sequence"),
    "attention and mamba": (("Jamba", "JambaForCausalLM"), "running state per sequence"),
    "convolutions": (("Lfm2", "Lfm2ForCausalLM", {"layer_types": ["conv"] * 32}), "running state per sequence"),
    "an encoder and a decoder": (("T5", "T5ForConditionalGeneration"), "an encoder and a decoder"),
    "looking ahead": (("Bert", "BertLMHeadModel"), "neither causal nor a sliding window: position 0 sees 1"),
    "sinks": (("GptOss", "GptOssForCausalLM"), "takes 's_aux'"),
    "chosen keys": (("DeepseekV32", "DeepseekV32ForCausalLM"), "takes 'indices'"),
    "chunks": (("Llama4Text", "Llama4ForCausalLM"), "as with attention in chunks"),
    "positions counted inside": (("Blenderbot", "BlenderbotForCausalLM", {"is_encoder_decoder": False}), "takes none"),
    "another head": (("Llama", "LlamaForSequenceClassification"), "no causal language model"),
    "no text": (("ViT", "ViTForImageClassification"), "no causal language model of 'vit'"),
    "quantised": (
        ("Llama", "LlamaForCausalLM", {"quantization_config": {"quant_method": "awq"}}),
        "quantization_config",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(name, tmp_path):
    (family, architecture, *changes), reason = REFUSED[name]
    folder = config_only(tmp_path, family, architecture, **(changes[0] if changes else {}))
    with pytest.raises(UnsupportedModel) as caught:
        describe_transformers(folder, False)
    assert reason in caught.value.cause
    assert caught.value.fix


def test_an_unknown_model_is_refused_with_what_transformers_says(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NovaForCausalLM"], "model_type": "nova"}))
    with pytest.raises(UnsupportedModel, match="NovaForCausalLM") as caught:
        describe_transformers(tmp_path, False)
    assert "nova" in caught.value.cause
    assert "--upgrade transformers" in caught.value.fix


def test_the_child_tells_the_shape_of_a_large_model_from_its_config_alone(tmp_path):
    size = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    folder = config_only(tmp_path, "Olmo3", "Olmo3ForCausalLM", **size, num_key_value_heads=8)
    shape = probe(folder)
    assert (shape.architecture, shape.hidden_size, len(shape.caches)) == ("Olmo3ForCausalLM", 5120, 64)
    assert {cache.window for cache in shape.caches} == {4096, None}
    assert {(cache.kv_heads, cache.key_dim, cache.value_dim) for cache in shape.caches} == {(8, 128, 128)}
    assert 3 * 27648 <= shape.widest_layer <= 6 * 27648


def test_the_child_tells_why_not_in_words(tmp_path):
    with pytest.raises(UnsupportedModel) as caught:
        probe(config_only(tmp_path, "Mamba", "MambaForCausalLM"))
    assert "running state per sequence" in caught.value.cause
    assert "Traceback" not in caught.value.report()


def test_the_child_has_a_time_limit(tmp_path):
    with pytest.raises(StartupError, match="within 0 s"):
        probe(config_only(tmp_path, "Olmo2", "Olmo2ForCausalLM"), time_limit=0.01)


def test_a_child_that_dies_leaves_its_last_words(tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("raise SystemExit('transformers is broken here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StartupError) as caught:
        probe(config_only(tmp_path, "Olmo2", "Olmo2ForCausalLM"))
    assert "transformers is broken here" in caught.value.cause


def test_asking_loads_no_torch():
    code = (
        "import sys, tidemill.models.fallback_probe; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


CONFIGURATION = """
from transformers import PreTrainedConfig

class TinyConfig(PreTrainedConfig):
    model_type = "tiny-of-its-own"

    def __init__(self, vocab_size=203, hidden_size=48, num_attention_heads=4, num_hidden_layers=2, shift=0, **rest):
        self.vocab_size, self.hidden_size, self.shift = vocab_size, hidden_size, shift
        self.num_attention_heads, self.num_hidden_layers = num_attention_heads, num_hidden_layers
        self.max_position_embeddings = 128
        super().__init__(**rest)
"""

MODELING = """
import os
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_tiny import TinyConfig

if "TINY_WAS_RUN" in os.environ:
    Path(os.environ["TINY_WAS_RUN"]).touch()
print("own code prints where it likes")

NUMBERS = torch.ones(1)

def eager(module, query, key, value, attention_mask, scaling, **_):
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores + attention_mask[..., : key.shape[-2]]
    return (scores.softmax(-1) @ value).transpose(1, 2), None

class TinyAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal, self.shift = config, True, config.shift
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, mask, **rest):
        x = x * NUMBERS + (torch.roll(x, 1, 1) if self.shift else 0)
        heads = (self.config.num_attention_heads, -1)
        q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        found, _ = attend(self, q, k, v, mask, scaling=0.25, dropout=0.0, **rest)
        return self.out(found.flatten(2))

class TinyModel(PreTrainedModel):
    config_class = TinyConfig
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(TinyAttention(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, **rest):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.tokens(input_ids) + self.places(position_ids)
        mask = create_causal_mask(self.config, x, attention_mask, None, position_ids)
        for layer in self.layers:
            x = x + layer(x, mask, **rest)
        return BaseModelOutputWithPast(last_hidden_state=x)

class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, **rest):
        return CausalLMOutputWithPast(logits=30 * torch.tanh(self.lm_head(self.model(input_ids, **rest)[0]) / 30))
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A checkpoint that brings its own code: (folder, reference model, file that appears when the code is run)."""

    def write_own(**changes):
        modules = str(tmp_path / "modules")
        monkeypatch.setenv("HF_MODULES_CACHE", modules)
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        monkeypatch.syspath_prepend(modules)
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "configuration_tiny.py").write_text(CONFIGURATION)
        (folder / "modeling_tiny.py").write_text(MODELING)
        get = transformers.dynamic_module_utils.get_class_from_dynamic_module
        config = get("configuration_tiny.TinyConfig", str(folder))(**changes)
        config.auto_map = {
            "AutoConfig": "configuration_tiny.TinyConfig",
            "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
        }
        torch.manual_seed(0)
        kind = get("modeling_tiny.TinyForCausalLM", str(folder))
        model = write_model(folder, kind._from_config(config, attn_implementation="eager"))
        was_run = tmp_path / "was-run"
        monkeypatch.setenv("TINY_WAS_RUN", str(was_run))
        return folder, model, was_run

    return write_own


def test_own_code_of_a_checkpoint_does_not_run_untrusted(own_code):
    folder, _, was_run = own_code()
    with pytest.raises(UnsupportedModel, match="brings its own code") as caught:
        probe(folder)
    assert "modeling_tiny.py" in caught.value.cause
    assert "--trust-remote-code" in caught.value.fix and "--revision" in caught.value.fix
    assert not was_run.exists()


def test_own_code_of_a_checkpoint_runs_when_trusted(own_code):
    folder, model, was_run = own_code()
    settings = {"model_impl": "auto", "trust_remote_code": True}
    assert_same_logits(reference_of(model), str(folder), **settings)
    assert was_run.exists()


def test_a_model_that_mixes_tokens_outside_of_attention_is_found_when_it_is_loaded(own_code):
    folder, _, _ = own_code(shift=1)
    with pytest.raises(UnsupportedModel) as caught:
        TransformersModel(folder, FLOAT32, trust_remote_code=True)
    assert "mixes tokens outside of attention" in caught.value.cause
