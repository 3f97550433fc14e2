"""Norm, gated activation, rotation and the writing of the cache in Triton, against their references.

The same file runs in Triton's interpreter and on a GPU; there with larger shapes.
"""

from __future__ import annotations

import pytest
import torch

from tidemill.layers.attention import PagedAttention, Ragged
from tidemill.layers.cache_layout import arrange
from tidemill.layers.device_batch import DeviceBatch
from tidemill.layers.parameter import Placement
from tidemill.layers.rope import Rope
from tidemill.layers.rope_config import RopeConfig
from tidemill.layers.self_attention import SelfAttention
from tidemill.layers.spec import AttentionSpec, HeadNormSpec, NormSpec
from tidemill.layers.triton_attention import TritonAttention
from tidemill.ops import kernels, reference

pytest.importorskip("triton")

from tidemill.ops.triton.activation import act_and_mul
from tidemill.ops.triton.norm import add_rms_norm, rms_norm
from tidemill.ops.triton.rotary import rotate_and_store, store_kv

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.int8: "int8"}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to where roundings differ: a few units in the last place. The interpreter cuts bfloat16 off instead of
    rounding it, which costs a bit more."""
    assert found.dtype == expected.dtype
    unit = torch.finfo(found.dtype).eps * (1 if GPU or found.dtype != torch.bfloat16 else 2)
    torch.testing.assert_close(found, expected, rtol=max(4 * unit, 2e-6), atol=max(4 * unit, 2e-6))


def assert_vectors_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As `assert_close`, by the largest number of each vector: the reference rounds both products of a rotation, and
    where these cancel, little is left but what was rounded off."""
    assert found.dtype == expected.dtype
    unit = max(4 * torch.finfo(found.dtype).eps, 2e-6)
    error = (found.double() - expected.double()).abs()
    assert (error <= unit * expected.double().abs().amax(dim=-1, keepdim=True)).all()


class TestNorm:
    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
    @pytest.mark.parametrize("shape", [(1, 64), (7, 100), (2, 4096), (2, 3, 40), (0, 64)], ids=str)
    def test_rms_norm_is_the_references(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        x, weight = numbers(*shape, dtype=dtype) * 3, numbers(shape[-1], dtype=dtype)
        assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))

    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=NAMES.get)
    def test_weights_kept_wide_apply_before_rounding(self, dtype: torch.dtype) -> None:
        x, weight = numbers(3, 100, dtype=dtype), numbers(100)
        assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
    def test_heads_of_a_wider_row(self, dtype: torch.dtype) -> None:
        heads = numbers(3, 5 * 24, dtype=dtype)[:, 24:96].unflatten(-1, (3, 24))
        weight = numbers(24, dtype=dtype)
        found = rms_norm(heads, weight, 1e-6)
        assert found.is_contiguous()
        assert_close(found, reference.rms_norm(heads, weight, 1e-6))

    def test_rows_of_a_wider_tensor(self) -> None:
        x, weight = numbers(5, 96)[:, 32:80], numbers(48)
        assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
    @pytest.mark.parametrize("shape", [(1, 512), (5, 72)], ids=str)
    def test_the_sum_is_rounded_before_it_is_normalised(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        x, residual, weight = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype), numbers(shape[1], dtype=dtype)
        before = x.clone(), residual.clone()
        normed, total = add_rms_norm(x, residual, weight, 1e-6)
        assert_close(total, x + residual)
        assert_close(normed, reference.rms_norm(total, weight, 1e-6))
        assert torch.equal(x, before[0]) and torch.equal(residual, before[1])

    @pytest.mark.skipif(not GPU, reason="wide rows are slow in the interpreter")
    @pytest.mark.parametrize("shape", [(700, 5120), (3, 32768)], ids=str)
    def test_wide_rows(self, shape: tuple[int, int]) -> None:
        x, residual = numbers(*shape, dtype=torch.bfloat16), numbers(*shape, dtype=torch.bfloat16)
        weight = numbers(shape[1], dtype=torch.bfloat16)
        normed, total = add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, x + residual)
        assert_close(normed, reference.rms_norm(total, weight, 1e-6))


class TestActivation:
    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
    @pytest.mark.parametrize("activation", list(reference.ACTIVATIONS))
    def test_every_activation_is_the_references(self, activation: str, dtype: torch.dtype) -> None:
        gate_up = numbers(3, 2 * 60, dtype=dtype)
        gate_up[0, :4] = torch.tensor([0.0, -30.0, 30.0, -1e-3])
        assert_close(act_and_mul(gate_up, activation), reference.act_and_mul(gate_up, activation))

    @pytest.mark.parametrize("shape", [(1, 2 * 1500), (2, 3, 2 * 8), (0, 16)], ids=str)
    def test_odd_shapes(self, shape: tuple[int, ...]) -> None:
        gate_up = numbers(*shape)
        assert_close(act_and_mul(gate_up, "silu"), reference.act_and_mul(gate_up, "silu"))

    def test_rows_of_a_wider_tensor(self) -> None:
        gate_up = numbers(3, 100)[:, 20:60]
        assert_close(act_and_mul(gate_up, "gelu"), reference.act_and_mul(gate_up, "gelu"))

    @pytest.mark.parametrize("activation", ["silu", "relu", "relu2"])
    def test_a_nan_stays_one(self, activation: str) -> None:
        gate_up = torch.ones(1, 8, device=DEVICE)
        gate_up[0, 1] = float("nan")
        assert act_and_mul(gate_up, activation).isnan().tolist() == [[False, True, False, False]]

    @pytest.mark.skipif(not GPU, reason="more numbers than 32 bits can count")
    def test_offsets_beyond_32_bits(self) -> None:
        gate_up = torch.ones(2**17, 2 * 9000, dtype=torch.float16, device=DEVICE)
        gate_up[-1] = 2.0
        found = act_and_mul(gate_up, "relu")
        assert found[-1].eq(4.0).all() and found[-2].eq(1.0).all()


def expected_heads(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split(sizes, dim=-1))
    if weights is not None:
        q, k = reference.rms_norm(q, weights[0], 1e-6), reference.rms_norm(k, weights[1], 1e-6)
    if turn is not None:
        q, k = reference.rotate(q, *turn), reference.rotate(k, *turn)
    return q, k, v


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one table, as a step has them."""
    turns = torch.arange(tokens, device=DEVICE)[:, None] * torch.linspace(1, 0.01, half, device=DEVICE)
    cos, sin = torch.cat((turns.cos(), turns.sin()), dim=-1).chunk(2, dim=-1)
    return cos, sin


CASES = [
    pytest.param(4, 2, 16, 8, False, id="whole heads turn"),
    pytest.param(5, 1, 40, 10, False, id="half of a head turns"),
    pytest.param(5, 5, 24, None, False, id="nothing turns"),
    pytest.param(3, 3, 20, 10, True, id="normed"),
    pytest.param(9, 3, 40, 8, True, id="normed, partly turned"),
    pytest.param(2, 1, 12, None, True, id="normed, nothing turns"),
]
if GPU:
    CASES += [pytest.param(32, 8, 128, 64, False, id="8B"), pytest.param(64, 8, 128, 64, True, id="normed, large")]


class TestRotateAndStore:
    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
    @pytest.mark.parametrize(("heads", "kv_heads", "dim", "half", "normed"), CASES)
    def test_queries_and_cache(
        self, heads: int, kv_heads: int, dim: int, half: int | None, normed: bool, dtype: torch.dtype
    ) -> None:
        tokens = 700 if GPU else 3
        qkv = numbers(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        turn = None if half is None else angles(tokens, half)
        weights = (numbers(dim, dtype=dtype), numbers(dim, dtype=dtype)) if normed else None
        q, k, v = expected_heads(qkv.clone(), heads, kv_heads, dim, turn, weights)
        k_cache = torch.full((tokens, 2, kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
        v_cache = k_cache.clone()
        slots = torch.randperm(2 * tokens, device=DEVICE)[:tokens]
        slots[1] = -1
        found = rotate_and_store(
            qkv, heads, kv_heads, dim, *(turn or (None, None)), slots, k_cache, v_cache, None, None,
            *(weights or (None, None)), 1e-6,
        )  # fmt: skip
        assert_vectors_close(found, q)
        stored = slots[slots >= 0]
        for cache, vectors in ((k_cache, k), (v_cache, v)):
            flat = cache.flatten(0, 1)
            assert_vectors_close(flat[stored], vectors[slots >= 0])
            assert flat.isnan().flatten(1).all(dim=1).sum() == 2 * tokens - len(stored)

    def test_weights_kept_wide(self) -> None:
        qkv = numbers(2, 4 * 16, dtype=torch.float16)
        weights, turn = (numbers(16), numbers(16)), angles(2, 8)
        q, k, _ = expected_heads(qkv.clone(), 2, 1, 16, turn, weights)
        k_cache = torch.zeros(2, 1, 1, 16, dtype=torch.float16, device=DEVICE)
        slots = torch.arange(2, device=DEVICE)
        found = rotate_and_store(qkv, 2, 1, 16, *turn, slots, k_cache, k_cache.clone(), None, None, *weights, 1e-6)
        assert_vectors_close(found, q)
        assert_vectors_close(k_cache.flatten(0, 1), k)

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
    @pytest.mark.parametrize(("dim", "half"), [(16, 8), (40, 10)])
    def test_an_int8_cache(self, dim: int, half: int, dtype: torch.dtype) -> None:
        qkv = numbers(4, 4 * dim, dtype=dtype)
        qkv[2] = 0.0
        turn = angles(4, half)
        _, k, v = expected_heads(qkv.clone(), 2, 1, dim, turn, None)
        caches = [torch.zeros(3, 2, 1, dim, dtype=torch.int8, device=DEVICE) for _ in range(2)]
        scales = [torch.zeros(3, 2, 1, device=DEVICE) for _ in range(2)]
        slots = torch.tensor([5, -1, 0, 2], device=DEVICE)
        rotate_and_store(qkv, 2, 1, dim, *turn, slots, *caches, *scales)
        for cache, scale, vectors in zip(caches, scales, (k, v), strict=True):
            assert_quantised(cache.flatten(0, 1), scale.flatten(0, 1), slots, vectors)


def assert_quantised(stored: torch.Tensor, scale: torch.Tensor, slots: torch.Tensor, vectors: torch.Tensor) -> None:
    real = slots >= 0
    expected, expected_scale = reference.quantise_vectors(vectors[real], stored.dtype)
    untouched = torch.ones(len(stored), dtype=torch.bool, device=DEVICE)
    untouched[slots[real]] = False
    assert not stored[untouched].float().any() and not scale[untouched].any()
    coarse = 4 * torch.finfo(vectors.dtype).eps
    torch.testing.assert_close(scale[slots[real]], expected_scale, rtol=coarse, atol=0)
    # A number between two steps may go to either.
    step = (stored[slots[real]].float() - expected.float()).abs()
    assert (step <= 1 + 127 * coarse).all()


class TestStoreKv:
    def test_strided_keys_without_values(self) -> None:
        latent = numbers(3, 2, 80)[:, :1, :72]
        cache = torch.zeros(2, 2, 1, 72, device=DEVICE)
        slots = torch.tensor([3, 0, -1], device=DEVICE)
        store_kv(latent, None, cache, None, slots)
        assert torch.equal(cache.flatten(0, 1)[[3, 0]], latent[:2])
        assert not cache.flatten(0, 1)[1:3].any()

    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
    def test_values_of_another_width(self, dtype: torch.dtype) -> None:
        k, v = numbers(2, 3, 24, dtype=dtype), numbers(2, 3, 16, dtype=dtype)
        k_cache, v_cache = (torch.zeros(2, 2, 3, dim, dtype=dtype, device=DEVICE) for dim in (24, 16))
        store_kv(k, v, k_cache, v_cache, torch.tensor([2, 1], device=DEVICE))
        assert torch.equal(k_cache.flatten(0, 1)[[2, 1]], k) and torch.equal(v_cache.flatten(0, 1)[[2, 1]], v)

    def test_an_int8_cache(self) -> None:
        k, v = numbers(3, 3, 24), numbers(3, 3, 16) * 50
        caches = [torch.zeros(2, 2, 3, dim, dtype=torch.int8, device=DEVICE) for dim in (24, 16)]
        scales = [torch.zeros(2, 2, 3, device=DEVICE) for _ in range(2)]
        slots = torch.tensor([2, -1, 1], device=DEVICE)
        store_kv(k, v, *caches, slots, *scales)
        for cache, scale, vectors in zip(caches, scales, (k, v), strict=True):
            assert_quantised(cache.flatten(0, 1), scale.flatten(0, 1), slots, vectors)

    def test_a_float8_cache(self) -> None:
        # The interpreter does not round to float8 rightly, so there the numbers are ones that float8 has.
        exact = torch.tensor([448.0, -224.0, 30.0, 0.0, 1.5, -0.25, 2**-9, 104.0], device=DEVICE)
        k = torch.stack((exact, exact / 8)).view(2, 1, 8)
        v = numbers(2, 1, 8) if GPU else -k
        caches = [torch.zeros(1, 2, 1, 8, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
        scales = [torch.zeros(1, 2, 1, device=DEVICE) for _ in range(2)]
        store_kv(k, v, *caches, torch.tensor([1, 0], device=DEVICE), *scales)
        for cache, scale, vectors in zip(caches, scales, (k, v), strict=True):
            expected, expected_scale = reference.quantise_vectors(vectors, torch.float8_e4m3fn)
            torch.testing.assert_close(scale.flatten(0, 1)[[1, 0]], expected_scale)
            torch.testing.assert_close(cache.float().flatten(0, 1)[[1, 0]], expected.float(), rtol=2**-3, atol=2**-9)
        back = reference.dequantise_vectors(caches[0].flatten(0, 1)[[1, 0]], scales[0].flatten(0, 1)[[1, 0]], k.dtype)
        torch.testing.assert_close(back, k)


@pytest.mark.skipif(not GPU, reason="a CPU takes another path")
class TestOnTheGpuOnly:
    @pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
    @pytest.mark.parametrize("rows", [1, 5])
    def test_logits_are_not_rounded_in_between(self, rows: int, dtype: torch.dtype) -> None:
        x, weight, bias = numbers(rows, 256, dtype=dtype), numbers(1000, 256, dtype=dtype), numbers(1000, dtype=dtype)
        expected = x.double() @ weight.double().t()
        torch.testing.assert_close(kernels.linear_to_float(x, weight).double(), expected, rtol=1e-5, atol=1e-3)
        found = kernels.linear_to_float(x, weight, bias)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected + bias.double(), rtol=1e-5, atol=1e-3)

    def test_dynamic_rotation_needs_no_answer_from_the_gpu(self) -> None:
        config = RopeConfig("dynamic", 100.0, 16, 8, {"factor": 2.0})
        positions, lengths = torch.tensor([0, 5, 11]), torch.tensor([4, 12, 12])
        expected = Rope(config, 32, torch.device("cpu")).angles(positions, lengths)
        rope = Rope(config, 32, torch.device(DEVICE))
        positions, lengths = positions.to(DEVICE), lengths.to(DEVICE)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = rope.angles(positions, lengths)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(found.cos.cpu(), expected.cos, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.sin.cpu(), expected.sin, rtol=1e-5, atol=1e-5)


class TestSelfAttention:
    """The fused path over Triton's attention says what the steps over the reference's say."""

    @pytest.mark.parametrize(
        ("rope", "head_norm", "growth"),
        [
            pytest.param(0, None, None, id="turned"),
            pytest.param(None, None, (0.1, 2), id="not turned, growing"),
            pytest.param(0, HeadNormSpec(NormSpec(1e-6), "qn", "kn"), None, id="normed"),
            pytest.param(0, HeadNormSpec(NormSpec(1e-6, unit_offset=True), "qn", "kn"), None, id="normed by 1 + w"),
            pytest.param(0, HeadNormSpec(NormSpec(1e-6), "qn", "kn", per_head=True), None, id="normed head by head"),
        ],
    )
    def test_fused_and_in_steps(
        self,
        rope: int | None,
        head_norm: HeadNormSpec | None,
        growth: tuple[float, int] | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        place = Placement(torch.float32, torch.device(DEVICE))
        spec = AttentionSpec(
            4, 2, 16, 0.25, ("q", "k", "v"), "o", rope=rope, head_norm=head_norm, query_growth=growth
        )  # fmt: skip
        ropes = [Rope(RopeConfig("default", 100.0, 16, 32, {}), 32, place.device)]
        layer = SelfAttention(spec, "layer", 0, 24, ropes, place)
        for parameter in layer.parameters():
            parameter.target.copy_(numbers(*parameter.target.shape) * 0.5)
        layout = arrange([spec.cache])

        def caches() -> list[tuple[torch.Tensor, torch.Tensor | None]]:
            return [(torch.zeros(6, 16, 2, 16, device=DEVICE), torch.zeros(6, 16, 2, 16, device=DEVICE))]

        in_steps, fused = PagedAttention(caches(), layout), TritonAttention(caches(), layout)
        table = torch.tensor([[3, 1], [4, 0], [5, 5]], dtype=torch.int32, device=DEVICE)
        # Two prompts, then a token of each.
        for lengths, contexts in (([2, 18], [2, 18]), ([1, 1], [3, 19])):
            spans = [range(end - count, end) for count, end in zip(lengths, contexts, strict=True)]
            positions = torch.tensor([position for span in spans for position in span], device=DEVICE)
            pages = [int(table[row, at // 16]) * 16 + at % 16 for row, span in enumerate(spans) for at in span]
            slots = torch.tensor(pages, device=DEVICE)
            in_steps.plan(Ragged(lengths, contexts, [table.cpu().numpy()], [slots]))
            fused.plan(
                DeviceBatch(
                    rows=torch.arange(2, dtype=torch.int32, device=DEVICE),
                    query_starts=torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=DEVICE),
                    context_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
                    tables=[table],
                    slots=[slots],
                    num_decode=sum(length == 1 for length in lengths),
                    max_query_len=max(lengths),
                    num_tokens=sum(lengths),
                )
            )
            x = numbers(sum(lengths), 24)
            turn = [ropes[0].angles(positions, positions + 1)]
            expected = layer(x, turn, in_steps)
            with monkeypatch.context() as patched:
                patched.setattr(kernels, "FORCED", True)
                found = layer(x, turn, fused)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(fused.caches[0], in_steps.caches[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
