"""A mixture of experts in Triton against the reference: which experts a token goes to, the sorting, and both ways of
computing them. Runs in Triton's interpreter without a GPU, and with more shapes and bfloat16 on one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tidemill.layers.moe import Moe
from tidemill.layers.parameter import Placement
from tidemill.layers.spec import MlpSpec, MoeSpec
from tidemill.ops import kernels, reference
from tidemill.ops.triton import moe, moe_pairs, moe_tiles, routing

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def mixture(tokens: int, experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype = torch.float32):
    """The arguments of mix_experts but the activation; every token's experts are different ones."""
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(DEVICE)
    weights = torch.rand(tokens, top_k).to(DEVICE, dtype)
    up = (numbers(experts, 2 * inner, width) / width**0.5).to(dtype)
    down = (numbers(experts, width, inner) / inner**0.5).to(dtype)
    return numbers(tokens, width, dtype=dtype), chosen, weights, up, down


def assert_mixed(found: torch.Tensor, args: tuple[torch.Tensor, ...], activation: str) -> None:
    x, chosen, weights, up, down = args
    want = reference.mix_experts(x.float(), chosen, weights.float(), up.float(), down.float(), activation)
    tolerance = TOLERANCE[x.dtype]
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.float(), want, rtol=tolerance, atol=tolerance)


CASES = {
    "one token": (1, 8, 2, 64, 48),
    "three tokens, odd sizes": (3, 8, 2, 33, 17),
    "one choice": (20, 5, 1, 40, 24),
    "eight choices": (5, 16, 8, 32, 40),
    "six choices, odd sizes": (2, 9, 6, 72, 65),
    "many tokens": (70, 4, 2, 24, 40),
}
if GPU:
    CASES |= {
        "wide": (33, 16, 4, 1024, 768),
        "wide and many": (700, 8, 2, 512, 1408),
        "odd and many": (700, 60, 4, 520, 1407),
        "more choices than a chunk": (3000, 128, 8, 256, 192),
    }
WAYS = {"pairs": moe_pairs.mix_by_pairs, "tiles": moe_tiles.mix_by_tiles}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_experts_are_mixed_as_the_reference_mixes_them(way, case, dtype):
    if way == "pairs" and CASES[case][0] > 5 and not GPU:
        pytest.skip("a way for few tokens, slow to interpret for many")
    args = mixture(*CASES[case], dtype)
    assert_mixed(WAYS[way](*args, "silu"), args, "silu")


@pytest.mark.parametrize("way", WAYS)
def test_other_activations(way):
    args = mixture(3, 4, 2, 16, 16)
    for activation in ("gelu", "gelu_pytorch_tanh", "relu"):
        assert_mixed(WAYS[way](*args, activation), args, activation)


@pytest.mark.parametrize("rows", ["6", "24", "64", "256", "more"])
@pytest.mark.parametrize("swap", [False, True])
def test_every_default_tile_gives_the_same(rows, swap):
    """Each is the default for some number of tokens, and a card's own parameters may multiply the other way round."""
    if not GPU and rows not in ("6", "64"):
        pytest.skip("the interpreter sees no difference")
    args = mixture(40 if GPU else 9, 4, 2, 80, 72, torch.float16)
    up, down = ({**config(rows), "SWAP": swap} for config in (moe_tiles.default_up, moe_tiles.default_down))
    assert_mixed(moe_tiles.mix_by_tiles(*args, "silu", up_config=up, down_config=down), args, "silu")


@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_to_the_same_experts_and_none_to_the_others(way):
    """Experts that nobody chose are not read, whatever they hold."""
    args = mixture(18 if way == "tiles" else 3, 12, 2, 24, 16)
    _, chosen, _, up, down = args
    chosen[:] = torch.tensor([7, 2], device=DEVICE)
    unused = [expert for expert in range(12) if expert not in (2, 7)]
    up[unused] = float("nan")
    down[unused] = float("nan")
    assert_mixed(WAYS[way](*args, "silu"), args, "silu")


@pytest.mark.parametrize("way", WAYS)
def test_a_token_that_is_not_a_number_does_not_reach_its_neighbours(way):
    args = mixture(4, 4, 2, 24, 16)
    want = WAYS[way](*args, "silu")
    args[0][1] = float("nan")
    found = WAYS[way](*args, "silu")
    assert found[1].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(found[others], want[others])


@pytest.mark.parametrize("tokens", [1, 30])
def test_two_runs_are_equal_to_the_bit(tokens):
    args = mixture(tokens, 8, 2, 40, 24, torch.float16)
    assert torch.equal(moe.mix_experts(*args, "silu"), moe.mix_experts(*args, "silu"))


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x, chosen, weights, up, down = mixture(20, 4, 2, 40, 24)
    whole = moe_tiles.mix_by_tiles(x, chosen, weights, up, down, "silu")
    some = slice(3, 17)
    assert torch.equal(moe_tiles.mix_by_tiles(x[some], chosen[some], weights[some], up, down, "silu"), whole[some])


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block"), [(1, 4, 1, 16), (9, 8, 2, 16), (100, 40, 7, 16), (300, 5, 4, 32)]
)
def test_pairs_are_sorted_into_tiles(tokens, experts, top_k, block):
    """The last two are more than one program sorts."""
    chosen = mixture(tokens, experts, top_k, 1, 1)[1]
    found = routing.sort_pairs(chosen, experts, block)
    order = chosen.reshape(-1).argsort(stable=True)
    assert torch.equal(found.order.long(), order)
    covered = []
    for expert, first, rows in found.tiles.t().tolist():
        if rows:
            assert 0 < rows <= block
            covered += range(first, first + rows)
            assert chosen.reshape(-1)[order[first : first + rows]].unique().tolist() == [expert]
    assert covered == list(range(tokens * top_k))


ROUTES = {
    "mixtral": (8, 2, "softmax", True, 1.0, False),
    "weights as they are": (60, 4, "softmax", False, 1.0, False),
    "scaled": (64, 6, "softmax", False, 16.0, False),
    "sigmoid with a bias": (40, 8, "sigmoid", True, 2.5, True),
    "one of two": (2, 1, "softmax", True, 1.0, False),
}


@pytest.mark.parametrize("case", ROUTES)
def test_experts_are_chosen_as_torch_chooses_them(case):
    experts, top_k, scoring, renormalise, scaling, biased = ROUTES[case]
    torch.manual_seed(0)
    logits = numbers(7, experts) * 2
    bias = numbers(experts) if biased else None
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    want = (scores if bias is None else scores + bias).topk(top_k).indices
    weights = scores.gather(1, want)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    found, by = routing.route(logits, top_k, scoring, renormalise, scaling, bias, torch.float32)
    assert torch.equal(found.long(), want)
    torch.testing.assert_close(by, weights * scaling)


def test_among_equals_the_first_experts_are_chosen():
    found, weights = routing.route(numbers(2, 12) * 0, 3, "softmax", True, 1.0, None, torch.float32)
    assert found.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


def test_a_row_that_is_not_a_number_still_goes_to_different_experts():
    logits = numbers(3, 6)
    logits[1] = float("nan")
    found, weights = routing.route(logits, 4, "softmax", True, 1.0, None, torch.float32)
    assert sorted(set(found[1].tolist())) == sorted(found[1].tolist())
    assert all(0 <= expert < 6 for expert in found[1].tolist())
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("way", [routing.few_logits, routing.many_logits])
def test_logits_of_experts_are_those_of_float32(way, tokens):
    x, router = numbers(tokens, 50, dtype=torch.bfloat16), numbers(6, 50)
    torch.testing.assert_close(way(x, router), x.float() @ router.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_layer_gives_the_same_with_and_without_triton(monkeypatch, groups):
    shared = MlpSpec(24, "silu", ("shared.gate", "shared.up"), "shared.down")
    spec = MoeSpec(
        8, 3, 16, "silu", "router", ("{expert}.gate", "{expert}.up"), "{expert}.down", groups=groups, shared=shared
    )
    layer = Moe(spec, "layer", 32, Placement(torch.float32, DEVICE))
    torch.manual_seed(0)
    for parameter in layer.parameters():
        parameter.target.copy_(torch.randn(parameter.target.shape) * 0.3)
    x = numbers(6, 32)
    monkeypatch.setattr(kernels, "use_triton", lambda x: False)
    want = layer(x)
    monkeypatch.setattr(kernels, "use_triton", lambda x: True)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not GPU, reason="a graph is captured on a GPU")
@pytest.mark.parametrize("tokens", [1, 40])
def test_it_can_be_captured_in_a_graph(tokens):
    args = mixture(tokens, 8, 2, 128, 64, torch.float16)
    want = moe.mix_experts(*args, "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = moe.mix_experts(*args, "silu")
    graph.replay()
    assert torch.equal(found, want)
    # Another routing through the same graph.
    args[1].copy_(args[1].flip(0))
    graph.replay()
    assert_mixed(found, args, "silu")
