"""The GPU's attention against a plain float32 computation of each sequence, pages gathered by its table.

Without a GPU the same kernels run in Triton's interpreter, on shapes as small as the rules of a tile allow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tidemill.layers.attention import PagedAttention, Ragged
from tidemill.layers.cache_layout import CacheLayout
from tidemill.layers.device_batch import DeviceBatch
from tidemill.layers.spec import CacheShape
from tidemill.layers.triton_attention import TritonAttention
from tidemill.ops.triton.attention import (
    HeadShape,
    Launch,
    default_launch,
    measured_launch,
    num_splits,
    paged_attention,
)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SMALL = Launch(16, 16, 4, 2)
"""Small tiles: short sequences then have whole tiles, cut ones and several splits."""
SMALL_TILES = {"decode": SMALL, "split": SMALL, "prefill": SMALL, "short": SMALL}


@dataclass(frozen=True)
class Case:
    lengths: tuple[tuple[int, int], ...] = ((1, 37), (1, 1), (1, 70), (9, 9), (21, 50))
    """Per sequence, the tokens it brings and its context."""
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int | None = None
    """None: as wide as a key."""
    shared: bool = False
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    splits: int | None = 1
    tiles: dict | None = None
    padding: int = 0


class Step:
    """Random contents of a case: pages in no order, NaN in every place that no query may read."""

    def __init__(self, case: Case) -> None:
        self.case = case
        draw = torch.Generator().manual_seed(0)
        lengths = [*case.lengths]
        first = sum(1 for queries, _ in lengths if queries == 1)
        lengths[first:first] = [(1, 0)] * case.padding
        self.num_decode = first + case.padding
        self.queries, self.contexts = zip(*lengths, strict=True)
        value_dim = case.value_dim or case.dim
        size, count = case.block_size, len(lengths)
        columns = -(-max(self.contexts) // size) + 1
        pages = torch.randperm(count * columns, generator=draw).view(count, columns)
        # A table holds more than is used; what is not points outside the cache, and reading it would fault.
        used = torch.arange(columns) * size < torch.tensor(self.contexts)[:, None]
        if case.window is not None:
            oldest = torch.tensor(self.contexts) - torch.tensor(self.queries) - case.window + 1
            used &= (torch.arange(columns) + 1) * size > oldest[:, None]
        self.rows = torch.randperm(count, generator=draw)
        table = torch.full((count + 1, columns), 2**30)
        table[self.rows] = torch.where(used, pages, 2**30)
        self.pages = torch.where(used, pages, 0)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).to(case.dtype).to(DEVICE)

        # Queries as a view into a wider row, as a fused projection gives them.
        self.q = numbers(sum(self.queries), case.heads + 3, case.dim)[:, : case.heads]
        self.k = numbers(count * columns, size, case.kv_heads, case.dim)
        self.v = None if case.shared else numbers(count * columns, size, case.kv_heads, value_dim)
        self.k_scale = self.v_scale = None
        if case.cache_dtype is not None:
            self.k, self.k_scale = quantised(self.k, case.cache_dtype)
            if self.v is not None:
                self.v, self.v_scale = quantised(self.v, case.cache_dtype)
        self.slopes = torch.rand(case.heads, generator=draw).to(DEVICE) if case.alibi else None
        self.table = table.to(DEVICE, torch.int32)
        self.value_dim = value_dim
        self.forbid()

    def forbid(self) -> None:
        """NaN wherever no query of the step looks."""
        case = self.case
        seen = torch.zeros(self.k.shape[:2], dtype=torch.bool)
        for index, (queries, context) in enumerate(zip(self.queries, self.contexts, strict=True)):
            begin = 0 if case.window is None else max(context - queries - case.window + 1, 0)
            places = torch.arange(begin, context)
            seen[self.pages[index][places // case.block_size], places % case.block_size] = True
        poisoned = [self.k_scale, self.v_scale] if self.k_scale is not None else [self.k, self.v]
        for tensor in poisoned:
            if tensor is not None:
                tensor[~seen.to(DEVICE)] = float("nan")

    def run(self, **changes: object) -> torch.Tensor:
        case = self.case
        starts = np.concatenate(([0], np.cumsum(self.queries)))
        return paged_attention(
            self.q,
            self.k,
            self.v,
            self.table,
            self.rows.to(DEVICE, torch.int32),
            torch.from_numpy(starts).to(DEVICE, torch.int32),
            torch.tensor(self.contexts, dtype=torch.int32, device=DEVICE),
            **{
                "scale": case.dim**-0.5,
                "num_decode": self.num_decode,
                "max_query_len": max(self.queries),
                "window": case.window,
                "soft_cap": case.soft_cap,
                "slopes": self.slopes,
                "value_dim": case.value_dim,
                "k_scale": self.k_scale,
                "v_scale": self.v_scale,
                "splits": case.splits,
                "launches": SMALL_TILES if case.tiles is None else case.tiles,
                **changes,
            },
        )

    def expected(self) -> torch.Tensor:
        case, start, parts = self.case, 0, []
        for index, (queries, context) in enumerate(zip(self.queries, self.contexts, strict=True)):
            q = self.q[start : start + queries].float()
            begin = 0 if case.window is None else max(context - queries - case.window + 1, 0)
            places = torch.arange(begin, context)
            at = self.pages[index][places // case.block_size].to(DEVICE), (places % case.block_size).to(DEVICE)
            k = plain(self.k, self.k_scale, at)
            v = k[..., : self.value_dim] if self.v is None else plain(self.v, self.v_scale, at)
            repeats = case.heads // case.kv_heads
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, 1)) * case.dim**-0.5
            if case.soft_cap is not None:
                scores = torch.tanh(scores / case.soft_cap) * case.soft_cap
            distance = places[None, :] - torch.arange(context - queries, context)[:, None]
            if self.slopes is not None:
                scores = scores + self.slopes[:, None, None] * distance.to(DEVICE)
            hidden = distance > 0
            if case.window is not None:
                hidden |= distance <= -case.window
            weights = scores.masked_fill(hidden.to(DEVICE), float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(repeats, 1)))
            start += queries
        return torch.cat(parts)


def quantised(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    limit = 127.0 if dtype == torch.int8 else 448.0
    scale = x.float().abs().amax(-1) / limit
    stored = x.float() / scale[..., None]
    return (stored.round() if dtype == torch.int8 else stored).to(dtype), scale


def plain(cache: torch.Tensor, scale: torch.Tensor | None, at: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    found = cache[at].float()
    return found if scale is None else found * scale[at][..., None]


def check(case: Case) -> None:
    step = Step(case)
    out, expected = step.run(), step.expected()
    assert out.dtype == case.dtype
    assert torch.isfinite(out).all()
    first = sum(1 for queries, _ in case.lengths if queries == 1)
    real = torch.ones(len(out), dtype=torch.bool)
    real[first : first + case.padding] = False
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.float()[real], expected[real], rtol=tolerance, atol=tolerance)


MIXED = Case()
DECODE = replace(MIXED, lengths=((1, 37), (1, 1), (1, 70), (1, 16), (1, 33)))
PREFILL = replace(MIXED, lengths=((9, 9), (2, 40), (21, 50), (33, 33)))
LONG = ((1, 700), (1, 64), (1, 1501), (130, 130), (70, 1000), (700, 700)) if GPU else ((1, 100), (20, 90))


@pytest.mark.parametrize("case", [MIXED, DECODE, PREFILL], ids=["mixed", "decode", "prefill"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_batches(case: Case, dtype: torch.dtype):
    check(replace(case, dtype=dtype))


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_contexts_in_splits_of_which_some_are_empty(splits: int, window: int | None):
    check(replace(DECODE, splits=splits, window=window, padding=1))


def test_as_many_splits_as_fill_the_card():
    check(replace(DECODE, lengths=((1, 70),), heads=2, kv_heads=1, splits=None))
    assert [num_splits(programs, 132) for programs in (1, 8, 100, 512)] == [64, 64, 4, 1]


@pytest.mark.parametrize("window", [1, 5, 20, 1000])
def test_windows(window: int):
    check(replace(MIXED, window=window))


def test_soft_cap():
    check(replace(MIXED, soft_cap=2.0))


def test_alibi():
    check(replace(MIXED, alibi=True))


def test_everything_at_once():
    check(replace(MIXED, window=23, soft_cap=3.0, alibi=True, splits=4, padding=2))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 1), (20, 1)])
def test_heads_that_share_a_kv_head(heads: int, kv_heads: int):
    """20 heads are more than the 16 rows of a tile."""
    check(replace(MIXED, heads=heads, kv_heads=kv_heads, lengths=((1, 20), (5, 30), (6, 6))))


@pytest.mark.parametrize("dim", [16, 40, 64, 80, *([96, 128, 192, 256] if GPU else [])])
def test_head_sizes(dim: int):
    check(replace(MIXED, dim=dim, lengths=((1, 20), (5, 30))))


def test_values_narrower_than_keys():
    check(replace(MIXED, dim=24, value_dim=16, lengths=((1, 20), (5, 30))))


@pytest.mark.parametrize(("dim", "value_dim"), [(48, 32), (40, 24)])
@pytest.mark.parametrize("splits", [1, 4])
def test_values_that_are_the_first_numbers_of_the_keys(dim: int, value_dim: int, splits: int):
    check(replace(MIXED, heads=4, kv_heads=1, dim=dim, value_dim=value_dim, shared=True, splits=splits))


@pytest.mark.parametrize("block_size", [5, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_block_sizes(block_size: int, window: int | None):
    check(replace(MIXED, block_size=block_size, window=window, lengths=((1, 130), (1, 7), (9, 80), (21, 21))))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised_caches(cache_dtype: torch.dtype, dtype: torch.dtype):
    check(replace(MIXED, dtype=dtype, cache_dtype=cache_dtype, lengths=((1, 37), (9, 9), (5, 40)), window=30))
    check(
        replace(
            MIXED,
            dtype=dtype,
            cache_dtype=cache_dtype,
            lengths=((1, 37), (5, 20)),
            kv_heads=1,
            dim=48,
            value_dim=32,
            shared=True,
            splits=2,
        )
    )


@pytest.mark.parametrize(
    ("dtype", "dim", "splits"),
    [
        (torch.float32, 64, 2),
        (torch.float16, 64, 2),
        *([(torch.bfloat16, 128, 1), (torch.bfloat16, 128, 8), (torch.bfloat16, 256, 4)] if GPU else []),
    ],
)
def test_default_tiles(dtype: torch.dtype, dim: int, splits: int):
    check(replace(MIXED, lengths=LONG, dim=dim, dtype=dtype, block_size=64, splits=splits, tiles={}))


@pytest.mark.skipif(not GPU, reason="wide heads are for a GPU: the interpreter would take long")
@pytest.mark.parametrize("heads", [16, 128])
def test_default_tiles_of_latent_attention(heads: int):
    wide = replace(MIXED, heads=heads, kv_heads=1, dim=576, value_dim=512, shared=True, block_size=64)
    check(replace(wide, lengths=LONG, dtype=torch.bfloat16, splits=4, tiles={}))


@pytest.mark.skipif(not GPU, reason="graphs are of a GPU")
def test_a_graph_replays_with_other_lengths():
    case = replace(DECODE, lengths=((1, 300), (1, 20)), dim=64, dtype=torch.float16, block_size=64, splits=4, tiles={})
    longer, shorter = Step(case), Step(replace(case, lengths=((1, 130), (1, 290))))
    static = Step(case)

    def fill(step: Step) -> None:
        for name in ("q", "k", "v", "table"):
            getattr(static, name).copy_(getattr(step, name))
        rows.copy_(step.rows)
        contexts.copy_(torch.tensor(step.contexts))

    rows, contexts = torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(3, dtype=torch.int32, device=DEVICE)

    def attend() -> torch.Tensor:
        return paged_attention(
            static.q, static.k, static.v, static.table, rows, starts, contexts,
            scale=case.dim**-0.5, num_decode=2, max_query_len=1, splits=4,
        )  # fmt: skip

    fill(longer)
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for step in (longer, shorter):
        fill(step)
        graph.replay()
        torch.testing.assert_close(out.float(), step.expected(), rtol=4e-3, atol=4e-3)


def test_launches_fit_every_shape():
    for group, dim in ((1, 16), (3, 64), (4, 128), (8, 256), (1, 96)):
        for itemsize in (2, 4):
            shape = HeadShape(group, dim, dim, False, itemsize, itemsize)
            for kind in ("decode", "split", "prefill", "short"):
                cut = measured_launch(kind, shape)
                assert cut.block_m >= 16 and cut.tile_n >= 16
                assert default_launch(kind, shape).block_m % 16 == 0
    assert HeadShape(16, 576, 512, True, 2, 2).widths == (512, 64, 512)
    assert HeadShape(1, 80, 80, False, 2, 2).widths == (64, 16, 128)


def test_wrong_arguments_are_refused():
    step = Step(replace(MIXED, lengths=((1, 5),)))
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(
            step.q.transpose(1, 2), step.k, step.v, step.table, step.rows, step.rows, step.rows,
            scale=1.0, num_decode=1, max_query_len=1,
        )  # fmt: skip
    step.v = None
    with pytest.raises(ValueError, match="value_dim"):
        step.run()


def test_two_backends_agree_over_the_steps_of_a_batch():
    """Prompts, then a chunk of another beside decoding, with layers that see everything and layers with a window."""
    size, heads, kv_heads, dim, pages = 4, 4, 2, 16, 64
    layout = CacheLayout((CacheShape(kv_heads, dim, dim, None),), ((0, 0), (1, 0)), (None, 6))
    shape = (pages, size, kv_heads, dim)
    plain_backend = PagedAttention([(torch.zeros(shape), torch.zeros(shape))], layout)
    backend = TritonAttention([(torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE))], layout)
    draw = torch.Generator().manual_seed(1)
    shuffled = torch.randperm(pages, generator=draw)[:60].view(2, 3, 10).numpy()
    for step in ({0: (5, 5), 1: (9, 9)}, {0: (1, 6), 1: (1, 10), 2: (7, 7)}, {1: (1, 11), 0: (1, 7), 2: (6, 13)}):
        order = sorted(step, key=lambda index: (step[index][0] > 1, step[index][1]))
        queries, contexts = [step[i][0] for i in order], [step[i][1] for i in order]
        positions = np.concatenate([np.arange(n - m, n) for m, n in zip(queries, contexts, strict=True)])
        owners = np.repeat(order, queries)
        slots = [
            torch.from_numpy(table[owners, positions // size] * size + positions % size).long() for table in shuffled
        ]
        plain_backend.plan(Ragged(queries, contexts, [table[order] for table in shuffled], slots))
        backend.plan(
            DeviceBatch(
                rows=torch.tensor(order, dtype=torch.int32, device=DEVICE),
                query_starts=torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32, device=DEVICE),
                context_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
                tables=[torch.from_numpy(table).to(DEVICE, torch.int32) for table in shuffled],
                slots=[slot.to(DEVICE) for slot in slots],
                num_decode=queries.count(1),
                max_query_len=max(queries),
                num_tokens=len(positions),
            )
        )
        for layer in (0, 1):
            q, k, v = (torch.randn(len(positions), n, dim, generator=draw) for n in (heads, kv_heads, kv_heads))
            expected = plain_backend.run(q, k, v, layer, dim**-0.5)
            found = backend.run(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), layer, dim**-0.5)
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
            again = backend.attend(q.to(DEVICE), layer, dim**-0.5)
            torch.testing.assert_close(again, found)
