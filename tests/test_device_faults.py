"""What goes wrong on a device, and what is unusual there, stays where it happened: in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.traffic import assert_empty
from tests.test_device_engine import GREEDY, PROMPTS, answers, device_engine, interpreted, llama  # noqa: F401
from tidemill.core.step import Step
from tidemill.engine.core import StepHandle
from tidemill.engine.messages import Add
from tidemill.errors import OutOfMemory
from tidemill.layers.cache_layout import arrange
from tidemill.layers.device_batch import DeviceBatch
from tidemill.layers.spec import CacheShape
from tidemill.layers.triton_attention import TritonAttention
from tidemill.runtime import graphs

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs in Triton's interpreter: with a GPU, Triton refuses CPU tensors"
)


class NoGraphs:
    """Fails when it is asked the first time, and has no graph for anybody after that."""

    sizes: tuple[int, ...] = ()
    asked = 0

    def size_for(self, count: int) -> None:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("a capture went wrong")


def test_a_launch_that_fails_leaves_nothing_for_those_who_get_its_rows(llama, interpreted):  # noqa: F811
    _, folder = llama
    llm = device_engine(folder, max_num_seqs=1)
    core = llm._core
    want = answers(llm, [PROMPTS[2]], GREEDY)
    core.runner.graphs = NoGraphs()
    core.add(Add("fails", [9], GREEDY))
    (output,) = core.step()
    assert output.finish == "error"
    rows, sent = core.runner.rows, []
    take = rows.take_writes

    def watched() -> tuple[np.ndarray, np.ndarray]:
        sent.append(take())
        return sent[-1]

    rows.take_writes = watched
    assert answers(llm, [PROMPTS[2]], GREEDY) == want
    for places, _ in sent:
        # A device writes in any order: what is written twice could be either.
        assert len(places) == len(set(places.tolist()))
    assert_empty(llm)


def test_an_engine_that_was_interrupted_in_a_step_can_be_used_again(llama, interpreted):  # noqa: F811
    """Ctrl-C in a notebook: no result of what was going on is taken for one of what comes after."""
    _, folder = llama
    llm = device_engine(folder)
    want = answers(llm, [PROMPTS[2]], GREEDY)
    runner, launch = llm._core.runner, llm._core.runner.launch
    launched = []

    def interrupted(step: Step) -> StepHandle:
        launched.append(step)
        if len(launched) == 3:
            raise KeyboardInterrupt
        return launch(step)

    runner.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        answers(llm, [PROMPTS[2]], GREEDY)
    assert_empty(llm)
    assert answers(llm, [PROMPTS[2]], GREEDY) == want


def test_a_size_that_cannot_be_captured_late_is_padded_for_good(monkeypatch):
    tried = []

    def capture(self: graphs.DecodeGraphs, size: int) -> None:
        tried.append(size)
        if size == 3:
            raise OutOfMemory("no memory for it", cause="none left")
        self._graphs[size] = ()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs.DecodeGraphs, "_capture", capture)
    made = graphs.DecodeGraphs([1, 2, 3, 4], compute=lambda size: (), clear=lambda size: None)
    made.capture_first()
    assert tried == [4, 2, 1]
    assert [made.size_for(3) for _ in range(3 * graphs.WORTH_CAPTURING)] == [4] * 3 * graphs.WORTH_CAPTURING
    assert tried == [4, 2, 1, 3]


@pytest.mark.parametrize("stored", [None, torch.int8])
def test_a_model_of_transformers_attends_in_its_own_precision_over_any_cache(stored):
    """Keys and values come as transformers has them: views of any order, in the model's type, not the cache's."""
    fallback = pytest.importorskip("tidemill.models.fallback_attention")
    torch.manual_seed(1)
    tokens, heads, dim = 5, 2, 16
    q, k, v = (torch.randn(1, heads, tokens, dim) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    shape, layout = (2, 4, heads), arrange([CacheShape(heads, dim, dim, None)])
    caches = [(torch.zeros(*shape, dim, dtype=stored), torch.zeros(*shape, dim, dtype=stored))]
    scales = None if stored is None else [(torch.zeros(shape), torch.zeros(shape))]
    attention = TritonAttention(caches, layout, scales=scales, dtype=torch.float32)
    attention.plan(
        DeviceBatch(
            rows=torch.tensor([0], dtype=torch.int32),
            query_starts=torch.tensor([0, tokens], dtype=torch.int32),
            context_lens=torch.tensor([tokens], dtype=torch.int32),
            tables=[torch.tensor([[0, 1]], dtype=torch.int32)],
            slots=[torch.arange(tokens)],
            num_decode=0,
            max_query_len=tokens,
            num_tokens=tokens,
        )
    )
    seam = fallback.AttentionSeam(1)
    scattered = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (q, k, v)]
    with seam.over(attention, torch.arange(1, tokens + 1)):
        (found,), _ = seam._attend(torch.nn.Identity(), *scattered, None)
    assert found.dtype == torch.float32
    assert (found - want).abs().max() < (1e-5 if stored is None else 0.05)
