// What each block does of a layer in the kernels for 129 to 512 tokens, its counters and its shared memory.

#pragma once

#include "stack_attention.cuh"
#include "stack_ring.cuh"

namespace {

constexpr int kTokenTiles = 4;                           // the most a batch may have
constexpr int kTileBlocks = kBlocks / kTokenTiles;       // that work on one
constexpr int kWideSplits = 4;                           // of K, of what leaves a layer's two halves
constexpr int kWideColumns = kHidden / (kTileBlocks / kWideSplits);  // of a block's of that
constexpr int kQueries = 64;                             // of a head, of which a block has the attention
constexpr int kWideGroups = kWideSplits * kTokenTiles;   // counters of a part
// Registers go from warpgroup to warpgroup: a third fetches and has few.
constexpr int kWideThreads = kComputing + 128, kComputingRegisters = 224, kFetchingRegisters = 56;

// kWidePart: of the MLP's wide rows.
enum WidePart { kHeadsPart, kWideAttentionPart, kWideMlpSumPart, kWideMlpPart, kWideNextSumPart, kWideParts };

// counters: [layers][kWideParts][kWideGroups][8], zeros before; the first of each eight counts.
__device__ __forceinline__ uint32_t* wide_counter(uint32_t* counters, int layer, WidePart part, int group) {
    return counters + ((layer * kWideParts + part) * kWideGroups + group) * 8;
}

// What a block does in each part. A block without tokens of its own has no queries and no sums either.
template <class H, int kTile>
struct WideShare {
    static constexpr int kSummed = kTile * kTokenTiles / kBlocks;  // tokens whose partial sums a block adds up
    static_assert(kTile * kTokenTiles * H::kQueryHeads <= kBlocks * kQueries, "a block for all queries");
    int tile = blockIdx.x / kTileBlocks, first_token = tile * kTile, part = blockIdx.x % kTileBlocks;
    int split = part / (kTileBlocks / kWideSplits), columns = part % (kTileBlocks / kWideSplits) * kWideColumns;
    int query_head = blockIdx.x % H::kQueryHeads, first_query = blockIdx.x / H::kQueryHeads * kQueries;
    int first_sum = blockIdx.x * kSummed;

    // Counters of attention and of the MLP's wide rows, by the split of K that waits for them.
    __device__ int attended() const {
        return query_head / (H::kQueryHeads / kWideSplits) * kTokenTiles + first_query / kTile;
    }
    __device__ int widened() const { return part / (kTileBlocks / kWideSplits) * kTokenTiles + tile; }
};

// Shared memory: barriers, each warpgroup's own, kMore bytes, weights, rows. Slots are of 64 columns of K, or of
// keys' dimensions.
template <int kTile, int kOwn, int kMore, int kWeightBytes, int kRows>
struct WideMemory {
    static constexpr int kRowBytes = kTile * kChunk * 2, kOwnBytes = kOwn, kRowSlots = kRows;
    static constexpr int kWeightSlots =
        (kSharedBytes - kHeaderBytes - 2 * kOwnBytes - kMore - kRowSlots * kRowBytes) / kWeightBytes;
    static constexpr int kAhead = 6 * kTileBytes / kWeightBytes;  // slots of weights that are asked for at a time
    static_assert((2 * (kRowSlots + kWeightSlots) + 3) * 8 <= kHeaderBytes, "barriers");
    static_assert(kOwnBytes % 1024 == 0 && kMore % 1024 == 0, "swizzled slots");
    uint32_t base;

    __device__ uint32_t own(int group) const { return base + kHeaderBytes + group * kOwnBytes; }
    __device__ uint32_t more() const { return own(2); }
    __device__ uint32_t slots() const { return more() + kMore; }
    __device__ Ring weights() const {
        return {base, base + kWeightSlots * 8, slots(), kWeightBytes, kWeightSlots, 0, 0};
    }
    __device__ Ring rows() const {
        const uint32_t at = base + 2 * kWeightSlots * 8;
        return {at, at + kRowSlots * 8, slots() + kWeightSlots * kWeightBytes, kRowBytes, kRowSlots, 0, 0};
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
__device__ __forceinline__ Keys find_keys(const int* offsets, int num_seqs, bool causal, int first_query) {
    const int total = offsets[num_seqs], last_query = min(first_query + kQueries, total) - 1;
    if (first_query >= total) return {};
    int first = -1, last = -1;  // sequences
    for (int from = 0; from <= num_seqs; from += 32) {
        const int at = from + threadIdx.x % 32, offset = at <= num_seqs ? offsets[at] : INT_MAX;
        first += __popc(__ballot_sync(0xFFFFFFFF, offset <= first_query));
        last += __popc(__ballot_sync(0xFFFFFFFF, offset <= last_query));
    }
    if (causal) return {offsets[first], last_query + 1, offsets[last], first_query + 1};
    return {offsets[first], offsets[last + 1], offsets[last], offsets[first + 1]};
}

// A block's work by its threads, if it has tokens: warps that compute, one that asks for rows, a thread that asks for
// weights.
template <class Memory, class Compute, class Rows, class Weights>
__device__ __forceinline__ void divide_wide_work(const Memory& shared, Compute compute, Rows ask_for_rows,
                                                 Weights ask_for_weights) {
    shared.start();
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp < kWarps) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputingRegisters));
        compute();
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchingRegisters));
        if (warp == kWarps)
            ask_for_rows();
        else if (threadIdx.x == kComputing + 32)
            ask_for_weights();
    }
}

}  // namespace
