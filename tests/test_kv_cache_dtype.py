"""KV caches narrower than the model, on a CPU: what is kept, what it costs, and that answers do not depend on when and
in which company a token was computed. The GPU's kernels have their own tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import prompts_for
from tidemill import LLM, SamplingParams
from tidemill.config import EngineArgs
from tidemill.core.block_groups import pages_for
from tidemill.device_choice import Device
from tidemill.engine.messages import Add
from tidemill.engine.prepare import prepare
from tidemill.errors import ConfigError
from tidemill.layers.stored_vectors import StoredVectors
from tidemill.nvidia import Gpu
from tidemill.ops import kernels, reference
from tidemill.precision import choose_cache_dtype

SCALED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
NARROW = {**SCALED, "bf16": torch.bfloat16, "half": torch.float16}
SLIDING = {"head_dim": 16, "sliding_window": 11, "num_hidden_layers": 4, "tie_word_embeddings": True}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 12}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT |= {"moe_intermediate_size": 20, "n_shared_experts": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "windows": ("Gemma3", {**SLIDING, "sliding_window_pattern": 2}),
    "capped": ("Gemma2", {**SLIDING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": None}),
    "latent": ("DeepseekV2", LATENT),
}
SETTINGS = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_model_len": 96}
SURE = 0.002
"""Rounding turns the last bits of a number into a whole step, so a token may differ where the best two are closer."""
POISON = 77
CPU = Device("cpu", "there is no GPU")
BF16_CARD = Device("cuda", "it is there", gpu=Gpu("A100", 2**36, 0, (8, 0)))
OLD_CARD = Device("cuda", "it is there", gpu=Gpu("T4", 2**34, 0, (7, 5)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Per family: a tiny random model of transformers and its folder."""
    made: dict[str, tuple[Any, str]] = {}
    for name, (family, config) in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = (write_checkpoint(folder, family, **config), str(folder))
    return made


def engine(folder: str, cache: str, **settings: Any) -> LLM:
    return LLM(folder, kv_cache_dtype=cache, **{**SETTINGS, **settings})


def greedy(llm: LLM, prompts: list[list[int]], count: int = 16) -> list[tuple[list[int], list[float]]]:
    """Per prompt: its tokens, and by how much each was better than the next best."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        answer = output.outputs[0]
        best = [sorted((score.logprob for score in scores.values()), reverse=True) for scores in answer.logprobs]
        found.append((answer.token_ids, [scores[0] - scores[1] for scores in best]))
    return found


def assert_same(found, wanted) -> None:
    """The same tokens, up to where the choice was open: most of them."""
    compared = 0
    for (ours, _), (theirs, leads) in zip(found, wanted, strict=True):
        end = next((place for place, lead in enumerate(leads) if lead < SURE), len(leads))
        assert ours[:end] == theirs[:end]
        compared += end
    assert compared > 0.4 * sum(len(theirs) for theirs, _ in wanted)


class TestStoring:
    """Vectors through the memory of a cache, without an engine."""

    @staticmethod
    def memory(dtype: torch.dtype, computed: torch.dtype = torch.float32) -> StoredVectors:
        scales = torch.zeros(8, 4, 3) if dtype.itemsize == 1 else None
        return StoredVectors(torch.zeros(8, 4, 3, 10, dtype=dtype), scales, computed)

    @pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cache", SCALED)
    def test_quantised_vectors_come_back_as_the_reference_widens_them(self, cache, computed, monkeypatch):
        monkeypatch.setattr("tidemill.layers.stored_vectors.WIDENED_AT_ONCE", 250)
        memory = self.memory(SCALED[cache], computed)
        sizes = torch.logspace(-34, 30, 32)[:, None, None]
        vectors = (torch.randn(32, 3, 10, generator=torch.Generator().manual_seed(0)) * sizes).to(computed)
        memory.write(vectors, torch.arange(32).flip(0))
        blocks = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])
        want = reference.dequantise_vectors(*reference.quantise_vectors(vectors, SCALED[cache]), computed)
        want = want.flip(0).view(8, 4, 3, 10)[blocks].view(2, 16, 3, 10).transpose(1, 2)
        assert torch.equal(memory.gather(blocks, 2), want)

    def test_every_number_of_eight_bits_is_widened_exactly(self):
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 8, 1, 32)
        for scale in (1.0, 2.0**-100, 2.0**20):
            memory = StoredVectors(codes, torch.full((1, 8, 1), scale), torch.float32)
            want = codes.float() * scale
            known = want.isfinite()
            found = memory.gather(torch.tensor([0]), 1).transpose(1, 2).reshape(codes.shape)
            assert torch.equal(found[known], want[known])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_others_are_rounded_once(self, dtype):
        memory = self.memory(dtype)
        vectors = torch.randn(32, 3, 10)
        memory.write(vectors, torch.arange(32))
        found = memory.gather(torch.arange(8), 1)[0].transpose(0, 1)
        assert found.dtype == torch.float32 and torch.equal(found, vectors.to(dtype).float())

    @pytest.mark.parametrize("cache", NARROW)
    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_what_is_not_finite_does_not_become_so(self, cache, number):
        memory = self.memory(NARROW[cache])
        vectors = torch.ones(4, 3, 10)
        vectors[1, 2, 7] = number
        memory.write(vectors, torch.arange(4))
        found = memory.gather(torch.tensor([0]), 1)[0].transpose(0, 1)
        assert not found[1, 2].isfinite().all()
        assert found[[0, 2, 3]].isfinite().all() and found[1, :2].isfinite().all()


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("llama", "int8"),
        ("llama", "fp8"),
        ("llama", "bf16"),
        ("windows", "int8"),
        ("capped", "fp8"),
        ("latent", "int8"),
    ],
)
def test_chunks_preemption_and_prefix_hits_change_nothing(checkpoints, family, cache):
    _, folder = checkpoints[family]
    prompts = prompts_for(1)[3:]
    whole = engine(folder, cache, max_num_seqs=1, max_num_batched_tokens=128, enable_prefix_caching=False)
    wanted = greedy(whole, prompts)
    tight = {"max_num_batched_tokens": 13, "max_num_seqs": 6}
    windows = prepare(EngineArgs(folder, **SETTINGS)).config.block_windows
    blocks = int(1.2 * pages_for(SETTINGS["max_model_len"], 4, windows, tight["max_num_batched_tokens"]))
    llm = engine(folder, cache, num_gpu_blocks_override=blocks, **tight)
    assert_same(greedy(llm, prompts), wanted)
    assert_same(greedy(llm, prompts[-2:]), wanted[-2:])
    stats = llm._core.stats
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.kv_usage == 0


class RoundedCache(DynamicCache):
    """transformers' own cache, which keeps and gives back what ours would."""

    kept: torch.dtype

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(self._rounded(key_states), self._rounded(value_states), *args, **kwargs)

    def _rounded(self, states: torch.Tensor) -> torch.Tensor:
        if self.kept.itemsize > 1:
            return states.to(self.kept).float()
        return reference.dequantise_vectors(*reference.quantise_vectors(states, self.kept), torch.float32)


@pytest.mark.parametrize("cache", NARROW)
@torch.no_grad()
def test_scores_are_those_of_transformers_over_rounded_keys_and_values(checkpoints, cache):
    model, folder = checkpoints["llama"]
    prompt = prompts_for(2)[5]
    rounded = RoundedCache()
    rounded.kept = NARROW[cache]
    want = model(torch.tensor([prompt]), past_key_values=rounded).logits[0].log_softmax(-1)
    exact = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = engine(folder, cache, max_num_batched_tokens=7).generate([prompt], params, use_tqdm=False)
    scored = list(zip(prompt, output.prompt_logprobs, strict=True))[1:]
    ours = torch.tensor([scores[token].logprob for token, scores in scored])
    places = torch.arange(len(ours)), torch.tensor(prompt[1:])
    near, far = (ours - want[places]).abs(), (ours - exact[places]).abs()
    assert near.median() < 1e-4 and near.max() < 0.05
    assert far.mean() > 5 * near.mean(), "the cache rounds"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["auto", *NARROW])
def test_memory_is_what_was_planned(checkpoints, family, cache):
    llm = engine(checkpoints[family][1], cache, num_gpu_blocks_override=80)
    held = llm._core.runner.cache
    tensors = [tensor for slot in [*held.slots, *(held.scales or ())] for tensor in slot if tensor is not None]
    config = prepare(EngineArgs(checkpoints[family][1], kv_cache_dtype=cache, num_gpu_blocks_override=80, **SETTINGS))
    assert sum(tensor[:-1].nbytes for tensor in tensors) == config.config.kv_bytes
    assert (held.scales is not None) == (cache in SCALED)


def test_a_cache_of_half_the_bytes_holds_twice_as_much(checkpoints):
    def planned(cache: str):
        args = EngineArgs(checkpoints["llama"][1], kv_cache_dtype=cache, kv_cache_memory_bytes=2**20, **SETTINGS)
        return prepare(args).config

    plain, bf16, int8 = planned("auto"), planned("bf16"), planned("int8")
    assert bf16.kv_cache_dtype == "bfloat16" and bf16.num_blocks == 2 * plain.num_blocks
    assert bf16.cache_saving == 2 and "bfloat16" in bf16.why["cache_saving"]
    # Heads of 12 numbers: 12 bytes and a scale of 4, of 48.
    assert int8.num_blocks == 3 * plain.num_blocks


@pytest.mark.parametrize("cache", NARROW)
def test_a_poisoned_request_leaves_nothing_behind(tmp_path, cache):
    write_checkpoint(tmp_path, "Llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={POISON: -100})
    llm = engine(str(tmp_path), cache, max_num_seqs=2, num_gpu_blocks_override=24)
    prompt = list(range(1, 20))
    alone = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    core = llm._core
    core.add(Add("poisoned", [*prompt[:9], POISON, *prompt], params))
    core.add(Add("beside", prompt, params))
    said: dict[str, list[int]] = {"poisoned": [], "beside": []}
    problems = {}
    while core.has_work:
        for output in core.step():
            said[output.id] += output.token_ids
            problems |= {output.id: output.problem} if output.problem else {}
    assert list(problems) == ["poisoned"] and said == {"poisoned": [], "beside": alone}
    held = core.runner.cache
    for slot in [*held.slots, *(held.scales or ())]:
        assert all(tensor.float().isfinite().all() for tensor in slot)


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_a_model_in_bfloat16_has_a_cache_of_eight_bits_too(checkpoints, cache):
    llm = engine(checkpoints["llama"][1], cache, dtype="bfloat16")
    ((tokens, _),) = greedy(llm, [[5, 6, 7]], 4)
    assert len(tokens) == 4 and llm._core.runner.cache.slots[0][0].dtype == SCALED[cache]


def test_the_gpus_kernels_read_a_narrower_cache_too(checkpoints, monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter: with a GPU, Triton refuses CPU tensors")
    folder, prompts = checkpoints["llama"][1], [[7, 3, 9]]
    wanted = greedy(engine(folder, "half", max_num_seqs=2), prompts, 2)
    monkeypatch.setattr(kernels, "FORCED", True)
    llm = engine(folder, "half", max_num_seqs=2)
    assert type(llm._core.runner).__name__ == "DeviceRunner"
    assert llm._core.runner.cache.slots[0][0].dtype == torch.float16
    ((tokens, leads),) = greedy(llm, prompts, 2)
    assert tokens == wanted[0][0] and leads == pytest.approx(wanted[0][1], abs=1e-3)


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "chosen"),
    [
        ("auto", "float32", CPU, "float32"),
        ("bf16", "float32", CPU, "bfloat16"),
        ("bfloat16", "float32", CPU, "bfloat16"),
        ("bf16", "bfloat16", CPU, "bfloat16"),
        ("bf16", "bfloat16", BF16_CARD, "bfloat16"),
        ("bf16", "float32", BF16_CARD, "bfloat16"),
        ("half", "float32", CPU, "float16"),
        ("half", "float32", OLD_CARD, "float16"),
        ("int8", "float32", CPU, "int8"),
        ("int8", "bfloat16", CPU, "int8"),
        ("fp8", "float32", CPU, "fp8"),
        ("fp8_e4m3", "bfloat16", CPU, "fp8"),
        ("int8", "float16", OLD_CARD, "int8"),
    ],
)
def test_choices(asked, dtype, device, chosen):
    assert choose_cache_dtype(asked, dtype, device)[0] == chosen


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "words"),
    [
        ("int3", "float32", CPU, "unknown"),
        ("half", "bfloat16", CPU, "no narrower"),
        ("float32", "bfloat16", CPU, "no narrower"),
        ("bf16", "float16", BF16_CARD, "no narrower"),
        ("bf16", "float32", OLD_CARD, "T4 has no bfloat16"),
        ("fp8", "float16", BF16_CARD, "A100 has no fp8"),
    ],
)
def test_refusals(asked, dtype, device, words):
    with pytest.raises(ConfigError) as caught:
        choose_cache_dtype(asked, dtype, device)
    assert words in caught.value.message and caught.value.param == "kv_cache_dtype" and caught.value.fix
