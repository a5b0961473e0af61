// What both kernels of all layers of a small Qwen3 are given.

#pragma once

#include "stack_attention.cuh"

namespace {

using H = Heads<16, 8, 128, true>;
constexpr int kInner = 3072;

enum Weight { kQkvWeight, kOutputWeight, kGatedWeight, kDownWeight, kWeights };

// Of one layer: the norms of queries and keys [2, 128], of the MLP's input and of the next layer's, [1024] each.
struct Layer {
    const __nv_bfloat16 *heads, *mlp, *next;
};

// partials are kNothing before and after; in the kernel for few tokens also qkv and squares, of which the other one
// has no squares. Sizes are that one's; in decoder_wide.cu qkv is [2][most tokens][kQkvWidth], and partials are
// [2][kWideSplits][num_tokens][kHidden].
struct Stack {
    const CUtensorMap* weights;  // [layers][kWeights]
    const Layer* layers;
    __nv_bfloat16 *hidden, *residual, *context, *narrow;
    __nv_bfloat16 *qkv, *partials;  // [2][kMaxTokens][kQkvWidth], [kSplits][num_tokens][kHidden]
    float2* squares;                // [2][kScored][kMaxTokens]: of both halves of a head before its norm
    const float* angles;            // [positions][128]: cosines, then sines
    const int *positions, *offsets;
    uint32_t* counters;
    int num_layers, num_tokens, num_seqs, causal;
    float eps, scale;
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

}  // namespace
