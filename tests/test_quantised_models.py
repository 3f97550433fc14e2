"""Whole models of every quantised format against the dense model of the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import packers, packers_ct
from tests.helpers.packers import write_quantised
from tidemill import LLM, SamplingParams
from tidemill.errors import ConfigError
from tidemill.ops.cpu.library import available
from tidemill.quant.on_load import PackedRows
from tidemill.quant.packed import PackedWeight

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "awq": ("awq", {"group_size": 32}),
    "gptq": ("gptq", {"bits": 4, "group_size": 32}),
    "gptq 3 bits in act-order": ("gptq", {"bits": 3, "group_size": 16, "desc_act": True}),
    "gptq 8 bits": ("gptq", {"bits": 8, "group_size": -1}),
    "nf4": ("bitsandbytes-4bit", {}),
    "llm.int8": ("bitsandbytes-8bit", {}),
    **{name: (name, {}) for name in packers_ct.METHODS},
}
PROMPTS = [[(7 * start + 3 * step * step) % 100 + 3 for step in range(1 + start)] for start in range(20)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
FEW = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 48}


def answers(llm: LLM) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens, and the best score of each."""
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    scores = [[max(one.logprob for one in step.values()) for step in output.logprobs] for output in outputs]
    return [output.token_ids for output in outputs], torch.tensor(scores)


@pytest.fixture(autouse=True)
def looked_at_anew():
    yield
    available.cache_clear()


@pytest.fixture(scope="module", params=CASES)
def written(request, tmp_path_factory) -> tuple[str, Path, Path]:
    method, options = CASES[request.param]
    chosen = {**packers.METHODS, **packers_ct.METHODS}[method]
    return request.param, *write_quantised(tmp_path_factory.mktemp("quantised"), chosen, **options)


def test_the_reference_gives_the_very_tokens(written, monkeypatch):
    name, quantised, dense = written
    monkeypatch.setenv("TIDEMILL_KERNELS", "reference")
    available.cache_clear()
    # Named, a format stays as it is stored even where nothing but the reference multiplies it.
    llm = LLM(str(quantised), quantization=stored_format(quantised), **FEW)
    assert llm.config.quantization == "stored", name
    assert any(isinstance(piece.weight, PackedWeight) for piece in llm._core.runner.model.layers[0].mlp.up.pieces)
    tokens, scores = answers(llm)
    wanted, wanted_scores = answers(LLM(str(dense), **FEW))
    if name == "compressed-nvfp4":
        # Its own package rounds the product of two scales to bfloat16, and so does the dense model.
        assert error_of_logits(llm, LLM(str(dense), **FEW)) < 1e-2
        return
    assert tokens == wanted
    assert (scores - wanted_scores).norm() / wanted_scores.norm() < 1e-3


@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_native_kernels_stay_near(written):
    name, quantised, dense = written
    llm, peer = LLM(str(quantised), **FEW), LLM(str(dense), **FEW)
    assert llm.config.quantization == "stored"
    assert held(llm) == llm.config.weight_bytes
    assert error_of_logits(llm, peer) < (1e-2 if name == "compressed-nvfp4" else 1e-3)


def test_named_otherwise_it_is_refused(written):
    name, quantised, _ = written
    other = "gptq" if stored_format(quantised) != "gptq" else "awq"
    with pytest.raises(ConfigError, match=f"quantization '{other}' is not what .* is") as caught:
        LLM(str(quantised), quantization=other, **FEW)
    assert stored_format(quantised) in str(caught.value.cause), name


def held(llm: LLM) -> int:
    """Bytes of all parameters."""
    storages = {}
    for parameter in llm._core.runner.model.parameters():
        target = parameter.target.weight if isinstance(parameter.target, PackedRows) else parameter.target
        for tensor in target.tensors() if isinstance(target, PackedWeight) else (target,):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def stored_format(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]


@torch.no_grad()
def error_of_logits(llm: LLM, peer: LLM) -> float:
    """Relative, over the prompts of several tokens."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=20)
    found = []
    for engine in (llm, peer):
        outputs = engine.generate(PROMPTS[-4:], params, use_tqdm=False)
        rows = [row for output in outputs for row in output.prompt_logprobs[1:]]
        found.append([{token: entry.logprob for token, entry in row.items()} for row in rows])
    rows = zip(*found, strict=True)
    pairs = [(mine[token], theirs[token]) for mine, theirs in rows for token in mine if token in theirs]
    mine, theirs = torch.tensor(pairs).t()
    return float((mine - theirs).norm() / theirs.norm())


def test_every_method_of_the_packers_is_here():
    assert {method for method, _ in CASES.values()} == {*packers.METHODS, *packers_ct.METHODS}
