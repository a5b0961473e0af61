// Means and variances of rows that several warps of a block hold.

#pragma once

#include "stack_exchange.cuh"

namespace {

// Mean of so many values, and the sum of their squared distances from it.
struct Moments {
    float mean, squares;
};

// Of two sets of `count` values each. Nothing cancels, as it would in a difference of two sums.
__device__ __forceinline__ Moments together(const Moments& a, const Moments& b, float count) {
    const float apart = b.mean - a.mean;
    return {0.5f * (a.mean + b.mean), a.squares + b.squares + apart * apart * (0.5f * count)};
}

// Of the row whose values every thread of as many warps in a row has kValues of; all that compute call it together.
// scratch: 64 bytes that nobody else has used since the last sync_block.
template <int kRowWarps, int kValues>
__device__ __forceinline__ Moments moments_of_row(const float (&values)[kValues], uint32_t scratch) {
    Moments mine{0, 0};
#pragma unroll
    for (int i = 0; i < kValues; i += 2) mine.mean += (values[i] + values[i + 1]) * (1.0f / kValues);
#pragma unroll
    for (int i = 0; i < kValues; ++i) mine.squares += (values[i] - mine.mean) * (values[i] - mine.mean);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const Moments other{__shfl_xor_sync(0xFFFFFFFF, mine.mean, lanes),
                            __shfl_xor_sync(0xFFFFFFFF, mine.squares, lanes)};
        mine = together(mine, other, kValues * lanes);
    }
    const int warp = threadIdx.x / 32, first = warp / kRowWarps * kRowWarps;
    if (threadIdx.x % 32 == 0) store_shared(scratch + warp * 8, mine.mean, mine.squares);
    sync_block();
    Moments all[kRowWarps];
#pragma unroll
    for (int i = 0; i < kRowWarps; i += 2) {
        const float4 two = load_shared4(scratch + (first + i) * 8);
        all[i] = {two.x, two.y}, all[i + 1] = {two.z, two.w};
    }
#pragma unroll
    for (int warps = 1; warps < kRowWarps; warps *= 2)
#pragma unroll
        for (int i = 0; i < kRowWarps; i += 2 * warps) all[i] = together(all[i], all[i + warps], kValues * 32 * warps);
    return all[0];
}

}  // namespace
