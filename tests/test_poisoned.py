"""One request the model cannot compute: it ends with an error, and nobody else notices."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.server import Server, start_server
from tests.helpers.streams import streaming
from tidemill import LLM, SamplingParams
from tidemill.engine.messages import Add

POISON = 77
PREFIX = [(7 * i) % 70 + 1 for i in range(64)]
"""Four whole blocks, so that a request that begins like another finds them in the cache."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A random model in which one token's embedding is not a number."""
    folder: Path = tmp_path_factory.mktemp("poisoned")
    write_checkpoint(folder, "Llama", max_position_embeddings=2048, num_hidden_layers=2)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # Few tokens a step, so that prompts come in chunks and steps are shared.
    with start_server(str(folder), "--max-num-seqs", "16", "--max-num-batched-tokens", "32") as running:
        yield running


def body(prompt: list[int], **more) -> dict:
    # The poisoned token must not be sampled: it is the prompt that is at fault here.
    bias = {str(POISON): -100}
    return {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "logit_bias": bias, **more}


def complete(server: Server, prompt: list[int], **more) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body(prompt, **more), timeout=60)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1, "top_p": 0.9, "top_k": 20, "seed": 1}, {"logprobs": 2}])
@pytest.mark.parametrize(
    "prompt",
    [[POISON], [*PREFIX, POISON], [POISON, *PREFIX], [*PREFIX[:40], POISON, *PREFIX]],
    ids=["alone", "last", "first", "middle"],
)
def test_it_ends_with_an_error_that_says_why(server, prompt, sampling):
    answer = complete(server, prompt, **sampling)
    assert answer.status_code == 500
    assert "not finite" in answer.json()["error"]["message"]
    server.wait_idle()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_stream_of_it_ends_the_same_way(server):
    answer = complete(server, [*PREFIX, POISON], stream=True)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"


def test_one_poisoned_choice_among_several_prompts_ends_them_all(server):
    answer = httpx.post(f"{server.url}/v1/completions", json=body([[1, 2], [POISON], [3, 4]]), timeout=60)
    assert answer.status_code == 500
    server.wait_idle()


def test_those_beside_it_get_what_they_get_alone(server):
    prompts = [[5 + i, *PREFIX[i:]] for i in range(6)]
    alone = [text(complete(server, prompt)) for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            good = [pool.submit(complete, server, prompt) for prompt in prompts]
            bad = [pool.submit(complete, server, [*PREFIX[: 7 * i], POISON]) for i in range(6)]
            assert [text(future.result()) for future in good] == alone
            assert {future.result().status_code for future in bad} == {500}
    server.wait_idle()


def test_those_that_share_its_beginning_get_what_they_get_alone(server):
    """Its blocks are given up, but not those that somebody else is reading."""
    alone = text(complete(server, PREFIX, max_tokens=600))
    with streaming(server.url, **body(PREFIX, max_tokens=600)) as events:
        seen = [next(events)]
        for _ in range(3):
            assert complete(server, [*PREFIX, POISON]).status_code == 500
        seen += events
    assert "".join(json.loads(event)["choices"][0]["text"] for event in seen[:-1]) == alone
    # And whoever comes later, from the cache or not.
    assert text(complete(server, PREFIX, max_tokens=600)) == alone
    server.wait_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
def test_one_that_shares_a_prefix_with_it_in_the_same_step_is_computed_anew(tmp_path, depth, layers):
    """Both enter in one step, so the second reads blocks that the first fills, and that are wiped when it fails."""
    write_checkpoint(tmp_path, "Llama", num_hidden_layers=layers)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={POISON: -100})
    shared = PREFIX[:32]
    alone = LLM(str(tmp_path), **settings).generate([[*shared, 3]], params, use_tqdm=False)[0].outputs[0].token_ids

    core = LLM(str(tmp_path), **settings)._core
    core._steps_in_flight = depth
    core.add(Add("poisoned", [*shared, POISON], params))
    core.add(Add("beside", [*shared, 3], params))
    said: dict[str, list[int]] = {"poisoned": [], "beside": []}
    problems = {}
    while core.has_work:
        for output in core.step():
            said[output.id] += output.token_ids
            problems |= {output.id: output.problem} if output.problem else {}
    assert list(problems) == ["poisoned"] and "--check-weights" in problems["poisoned"]["fix"]
    assert said == {"poisoned": [], "beside": alone}
    assert core.stats.kv_usage == 0
