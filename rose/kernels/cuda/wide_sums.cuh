// Partial sums in the kernels for 129 to 512 tokens: who adds up which, and the norms' inputs beside them.

#pragma once

#include "wide_share.cuh"

namespace {

// What leaves a layer's attention and its MLP has partial sums of its own each, so that one may be made nothing again
// while the other is written.
enum LayerHalf { kAttentionHalf, kMlpHalf };

// partials: [2][kWideSplits][num_tokens][kHidden]; those of the tokens from `token` on.
__device__ __forceinline__ __nv_bfloat16* partials_of(__nv_bfloat16* partials, int num_tokens, LayerHalf layer_half,
                                                      int split, int token) {
    return partials + static_cast<int64_t>((layer_half * kWideSplits + split) * num_tokens + token) * kHidden;
}

// What no kernel writes, asked for here and not later: volatile.
__device__ __forceinline__ uint4 read_ahead(const __nv_bfloat16* from) {
    uint4 value;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

// The tokens whose partial sums a block adds up, each by as many threads.
template <int kSummed>
struct Summed {
    static constexpr int kTheirs = kComputing / kSummed;   // threads of a token
    static constexpr int kPieces = kHidden / 8 / kTheirs;  // of 8 columns that a thread has
    int token;
    bool exists;

    // first: of the block's tokens.
    __device__ __forceinline__ Summed(int first, int num_tokens)
        : token(first + threadIdx.x / kTheirs), exists(token < num_tokens) {}

    // Of a thread's columns in its token's row.
    __device__ __forceinline__ static int column(int piece) {
        return (piece * kTheirs + threadIdx.x % kTheirs) * 8;
    }

    __device__ __forceinline__ int place(int piece) const { return token * kHidden + column(piece); }

    __device__ __forceinline__ static void add8(const uint4& row, float (&to)[8]) {
        add(make_uint2(row.x, row.y), reinterpret_cast<float(&)[4]>(to[0]));
        add(make_uint2(row.z, row.w), reinterpret_cast<float(&)[4]>(to[4]));
    }

    __device__ __forceinline__ void store8(__nv_bfloat16* to, const float (&row)[8]) const {
        const uint4 value = {packed(row[0], row[1]), packed(row[2], row[3]), packed(row[4], row[5]),
                             packed(row[6], row[7])};
        if (exists) publish(to, value);
    }

    // Adds partial sums, once they are there.
    __device__ __forceinline__ void take(__nv_bfloat16* partials, int num_tokens, LayerHalf layer_half,
                                         float (&sums)[kPieces][8]) const {
        uint4 parts[kPieces][kWideSplits] = {};
        const __nv_bfloat16* from[kWideSplits];
#pragma unroll
        for (int split = 0; split < kWideSplits; ++split)
            from[split] = partials_of(partials, num_tokens, layer_half, split, token);
        bool there;
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < kPieces * kWideSplits; ++i)
                look(parts[i / kWideSplits][i % kWideSplits], from[i % kWideSplits] + column(i / kWideSplits), exists);
#pragma unroll
            for (int i = 0; i < kPieces * kWideSplits; ++i)
                there &= is_there(parts[i / kWideSplits][i % kWideSplits]);
        } while (!there);
#pragma unroll
        for (int i = 0; i < kPieces * kWideSplits; ++i)
            add8(parts[i / kWideSplits][i % kWideSplits], sums[i / kWideSplits]);
    }

    // Makes them nothing again. Whoever writes them next waits for what this block tells next, of the other half.
    __device__ __forceinline__ void forget(__nv_bfloat16* partials, int num_tokens, LayerHalf layer_half) const {
        if (!exists) return;
#pragma unroll
        for (int i = 0; i < kPieces * kWideSplits; ++i) {
            __nv_bfloat16* at = partials_of(partials, num_tokens, layer_half, i % kWideSplits, token);
            *reinterpret_cast<uint4*>(at + column(i / kWideSplits)) =
                make_uint4(kNothing, kNothing, kNothing, kNothing);
        }
    }
};

}  // namespace
