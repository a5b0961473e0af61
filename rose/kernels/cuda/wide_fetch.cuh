// The threads that fetch for the others in the kernels for 129 to 512 tokens.

#pragma once

#include "wide_share.cuh"

namespace {

// Columns from `first` on of a block's weights in kTiles slots of `bytes` each, side by side.
template <int kAhead, int kTiles, class Fetch>
__device__ __forceinline__ void request_tiles(Ring& ring, int first, int columns, uint32_t bytes, Fetch fetch_part) {
#pragma unroll 1
    for (int at = first; at < first + columns; at += kChunk)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile, ring.next()) {
            ring.await_fewer_than(kAhead);
            fetch_part(ring.here(), at, tile, ring.open(bytes));
        }
}

// The maps of what other blocks make: boxes of 64 columns of a tile's tokens, for queries of 64 of them.
struct Maps {
    const CUtensorMap *hidden, *context, *wide, *queries, *keys;
};

// All 64s of the dimensions of a head's rows from `row` on.
template <class H>
__device__ __forceinline__ void request_head(Ring& ring, const CUtensorMap* map, int head, int row, int turn) {
#pragma unroll
    for (int half = 0; half < H::kHeadDim / kChunk; ++half, ring.next()) {
        const uint32_t barrier = ring.open(ring.bytes);
        fetch_of(ring.here(), map, head * H::kHeadDim + half * kChunk, row, turn, barrier, kReadOften);
    }
}

template <class H, class Memory, class Share>
__device__ __forceinline__ void request_queries(const Memory& shared, const CUtensorMap* map, const Share& share,
                                                int layer) {
    const uint32_t barrier = shared.queries_are_there();
    wait_for(shared.own_is_free(), layer % 2);
    expect_bytes(barrier, kQueries * H::kHeadDim * 2);
#pragma unroll
    for (int half = 0; half < H::kHeadDim / kChunk; ++half)
        fetch_of(shared.own(half), map, share.query_head * H::kHeadDim + half * kChunk, share.first_query, layer % 2,
                 barrier, kReadOften);
}

// By one thread. kMakers: blocks of a tile that make a head of keys, its values and the queries that use them.
template <class H, int kTile, int kInner, int kMakers, class Stack, class Memory>
__device__ void request_all_rows(const Stack& stack, const Memory& shared, const Maps& maps, const Keys& keys) {
    constexpr int kContext = H::kQueryHeads * H::kHeadDim / kWideSplits, kNarrow = kInner / kWideSplits;
    const WideShare<H, kTile> share;
    const int tokens = min(stack.num_tokens - share.first_token, kTile), tile = share.tile;
    const int tiles = (stack.num_tokens + kTile - 1) / kTile, key = share.query_head / H::kGroup;
    const int split = share.split * kTokenTiles + tile, groups = (tokens + kQueries - 1) / kQueries;
    const int sums = (tokens + share.kSummed - 1) / share.kSummed;
    Ring ring = shared.rows();
    const auto request = [&](const CUtensorMap* map, int first, int columns) {
#pragma unroll 1
        for (int at = first; at < first + columns; at += kChunk, ring.next()) {
            const uint32_t barrier = ring.open(ring.bytes);
            fetch(ring.here(), map, at, share.first_token, barrier, kReadOften);
        }
    };
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const auto at = [&](WidePart part, int group) { return wide_counter(stack.counters, layer, part, group); };
        if (layer > 0) await(wide_counter(stack.counters, layer - 1, kWideNextSumPart, tile), sums);
        request(maps.hidden, 0, kHidden);
        if (keys.first < keys.stop) {
            await(at(kHeadsPart, key), kMakers * tiles);
            request_queries<H>(shared, maps.queries, share, layer);
#pragma unroll 1
            for (int from = keys.first; from < keys.stop; from += kTile) {
                request_head<H>(ring, maps.keys, H::kQueryHeads + key, from, layer % 2);
                request_head<H>(ring, maps.keys, H::kScored + key, from, layer % 2);
            }
        }
        await(at(kWideAttentionPart, split), H::kQueryHeads / kWideSplits * groups);
        request(maps.context, share.split * kContext, kContext);
        await(at(kWideMlpSumPart, tile), sums);
        request(maps.hidden, 0, kHidden);
        await(at(kWideMlpPart, split), kTileBlocks / kWideSplits);
        request(maps.wide, share.split * kNarrow, kNarrow);
    }
}

}  // namespace
