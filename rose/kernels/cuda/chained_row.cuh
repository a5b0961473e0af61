// chained_attention.cu: a row whose scores rise too far above those of its first tile, by one warp.

#pragma once

#include "chained_softmax.cuh"

namespace {

// Of queries, keys, values or what is made of them. stride: of a row, in numbers.
template <typename Number>
struct Rows {
    Number* rows;
    int64_t stride;

    template <int kDim>
    __device__ __forceinline__ Number* at(int64_t row, int head) const {
        return rows + row * stride + head * kDim;
    }
};
using HeadRows = Rows<const __nv_bfloat16>;
using Out = Rows<__nv_bfloat16>;

struct Heads {
    HeadRows q, k, v;
    int group;  // query heads a key head
};

template <int kDim>
__device__ __forceinline__ float dot(const __nv_bfloat16* left, const __nv_bfloat16* right) {
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < kDim; i += 2) {
        const float2 a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(left + i));
        const float2 b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(right + i));
        sum += a.x * b.x + a.y * b.y;
    }
    return sum;
}

// The query at `row` with `count` keys from the row `keys` on: a lane has one key in 32, and then two numbers in 64.
template <int kDim>
__device__ __forceinline__ void attend_row(const Heads& heads, int64_t row, int head, int64_t keys, int count, float scale,
                                           __nv_bfloat16* out) {
    const int lane = threadIdx.x % 32, key_head = head / heads.group;
    const __nv_bfloat16* query = heads.q.at<kDim>(row, head);
    const auto score = [&](int key) { return scale * dot<kDim>(query, heads.k.at<kDim>(keys + key, key_head)); };
    float most = -INFINITY, total = 0;
    float2 mixed[kDim / 64] = {};
#pragma unroll 1
    for (int key = lane; key < count; key += 32) most = fmaxf(most, score(key));
#pragma unroll
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, by));
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
        const float mine = first + lane < count ? power_of_two(score(first + lane) - most) : 0;
        const int here = min(32, count - first);
#pragma unroll 1
        for (int from = 0; from < here; ++from) {
            const float weight = __shfl_sync(0xFFFFFFFF, mine, from);
            const __nv_bfloat16* value = heads.v.at<kDim>(keys + first + from, key_head) + lane * 2;
            total += weight;
#pragma unroll
            for (int i = 0; i < kDim / 64; ++i) {
                const float2 two = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(value + i * 64));
                mixed[i].x += weight * two.x, mixed[i].y += weight * two.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i)
        *reinterpret_cast<uint32_t*>(out + lane * 2 + i * 64) = packed(mixed[i].x / total, mixed[i].y / total);
}

// Those of a warp's 16 queries of a work, from the sequence's query `first` on, that are no numbers yet.
template <int kDim, bool kCausal>
__device__ __forceinline__ void attend_again(const Heads& heads, const Out& out, const Work& work, int first, float scale) {
    __syncwarp();
#pragma unroll 1
    for (int query = first; query < min(first + 16, work.length); ++query) {
        __nv_bfloat16* to = out.at<kDim>(work.first + query, work.head);
        const bool missing = __isnan(__bfloat162float(*to));
        __syncwarp();  // before any lane writes there
        if (missing)
            attend_row<kDim>(heads, work.first + query, work.head, work.first, kCausal ? query + 1 : work.length, scale, to);
    }
}

}  // namespace
