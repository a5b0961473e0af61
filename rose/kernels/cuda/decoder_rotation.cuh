// The norm and rotation of heads of 128 dimensions in the sums of a product whose 64 rows are half a head, each of 32
// dimensions beside what it is rotated with, which is 64 further.

#pragma once

#include <cuda_fp16.h>

#include "decoder_layers.cuh"

namespace {

// The first of this thread's two dimensions in a half of a head.
__device__ __forceinline__ int pair_of_thread(int half) {
    return half * 32 + threadIdx.x % 128 / 32 * 8 + threadIdx.x % 32 / 4;
}

// cos and sin of this thread's pair of dimensions at its tokens from `first` on; the same in every layer.
template <int kMine>
__device__ __forceinline__ void read_angles(const Stack& stack, int first, int half, __half2 (&angles)[kMine / 4]) {
#pragma unroll
    for (int i = 0; i < kMine / 4; ++i) {
        const int token = first + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (token >= stack.num_tokens) continue;
        const float* row =
            stack.angles + static_cast<int64_t>(stack.positions[token]) * H::kHeadDim + pair_of_thread(half);
        angles[i] = __floats2half2_rn(row[0], row[H::kHeadDim / 2]);
    }
}

// The norm's weights for this thread's pair of dimensions.
__device__ __forceinline__ float2 read_norm_weights(const __nv_bfloat16* norms, int head, int half) {
    const __nv_bfloat16* weight = norms + (head < H::kQueryHeads ? 0 : H::kHeadDim) + pair_of_thread(half);
    uint16_t first, second;  // asked for here and not later: volatile
    asm volatile("ld.global.nc.u16 %0, [%2];\nld.global.nc.u16 %1, [%2 + %3];"
                 : "=h"(first), "=h"(second)
                 : "l"(weight), "n"(H::kHeadDim));
    return make_float2(__uint_as_float(first << 16), __uint_as_float(second << 16));
}

// Norms' weights and rotation of the pairs in `sums`; what their squares were before that is added to `squares`.
template <int kMine>
__device__ __forceinline__ void rotate(float2 weights, const __half2 (&angles)[kMine / 4], float (&sums)[kMine / 2],
                                       float (&squares)[kMine / 4]) {
#pragma unroll
    for (int i = 0; i < kMine / 4; ++i) {
        float &first = sums[i / 2 * 4 + i % 2], &second = sums[i / 2 * 4 + 2 + i % 2];
        squares[i] += first * first + second * second;
        const float2 angle = __half22float2(angles[i]);
        const float a = first * weights.x, b = second * weights.y;
        first = a * angle.x - b * angle.y;
        second = b * angle.x + a * angle.y;
    }
}

// To `scratch`, [32][kMine + 8]: at that pitch what eight rows of a warp write falls into different banks.
template <int kMine>
__device__ __forceinline__ void store_squares(const float (&squares)[kMine / 4], uint32_t scratch) {
    const int row = threadIdx.x % 128 / 4, column = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kMine / 8; ++j)
        store_shared(scratch + (row * (kMine + 8) + j * 8 + column * 2) * 4, squares[j * 2], squares[j * 2 + 1]);
}

// What `store_squares` left of a token, a sync_warpgroup later.
template <int kMine>
__device__ __forceinline__ float add_squares(uint32_t scratch, int token) {
    float total = 0;
#pragma unroll
    for (int row = 0; row < 32; ++row) total += load_shared(scratch + (row * (kMine + 8) + token) * 4);
    return total;
}

}  // namespace
