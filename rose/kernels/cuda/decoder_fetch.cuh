// What the two threads of a block do that fetch for the others, in decoder_stack.cu: weights, and rows of the batch.

#pragma once

#include "decoder_exchange.cuh"

namespace {

constexpr int kThreads = kComputing + 64;  // two warpgroups that compute, a warp that asks for weights, one for rows
constexpr int kBlocks = 128, kHidden = 1024, kInner = 3072;
// kNarrow, kContext: columns of K in a split.
constexpr int kSplits = 8, kOutputTiles = kHidden / kTileRows, kGatedTiles = 2 * kInner / kTileRows;
constexpr int kHeadTiles = 2 * kHeads, kNarrow = kInner / kSplits, kContext = kQueryHeads * kHeadDim / kSplits;
constexpr int kStep = 2 * kChunk;  // columns of K in a slot
constexpr int kSharedBytes = 227 * 1024;

enum Part { kAttentionPart, kMlpSumPart, kGatedPart, kNextSumPart, kParts };
enum Weight { kQkvWeight, kOutputWeight, kGatedWeight, kDownWeight, kWeights };

// Of one layer: the norms of queries and keys [2, 128], of the MLP's input and of the next layer's, [1024] each.
struct Layer {
    const __nv_bfloat16 *heads, *mlp, *next;
};

// qkv, partials and squares are kNothing before and after.
struct Stack {
    const CUtensorMap* weights;  // [layers][kWeights]
    const Layer* layers;
    __nv_bfloat16 *hidden, *residual, *context, *narrow;
    __nv_bfloat16 *qkv, *partials;  // [2][kMaxTokens][kQkvWidth], [kSplits][num_tokens][kHidden]
    float2* squares;                // [2][kRotatedHeads][kMaxTokens]: of both halves of a head before its norm
    const float* angles;            // [positions][128]: cosines, then sines
    const int *positions, *offsets;
    uint32_t* counters;  // [layers][kParts][kGroups][8], zeros; the first of each eight counts
    int num_layers, num_tokens, num_seqs, causal;
    float eps, scale;
};

__device__ __forceinline__ uint32_t* counter(const Stack& stack, int layer, int part, int group = 0) {
    return stack.counters + ((layer * kParts + part) * kGroups + group) * 8;
}

// A ring of slots in shared memory, each with a barrier that tells it is full and one that tells it is empty.
struct Ring {
    uint32_t full, empty, slots, bytes;
    int count, slot;
    uint32_t parity;
    bool started = false;

    __device__ uint32_t here() const { return slots + slot * bytes; }
    __device__ uint32_t is_full() const { return full + slot * 8; }
    __device__ uint32_t is_empty() const { return empty + slot * 8; }
    // For the thread that fills it: until fewer than `most` slots before this one are still to come.
    __device__ void await_fewer_than(int most) const {
        const int before = slot - most;
        if (before >= 0)
            wait_for(full + before * 8, parity);
        else if (started)
            wait_for(full + (before + count) * 8, parity ^ 1);
    }
    __device__ void next() {
        if (++slot == count) slot = 0, parity ^= 1, started = true;
    }
    // For the thread that fills it: until the slot is empty, then the barrier for so many bytes.
    __device__ uint32_t open(uint32_t expected) const {
        wait_for(is_empty(), parity ^ 1);
        expect_bytes(is_full(), expected);
        return is_full();
    }
};

// Shared memory: barriers, sums on their way out, weights, rows. Attention writes where sums do.
template <int kTokens>
struct Shared {
    static constexpr int kMine = kTokens / 2;  // a warpgroup's
    static constexpr int kRowBytes = kTokens * kStep * 2, kWeightBytes = kTileRows * kStep * 2;
    static constexpr int kSquareBytes = 32 * (kMine + 8) * 4, kOutBytes = kTokens * 128 + 2 * kSquareBytes;
    static constexpr int kRowSlots = kTokens == 128 ? 3 : kTokens == 64 ? 5 : 9;
    static constexpr int kWeightSlots =
        (kSharedBytes - kHeaderBytes - kOutBytes - kRowSlots * kRowBytes) / kWeightBytes;
    // Slots of weights that are asked for at a time: what comes keeps waiting all else that does.
    static constexpr int kAhead = kTokens == 128 ? 2 : 1;
    static_assert((2 * (kRowSlots + kWeightSlots) + 1) * 8 <= kHeaderBytes, "barriers");
    static_assert(kOutBytes % 1024 == 0 && kOutBytes >= kAttentionScratch, "scratch");
    uint32_t base;

    __device__ uint32_t slots() const { return base + kHeaderBytes + kOutBytes; }
    __device__ Ring weights() const {
        return {base, base + kWeightSlots * 8, slots(), kWeightBytes, kWeightSlots, 0, 0};
    }
    __device__ Ring rows() const {
        const uint32_t at = base + 2 * kWeightSlots * 8;
        return {at, at + kRowSlots * 8, slots() + kWeightSlots * kWeightBytes, kRowBytes, kRowSlots, 0, 0};
    }
    // Told by all computing warps once a layer, when they have told others of SwiGLU; the next layer's weights are
    // asked for only then. A fence waits for all that the copy engine still brings: 1.5 µs in place of 0.4.
    __device__ uint32_t quiet() const { return base + 2 * (kWeightSlots + kRowSlots) * 8; }
    // Of this warpgroup: where its sums are transposed, and where squares are added up.
    __device__ uint32_t stage() const { return base + kHeaderBytes + warpgroup() * kMine * 128; }
    __device__ uint32_t squares() const {
        return base + kHeaderBytes + kTokens * 128 + warpgroup() * kSquareBytes;
    }
};

// What a block does in each part. With enough tokens there are two blocks for half a head, each with half of them.
template <int kTokens>
struct Share {
    static constexpr int kHeadTokens = kTokens > 32 ? kTokens / 2 : kTokens;
    int head_tile = blockIdx.x % kHeadTiles, first_token = blockIdx.x / kHeadTiles * kHeadTokens;
    bool heads = blockIdx.x < kHeadTiles * (kTokens / kHeadTokens);
    int tile = blockIdx.x % kOutputTiles, split = blockIdx.x / kOutputTiles;
    bool gated = blockIdx.x >= kBlocks - kGatedTiles;
    int gated_tile = blockIdx.x - (kBlocks - kGatedTiles);
    // A block whose queries are all padding waits for nothing in its attention. That it makes heads, for which it
    // waits for the layer before, is what keeps it from overtaking the others.
    static_assert(kTokens / 16 * kQueryHeads <= kHeadTiles * (kTokens / kHeadTokens), "attention without heads");
};

// Half a head: of its eight groups of 8 rows, and of the eight that are 64 rows further, four in turn.
__device__ __forceinline__ void fetch_half_head(uint32_t to, const CUtensorMap* map, int column, int tile,
                                                uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(map), "r"(column), "r"(0), "r"(tile % 2 * 4), "r"(tile / 2), "r"(barrier), "l"(kReadOnce)
        : "memory");
}

// Fills slots with `columns` of a weight's tile from `first` on, kAhead at a time.
template <int kAhead>
__device__ __forceinline__ void request_tile(Ring& ring, const CUtensorMap* map, Weight kind, int first, int columns,
                                             int tile) {
#pragma unroll 1
    for (int at = first; at < first + columns; at += kStep, ring.next()) {
        ring.await_fewer_than(kAhead);
        const uint32_t barrier = ring.open(ring.bytes);
#pragma unroll
        for (int part = 0; part < kStep / kChunk; ++part) {
            const uint32_t to = ring.here() + part * kTileBytes;
            const int column = at + part * kChunk;
            if (kind == kQkvWeight)
                fetch_half_head(to, map, column, tile, barrier);
            else if (kind == kGatedWeight)
                fetch_gated(to, map, column, tile * kTileRows, barrier);
            else
                fetch(to, map, column, tile * kTileRows, barrier, kReadOnce);
        }
    }
}

template <int kTokens>
__device__ void request_weights(const Stack& stack, Ring ring, uint32_t quiet) {
    constexpr int kAhead = Shared<kTokens>::kAhead;
    const Share<kTokens> share;
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const CUtensorMap* maps = stack.weights + layer * kWeights;
        if (share.heads) request_tile<kAhead>(ring, maps + kQkvWeight, kQkvWeight, 0, kHidden, share.head_tile);
        request_tile<kAhead>(ring, maps + kOutputWeight, kOutputWeight, share.split * kContext, kContext, share.tile);
        if (share.gated) request_tile<kAhead>(ring, maps + kGatedWeight, kGatedWeight, 0, kHidden, share.gated_tile);
        request_tile<kAhead>(ring, maps + kDownWeight, kDownWeight, share.split * kNarrow, kNarrow, share.tile);
        wait_for(quiet, layer % 2);
    }
}

// `columns` of kRows rows from `first` and `row` on, once the counter has that value.
template <int kRows>
__device__ __forceinline__ void request_rows(Ring& ring, const CUtensorMap* map, int first, int columns,
                                             const uint32_t* counter, uint32_t value, int row = 0) {
    while (counted(counter) < value) {
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
#pragma unroll 1
    for (int at = first; at < first + columns; at += kStep, ring.next()) {
        const uint32_t barrier = ring.open(kRows * kStep * 2);
#pragma unroll
        for (int part = 0; part < kStep / kChunk; ++part)
            fetch(ring.here() + part * kRows * kChunk * 2, map, at + part * kChunk, row, barrier, kReadOften);
    }
}

template <int kTokens>
__device__ void request_all_rows(const Stack& stack, const Shared<kTokens>& shared, const CUtensorMap* hidden,
                                 const CUtensorMap* few, const CUtensorMap* context, const CUtensorMap* narrow) {
    const Share<kTokens> share;
    const uint32_t tokens = stack.num_tokens, queries = 2 * query_groups(tokens);
    Ring ring = shared.rows();
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const uint32_t* before = counter(stack, max(layer - 1, 0), kNextSumPart);
        if (share.heads)
            request_rows<share.kHeadTokens>(ring, few, 0, kHidden, before, layer > 0 ? tokens : 0, share.first_token);
        request_rows<kTokens>(ring, context, share.split * kContext, kContext,
                              counter(stack, layer, kAttentionPart, share.split), queries);
        if (share.gated) request_rows<kTokens>(ring, hidden, 0, kHidden, counter(stack, layer, kMlpSumPart), tokens);
        request_rows<kTokens>(ring, narrow, share.split * kNarrow, kNarrow,
                              counter(stack, layer, kGatedPart, share.split), kGatedTiles / kSplits);
    }
}

}  // namespace
