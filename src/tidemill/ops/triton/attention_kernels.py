"""Attention over a paged cache, on the device: one kernel for decoding and prefill, and the one that merges splits.

A program computes a tile of queries: `TILE_TOKENS` tokens times the `TILE_HEADS` query heads that share a kv head, so
keys and values are read once for all of them. Scores and their peaks are exponents of two. Knows nothing of how it is
launched (`attention.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tidemill.ops.triton.overlap import await_previous, start_next

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _bound(number):
    """A loop's bound. Triton's interpreter has an array of one here, which numpy 2.4 no longer takes for a number."""
    if INTERPRETED:
        return number.handle.data.item()
    else:
        return number


@triton.jit
def _find_tile(query_starts, unit, num_decode, num_sequences, TILE_TOKENS: tl.constexpr):
    """The sequence that query tile `unit` belongs to, and the tile's first token among that sequence's.

    Tiles of a sequence begin at start // TILE_TOKENS + its number: enough for all, and known without adding up."""
    base = tl.load(query_starts + num_decode)
    found = num_decode
    beyond = num_sequences
    while beyond - found > 1:
        middle = (found + beyond) // 2
        begin = (tl.load(query_starts + middle) - base) // TILE_TOKENS + middle - num_decode
        found = tl.where(begin <= unit, middle, found)
        beyond = tl.where(begin <= unit, beyond, middle)
    first_tile = (tl.load(query_starts + found) - base) // TILE_TOKENS + found - num_decode
    return found, (unit - first_tile) * TILE_TOKENS


@triton.jit
def _load(at, inside, MASKED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of DIM numbers, padded to WIDTH; a row that is not `inside` is zeros and is not read."""
    dims = tl.arange(0, WIDTH)
    if MASKED:
        tile = tl.load(at[:, None] + dims[None, :], mask=inside[:, None] & (dims[None, :] < DIM), other=0.0)
    elif DIM < WIDTH:
        tile = tl.load(at[:, None] + dims[None, :], mask=dims[None, :] < DIM, other=0.0)
    else:
        tile = tl.load(at[:, None] + dims[None, :])
    return tile


@triton.jit
def _attend_tiles(
    acc,
    peak,
    total,
    q_main,
    q_rest,
    positions,
    slopes,
    tile_from,
    tile_to,
    begin,
    end,
    scale,
    soft_cap,
    window,
    table,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    k_page,
    k_token,
    v_page,
    v_token,
    s_page,
    s_token,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALED: tl.constexpr,
    SHARED: tl.constexpr,
    MAIN: tl.constexpr,
    MAIN_WIDTH: tl.constexpr,
    REST: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Keys of the tiles tile_from..tile_to - 1, added to what was found so far. Of MASKED tiles only positions
    begin..end - 1 are read, and each query sees its own part of them; of others every query sees everything."""
    column = tl.arange(0, TILE_N)
    WHOLE: tl.constexpr = BLOCK_SIZE % TILE_N == 0
    PAGE_TILES: tl.constexpr = BLOCK_SIZE // TILE_N if WHOLE else 1
    if WHOLE:
        page = tl.load(table + tile_from // PAGE_TILES, mask=tile_from < tile_to, other=0)
    for tile in range(_bound(tile_from), _bound(tile_to)):
        key = tile * TILE_N + column
        inside = (key >= begin) & (key < end)
        if WHOLE:
            at_page = page.to(tl.int64)
            in_page = (tile % PAGE_TILES) * TILE_N + column
            # The next page is asked for a tile ahead: an address that waits for its page would hold up the pipeline.
            page = tl.load(table + (tile + 1) // PAGE_TILES, mask=tile + 1 < tile_to, other=0)
        else:
            if MASKED:
                at_page = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            else:
                at_page = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
            in_page = key % BLOCK_SIZE
        k_at = k_cache + at_page * k_page + in_page * k_token
        k_main = _load(k_at, inside, MASKED, MAIN, MAIN_WIDTH).to(q_main.dtype)
        if SHARED:
            v = k_main
        else:
            v_at = v_cache + at_page * v_page + in_page * v_token
            v = _load(v_at, inside, MASKED, VALUE, VALUE_WIDTH).to(q_main.dtype)

        score = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if REST > 0:
            k_rest = _load(k_at + MAIN, inside, MASKED, REST, REST_WIDTH).to(q_main.dtype)
            score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
        if SCALED:
            s_at = at_page * s_page + in_page * s_token
            if MASKED:
                score *= tl.load(k_scales + s_at, mask=inside, other=0.0)[None, :]
            else:
                score *= tl.load(k_scales + s_at)[None, :]
        # Where nothing stands between the product and the softmax, scaling is left to the exponent's multiply-add.
        rate = scale * LOG2_E
        if SOFT_CAP:
            score = soft_cap * (2.0 * tl.sigmoid(score * (2.0 * scale / soft_cap)) - 1.0)
            rate = LOG2_E
        if ALIBI:
            score = score * rate + (slopes * LOG2_E)[:, None] * (key[None, :] - positions[:, None]).to(tl.float32)
            rate = 1.0
        if MASKED:
            visible = inside[None, :] & (key[None, :] <= positions[:, None])
            if WINDOW:
                visible &= key[None, :] > positions[:, None] - window
            score = tl.where(visible, score, float("-inf"))

        higher = tl.maximum(peak, tl.max(score, 1) * rate)
        level = higher
        if MASKED:
            # A query that has seen no key yet must not subtract infinities.
            level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * rate - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weight, 1)
        peak = higher
        if SCALED:
            if MASKED:
                weight *= tl.load(v_scales + s_at, mask=inside, other=0.0)[None, :]
            else:
                weight *= tl.load(v_scales + s_at)[None, :]
        acc = tl.dot(weight.to(q_main.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit(do_not_specialize=["num_decode", "num_sequences", "window"])
def attend(
    out,
    part_sums,
    part_peaks,
    part_totals,
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    table,
    rows,
    query_starts,
    context_lens,
    slopes,
    scale,
    soft_cap,
    window,
    num_decode,
    num_sequences,
    q_token,
    q_head,
    out_token,
    out_head,
    table_row,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    s_page,
    s_token,
    s_head,
    DECODE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALED: tl.constexpr,
    SHARED: tl.constexpr,
    MAIN: tl.constexpr,
    MAIN_WIDTH: tl.constexpr,
    REST: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    await_previous(OVERLAP)
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    part = tl.program_id(0) % (KV_HEADS * HEAD_TILES)
    unit = tl.program_id(0) // (KV_HEADS * HEAD_TILES)
    kv_head = part // HEAD_TILES
    in_group = (part % HEAD_TILES) * TILE_HEADS
    if DECODE:
        sequence = unit
        start = unit
        length = 1
        offset = 0
    else:
        # Late tiles see the most keys: they go first, so that no long one is left for the end.
        unit = tl.num_programs(0) // (KV_HEADS * HEAD_TILES) - 1 - unit
        sequence, offset = _find_tile(query_starts, unit, num_decode, num_sequences, TILE_TOKENS)
        start = tl.load(query_starts + sequence)
        length = tl.load(query_starts + sequence + 1) - start
        if offset >= length:
            return
    context = tl.load(context_lens + sequence)
    table += tl.load(rows + sequence).to(tl.int64) * table_row

    row = tl.arange(0, BLOCK_M)
    token = row // TILE_HEADS
    head_of_group = in_group + row % TILE_HEADS
    real = (token < TILE_TOKENS) & (offset + token < length) & (head_of_group < GROUP)
    head = kv_head * GROUP + head_of_group
    positions = context - length + offset + token
    first_position = context - length + offset
    last_position = tl.minimum(first_position + TILE_TOKENS, context) - 1

    # Tiles of keys: first_tile..full_from - 1 are cut by the window, full_to..last_tile - 1 by the queries' own places.
    begin = 0
    full_from = 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0)
        full_from = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE_N)
    end = last_position + 1
    first_tile = begin // TILE_N
    last_tile = tl.cdiv(end, TILE_N)
    full_to = (first_position + 1) // TILE_N
    if SPLITS > 1:
        split = tl.program_id(1)
        part_at = ((sequence * KV_HEADS * GROUP + head) * SPLITS + split).to(tl.int64)
        share = tl.cdiv(last_tile - first_tile, SPLITS)
        first_tile += split * share
        last_tile = tl.minimum(first_tile + share, last_tile)
        if first_tile >= last_tile:
            tl.store(part_peaks + part_at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=real)
            tl.store(part_totals + part_at, tl.zeros([BLOCK_M], tl.float32), mask=real)
            return
    if DECODE:
        # Masks cost one query nothing, and one loop keeps the memory busier than two that follow each other.
        full_to = first_tile
    else:
        full_from = tl.minimum(tl.maximum(full_from, first_tile), last_tile)
        full_to = tl.maximum(tl.minimum(full_to, last_tile), full_from)

    token_at = (start + offset).to(tl.int64)
    q_at = q + token_at * q_token + token * q_token + head * q_head
    q_main = _load(q_at, real, True, MAIN, MAIN_WIDTH)
    q_rest = q_main
    if REST > 0:
        q_rest = _load(q_at + MAIN, real, True, REST, REST_WIDTH)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=real, other=0.0)
    acc = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_cache += kv_head * k_head
    if not SHARED:
        v_cache += kv_head * v_head
    if SCALED:
        k_scales += kv_head * s_head
        v_scales += kv_head * s_head
    for stretch in tl.static_range(2 if DECODE else (0 if WINDOW else 1), 3):
        if stretch == 0:
            tile_from = first_tile
            tile_to = full_from
        elif stretch == 1:
            tile_from = full_from
            tile_to = full_to
        else:
            tile_from = full_to
            tile_to = last_tile
        acc, peak, total = _attend_tiles(
            acc,
            peak,
            total,
            q_main,
            q_rest,
            positions,
            slope,
            tile_from,
            tile_to,
            begin,
            end,
            scale,
            soft_cap,
            window,
            table,
            k_cache,
            v_cache,
            k_scales,
            v_scales,
            k_page,
            k_token,
            v_page,
            v_token,
            s_page,
            s_token,
            stretch != 1,
            WINDOW,
            SOFT_CAP,
            ALIBI,
            SCALED,
            SHARED,
            MAIN,
            MAIN_WIDTH,
            REST,
            REST_WIDTH,
            VALUE,
            VALUE_WIDTH,
            BLOCK_SIZE,
            TILE_N,
        )

    dims = tl.arange(0, VALUE_WIDTH)
    stored = real[:, None] & (dims[None, :] < VALUE)
    if SPLITS > 1:
        tl.store(part_peaks + part_at, peak, mask=real)
        tl.store(part_totals + part_at, total, mask=real)
        tl.store(part_sums + part_at[:, None] * VALUE + dims[None, :], acc, mask=stored)
    else:
        found = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = out + token_at * out_token + token * out_token + head * out_head
        tl.store(out_at[:, None] + dims[None, :], found.to(out.dtype.element_ty), mask=stored)


@triton.jit
def merge_splits(
    out,
    part_sums,
    part_peaks,
    part_totals,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of one sequence, CHUNK numbers of it. A split that saw nothing has a peak of -inf and no sums."""
    start_next(OVERLAP)
    await_previous(OVERLAP)
    program = tl.program_id(0)
    splits = program.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)
    peaks = tl.load(part_peaks + splits)
    totals = tl.load(part_totals + splits)
    seen = peaks > float("-inf")
    level = tl.max(peaks, 0)
    weights = tl.where(seen, tl.exp2(peaks - tl.where(level == float("-inf"), 0.0, level)), 0.0)
    dims = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    sums = tl.load(
        part_sums + splits[:, None] * VALUE + dims[None, :], mask=seen[:, None] & (dims[None, :] < VALUE), other=0.0
    )
    total = tl.sum(totals * weights, 0)
    found = tl.sum(sums * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_at = out + (program // HEADS).to(tl.int64) * out_token + (program % HEADS) * out_head
    tl.store(out_at + dims, found.to(out.dtype.element_ty), mask=dims < VALUE)
