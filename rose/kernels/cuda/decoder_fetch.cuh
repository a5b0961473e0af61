// decoder_stack.cu: what it is given, what each block does of a layer, and the two threads that fetch for the others.

#pragma once

#include "decoder_layers.cuh"
#include "stack_ring.cuh"

namespace {

constexpr int kGatedTiles = 2 * kInner / kTileRows, kHeadTiles = 2 * H::kHeads;
// Columns of K in a split.
constexpr int kNarrow = kInner / kSplits, kContext = H::kQueryHeads * H::kHeadDim / kSplits;

enum Part { kAttentionPart, kMlpSumPart, kGatedPart, kNextSumPart };

template <int kTokens>
using Memory = Shared<kTokens, 32 * (kTokens / 2 + 8) * 4>;  // a warpgroup's squares of 32 pairs

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
    static_assert(kTokens / 16 * H::kQueryHeads <= kHeadTiles * (kTokens / kHeadTokens), "attention without heads");
};

template <int kTokens>
__device__ void request_weights(const Stack& stack, Ring ring, uint32_t quiet) {
    constexpr int kAhead = Memory<kTokens>::kAhead;
    const Share<kTokens> share;
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const CUtensorMap* maps = stack.weights + layer * kWeights;
        const auto plain = [&](Weight weight) {
            return [&, map = maps + weight](uint32_t to, int column, uint32_t barrier) {
                fetch(to, map, column, share.tile * kTileRows, barrier, kReadOnce);
            };
        };
        if (share.heads)
            request_tile<kAhead>(ring, 0, kHidden, [&](uint32_t to, int column, uint32_t barrier) {
                fetch_half_head(to, maps + kQkvWeight, column, share.head_tile, barrier);
            });
        request_tile<kAhead>(ring, share.split * kContext, kContext, plain(kOutputWeight));
        if (share.gated)
            request_tile<kAhead>(ring, 0, kHidden, [&](uint32_t to, int column, uint32_t barrier) {
                fetch_gated(to, maps + kGatedWeight, column, share.gated_tile * kTileRows, barrier);
            });
        request_tile<kAhead>(ring, share.split * kNarrow, kNarrow, plain(kDownWeight));
        wait_for(quiet, layer % 2);
    }
}

template <int kTokens>
__device__ void request_all_rows(const Stack& stack, const Memory<kTokens>& shared, const CUtensorMap* hidden,
                                 const CUtensorMap* few, const CUtensorMap* context, const CUtensorMap* narrow) {
    const Share<kTokens> share;
    const uint32_t tokens = stack.num_tokens, queries = 2 * query_groups(tokens);
    Ring ring = shared.rows();
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const auto at = [&](Part part, int group = 0) { return counter(stack.counters, layer, part, group); };
        const uint32_t* before = counter(stack.counters, max(layer - 1, 0), kNextSumPart);
        if (share.heads)
            request_rows<share.kHeadTokens>(ring, few, 0, kHidden, before, layer > 0 ? tokens : 0, share.first_token);
        request_rows<kTokens>(ring, context, share.split * kContext, kContext, at(kAttentionPart, share.split),
                              queries);
        if (share.gated) request_rows<kTokens>(ring, hidden, 0, kHidden, at(kMlpSumPart), tokens);
        request_rows<kTokens>(ring, narrow, share.split * kNarrow, kNarrow, at(kGatedPart, share.split),
                              kGatedTiles / kSplits);
    }
}

}  // namespace
