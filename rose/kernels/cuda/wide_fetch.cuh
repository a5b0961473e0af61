// decoder_wide.cu: what each block does of a layer, its shared memory, and the threads that fetch for the others.

#pragma once

#include "decoder_layers.cuh"
#include "stack_ring.cuh"

namespace {

constexpr int kTokenTiles = 4;                           // the most a batch may have
constexpr int kTileBlocks = kBlocks / kTokenTiles;       // that work on one
constexpr int kWideSplits = 4;                           // of K, of what leaves a layer's two halves
constexpr int kWideColumns = kHidden / (kTileBlocks / kWideSplits);  // of a block's of that
constexpr int kWideContext = H::kQueryHeads * H::kHeadDim / kWideSplits, kWideNarrow = kInner / kWideSplits;
constexpr int kGatedTilesOfBlock = 2 * kInner / kTileRows / kTileBlocks;
constexpr int kQueries = 64;                             // of a head, of which a block has the attention
constexpr int kWideGroups = kWideSplits * kTokenTiles;   // counters of a part

enum WidePart { kHeadsPart, kWideAttentionPart, kWideMlpSumPart, kWideGatedPart, kWideNextSumPart, kWideParts };

// counters: [layers][kWideParts][kWideGroups][8], zeros before; the first of each eight counts.
__device__ __forceinline__ uint32_t* wide_counter(const Stack& stack, int layer, WidePart part, int group) {
    return stack.counters + ((layer * kWideParts + part) * kWideGroups + group) * 8;
}

// What a block does in each part. A block without tokens of its own has no queries and no sums either.
template <int kTile>
struct WideShare {
    static constexpr int kSummed = kTile * kTokenTiles / kBlocks;  // tokens whose partial sums a block adds up
    static_assert(kTile * kTokenTiles * H::kQueryHeads <= kBlocks * kQueries, "a block for all queries");
    static_assert(kTileBlocks == H::kHeads && kWideColumns == 2 * kTileRows, "tiles of two times 64 rows");
    int tile = blockIdx.x / kTileBlocks, first_token = tile * kTile, part = blockIdx.x % kTileBlocks;
    int split = part / (kTileBlocks / kWideSplits), columns = part % (kTileBlocks / kWideSplits) * kWideColumns;
    int query_head = blockIdx.x % H::kQueryHeads, first_query = blockIdx.x / H::kQueryHeads * kQueries;
    int first_sum = blockIdx.x * kSummed;
};

// The key head of which a head is, or its queries use.
__device__ __forceinline__ int key_head(int head) {
    return head < H::kQueryHeads ? head / H::kGroup : head % H::kKeyHeads;
}

// Shared memory: barriers, each warpgroup's own, angles of rotation, weights, rows. Slots are of 64 columns of K, or of
// keys' dimensions.
template <int kTile>
struct WideMemory {
    static constexpr int kRowBytes = kTile * kChunk * 2, kOwnBytes = 12 * 1024;
    static constexpr int kAngleBytes = kComputing * kTile;  // a thread's pair in both halves, two tokens in 8
    static constexpr int kRowSlots = kTile == 128 ? 5 : 8;  // the fastest division of what is left (log.md)
    static constexpr int kWeightSlots =
        (kSharedBytes - kHeaderBytes - 2 * kOwnBytes - kAngleBytes - kRowSlots * kRowBytes) / kTileBytes;
    static constexpr int kAhead = 6;  // slots of weights that are asked for at a time
    static_assert((2 * (kRowSlots + kWeightSlots) + 3) * 8 <= kHeaderBytes, "barriers");
    static_assert(kOwnBytes % 1024 == 0 && kAngleBytes % 1024 == 0, "swizzled slots");
    static_assert(kGatedTilesOfBlock * kTile / 2 * 64 <= kOwnBytes, "SwiGLU on its way out");
    static_assert(32 * (kTile / 2 + 8) * 4 + kTile / 2 * 4 <= kOwnBytes, "squares and factors of a head");
    uint32_t base;

    __device__ uint32_t own(int group) const { return base + kHeaderBytes + group * kOwnBytes; }
    __device__ uint32_t angles() const { return own(2); }
    __device__ uint32_t slots() const { return angles() + kAngleBytes; }
    __device__ Ring weights() const {
        return {base, base + kWeightSlots * 8, slots(), kTileBytes, kWeightSlots, 0, 0};
    }
    __device__ Ring rows() const {
        const uint32_t at = base + 2 * kWeightSlots * 8;
        return {at, at + kRowSlots * 8, slots() + kWeightSlots * kTileBytes, kRowBytes, kRowSlots, 0, 0};
    }
    __device__ uint32_t quiet() const { return base + 2 * (kWeightSlots + kRowSlots) * 8; }
    // Queries lie where sums are transposed, 64 dimensions in each warpgroup's own: once that is free.
    __device__ uint32_t own_is_free() const { return quiet() + 8; }
    __device__ uint32_t queries_are_there() const { return quiet() + 16; }

    __device__ __forceinline__ void start() const {
        if (threadIdx.x == 0)
            start_barrier(own_is_free(), kWarps), start_barrier(queries_are_there(), 1);
        start_rings(weights(), rows(), quiet());
    }
};

// The keys [first, stop) that a block's queries see together, and those [from, to) that all of them see.
struct Keys {
    int first = 0, stop = 0, from = 0, to = 0;
};

// Of a whole warp.
__device__ __forceinline__ Keys find_keys(const Stack& stack, int first_query) {
    const int* offsets = stack.offsets;
    const int total = offsets[stack.num_seqs], last_query = min(first_query + kQueries, total) - 1;
    if (first_query >= total) return {};
    int first = -1, last = -1;  // sequences
    for (int from = 0; from <= stack.num_seqs; from += 32) {
        const int at = from + threadIdx.x % 32, offset = at <= stack.num_seqs ? offsets[at] : INT_MAX;
        first += __popc(__ballot_sync(0xFFFFFFFF, offset <= first_query));
        last += __popc(__ballot_sync(0xFFFFFFFF, offset <= last_query));
    }
    if (stack.causal) return {offsets[first], last_query + 1, offsets[last], first_query + 1};
    return {offsets[first], offsets[last + 1], offsets[last], offsets[first + 1]};
}

// Columns from `first` on of a block's weights in kTiles tiles of 64 rows, side by side.
template <int kAhead, int kTiles, class Fetch>
__device__ __forceinline__ void request_tiles(Ring& ring, int first, int columns, Fetch fetch_part) {
#pragma unroll 1
    for (int at = first; at < first + columns; at += kChunk)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile, ring.next()) {
            ring.await_fewer_than(kAhead);
            fetch_part(ring.here(), at, tile, ring.open(ring.bytes));
        }
}

template <int kTile>
__device__ void request_weights(const Stack& stack, Ring ring, uint32_t quiet) {
    constexpr int kAhead = WideMemory<kTile>::kAhead;
    const WideShare<kTile> share;
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const CUtensorMap* maps = stack.weights + layer * kWeights;
        const auto plain = [&](Weight weight) {
            return [&, map = maps + weight](uint32_t to, int column, int tile, uint32_t barrier) {
                fetch(to, map, column, share.columns + tile * kTileRows, barrier, kReadOnce);
            };
        };
        request_tiles<kAhead, 2>(ring, 0, kHidden, [&](uint32_t to, int column, int tile, uint32_t barrier) {
            fetch_half_head(to, maps + kQkvWeight, column, share.part * 2 + tile, barrier);
        });
        request_tiles<kAhead, 2>(ring, share.split * kWideContext, kWideContext, plain(kOutputWeight));
        request_tiles<kAhead, kGatedTilesOfBlock>(
            ring, 0, kHidden, [&](uint32_t to, int column, int tile, uint32_t barrier) {
                fetch_gated(to, maps + kGatedWeight, column, (share.part * kGatedTilesOfBlock + tile) * kTileRows,
                            barrier);
            });
        request_tiles<kAhead, 2>(ring, share.split * kWideNarrow, kWideNarrow, plain(kDownWeight));
        wait_for(quiet, layer % 2);
    }
}

// The maps of what other blocks make: boxes of 64 columns of a tile's tokens, for queries of 64 of them.
struct Maps {
    const CUtensorMap *hidden, *context, *narrow, *queries, *keys;
};

// Both halves of the dimensions of a head's rows from `row` on.
__device__ __forceinline__ void request_head(Ring& ring, const CUtensorMap* map, int head, int row, int turn) {
#pragma unroll
    for (int half = 0; half < H::kHeadDim / kChunk; ++half, ring.next()) {
        const uint32_t barrier = ring.open(ring.bytes);
        fetch_of(ring.here(), map, head * H::kHeadDim + half * kChunk, row, turn, barrier, kReadOften);
    }
}

template <int kTile>
__device__ __forceinline__ void request_queries(const WideMemory<kTile>& shared, const CUtensorMap* map,
                                                const WideShare<kTile>& share, int layer) {
    const uint32_t barrier = shared.queries_are_there();
    wait_for(shared.own_is_free(), layer % 2);
    expect_bytes(barrier, kQueries * H::kHeadDim * 2);
#pragma unroll
    for (int half = 0; half < H::kHeadDim / kChunk; ++half)
        fetch_of(shared.own(half), map, share.query_head * H::kHeadDim + half * kChunk, share.first_query, layer % 2,
                 barrier, kReadOften);
}

// Of a whole warp, of which one thread goes on.
template <int kTile>
__device__ void request_all_rows(const Stack& stack, const WideMemory<kTile>& shared, const Maps& maps) {
    const WideShare<kTile> share;
    const Keys keys = find_keys(stack, share.first_query);
    if (threadIdx.x % 32 > 0) return;
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
        const auto at = [&](WidePart part, int group) { return wide_counter(stack, layer, part, group); };
        if (layer > 0) await(wide_counter(stack, layer - 1, kWideNextSumPart, tile), sums);
        request(maps.hidden, 0, kHidden);
        if (keys.first < keys.stop) {
            await(at(kHeadsPart, key), (H::kGroup + 2) * tiles);
            request_queries(shared, maps.queries, share, layer);
#pragma unroll 1
            for (int from = keys.first; from < keys.stop; from += kTile) {
                request_head(ring, maps.keys, H::kQueryHeads + key, from, layer % 2);
                request_head(ring, maps.keys, H::kScored + key, from, layer % 2);
            }
        }
        await(at(kWideAttentionPart, split), H::kQueryHeads / kWideSplits * groups);
        request(maps.context, share.split * kWideContext, kWideContext);
        await(at(kWideMlpSumPart, tile), sums);
        request(maps.hidden, 0, kHidden);
        await(at(kWideGatedPart, split), kTileBlocks / kWideSplits);
        request(maps.narrow, share.split * kWideNarrow, kWideNarrow);
    }
}

}  // namespace
