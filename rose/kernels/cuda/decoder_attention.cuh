// Attention inside decoder_stack.cu: 16 queries of a head against at most 128 keys, by four warps of 32 keys each.
//
// Queries and keys come rotated and weighted but not divided by their norms: those are factors of a row, and so of
// a score. Fragments are read from device memory straight into registers. A product does not care about the order
// of what it sums over, so a thread takes 8 dimensions in a row, and of values 16.

#pragma once

#include <cuda_fp16.h>

#include "hopper.cuh"

namespace {

constexpr int kQueryHeads = 16, kKeyHeads = 8, kHeadDim = 128, kKeys = 128;
constexpr int kRotatedHeads = kQueryHeads + kKeyHeads, kHeads = kRotatedHeads + kKeyHeads;
constexpr int kQkvWidth = kHeads * kHeadDim;
constexpr int kGroups = kKeyHeads;  // counters of a part; of heads and attention one a key head

__device__ __forceinline__ int query_groups(int num_tokens) { return (num_tokens + 15) / 16; }

// The key head that a head of the QKV product belongs to.
__device__ __forceinline__ int key_head(int head) {
    return head < kQueryHeads ? head / 2 : (head - kQueryHeads) % kKeyHeads;
}

// Of blockIdx.x's half head: dimension `pair`, in the tensor cores' rows of this thread with pair + 64.
__device__ __forceinline__ int pair_of_thread() {
    return blockIdx.x % 2 * 32 + threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
}

__device__ __forceinline__ void sync_warpgroup() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ uint32_t counted(const uint32_t* counter) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// Tells other blocks that what the warpgroup wrote to device memory is there, for their copy engines as well.
__device__ __forceinline__ void count(uint32_t* counter) {
    asm volatile("fence.proxy.async;" ::: "memory");
    sync_warpgroup();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void await(const uint32_t* counter, uint32_t value) {
    if (threadIdx.x % 32 == 0)
        while (counted(counter) < value) {
        }
    __syncwarp();
}

__device__ __forceinline__ void store_shared(uint32_t to, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ float load_shared(uint32_t from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ float4 load_shared4(uint32_t from) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ void add(const uint4& row, float (&to)[8]) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[i * 2] += __uint_as_float(words[i] << 16);
        to[i * 2 + 1] += __uint_as_float(words[i] & 0xFFFF0000u);
    }
}

__device__ __forceinline__ void store_row(__nv_bfloat16* to, const float (&row)[8]) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(packed(row[0], row[1]), packed(row[2], row[3]), packed(row[4], row[5]), packed(row[6], row[7]));
}

__device__ __forceinline__ float sum_of_warpgroup(float value, uint32_t scratch) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
    if (threadIdx.x % 32 == 0)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(scratch + threadIdx.x / 8), "f"(value) : "memory");
    sync_warpgroup();
    const float4 parts = load_shared4(scratch);
    return parts.x + parts.y + parts.z + parts.w;
}

// The keys that a thread's two queries see, [start, stop) each, and the block's 16 together.
struct Bounds {
    int start[2], stop[2], first, last;
};

// Of queries first + lane / 4 and 8 further. Every lane finds one query's sequence, all together.
__device__ __forceinline__ Bounds find_bounds(const int* offsets, int num_seqs, int first, int num_tokens, bool causal) {
    const int lane = threadIdx.x % 32, mine = first + lane % 16;
    int before = 0;  // offsets up to this lane's query
    for (int from = 0; from <= num_seqs; from += 32) {
        const int offset = from + lane <= num_seqs ? offsets[from + lane] : INT_MAX;
#pragma unroll
        for (int query = 0; query < 16; ++query) {
            const int found = __popc(__ballot_sync(0xFFFFFFFF, offset <= first + query));
            if (lane % 16 == query) before += found;
        }
    }
    const bool exists = before <= num_seqs && mine < num_tokens;
    const int start = exists ? offsets[before - 1] : num_tokens, end = exists ? offsets[before] : 0;
    const int stop = causal && exists ? mine + 1 : end;
    Bounds bounds;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        bounds.start[i] = __shfl_sync(0xFFFFFFFF, start, lane / 4 + i * 8);
        bounds.stop[i] = __shfl_sync(0xFFFFFFFF, stop, lane / 4 + i * 8);
    }
    bounds.first = __reduce_min_sync(0xFFFFFFFF, start);
    bounds.last = __reduce_max_sync(0xFFFFFFFF, stop);
    return bounds;
}

// d [16, 8] += a [16, 16] @ b [16, 8]
__device__ __forceinline__ void multiply_warp(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes of a row of the QKV product; zeros where there is no such row.
__device__ __forceinline__ uint4 piece(const __nv_bfloat16* qkv, int row, int stop, int column) {
    if (row >= stop) return make_uint4(0, 0, 0, 0);
    return __ldcg(reinterpret_cast<const uint4*>(qkv + static_cast<int64_t>(row) * kQkvWidth + column));
}

// One over the root mean square of a head of a token, from the sums of squares of its halves.
__device__ __forceinline__ float norm_factor(const float* squares, int head, int stride, int token, int stop, float eps) {
    if (token >= stop) return 0.0f;
    const float2 halves = __ldcg(reinterpret_cast<const float2*>(squares) + head * stride + token);
    return rsqrtf((halves.x + halves.y) / kHeadDim + eps);
}

// The scores of this warp's 32 keys from `base` on, times `scale` and both norms' factors; -inf where not seen.
__device__ __forceinline__ void score(const __nv_bfloat16* qkv, const float* squares, int stride, int head, int first,
                                      int base, int num_tokens, const Bounds& bounds, float eps, float scale,
                                      float (&scores)[4][4]) {
    const int group = threadIdx.x % 32 / 4, column = threadIdx.x % 4, key = kQueryHeads + head / 2;
    uint4 queries[2][4], keys[4][4];
    float factors[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            keys[j][i] = piece(qkv, base + j * 8 + group, bounds.last, key * kHeadDim + i * 32 + column * 8);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            queries[j][i] = piece(qkv, first + group + j * 8, num_tokens, head * kHeadDim + i * 32 + column * 8);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
        factors[i] = scale * norm_factor(squares, head, stride, first + group + i * 8, num_tokens, eps);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 &a = queries[0][i], &b = queries[1][i], &k = keys[j][i];
            multiply_warp(scores[j], a.x, b.x, a.y, b.y, k.x, k.y);
            multiply_warp(scores[j], a.z, b.z, a.w, b.w, k.z, k.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = base + j * 8 + column * 2 + i % 2, row = i / 2;
            const float factor = factors[row] * norm_factor(squares, key, stride, at, bounds.last, eps);
            const bool seen = at >= bounds.start[row] && at < bounds.stop[row];
            scores[j][i] = seen ? scores[j][i] * factor : -INFINITY;
        }
    }
}

// Scores to weights, in place: 2 to the power of each less the row's largest. That and the sums of the rows.
__device__ __forceinline__ void weigh(float (&scores)[4][4], float (&most)[2], float (&sums)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        most[row] = -INFINITY;
#pragma unroll
        for (int i = 0; i < 8; ++i) most[row] = fmaxf(most[row], scores[i / 2][row * 2 + i % 2]);
        most[row] = fmaxf(most[row], __shfl_xor_sync(0xFFFFFFFF, most[row], 1));
        most[row] = fmaxf(most[row], __shfl_xor_sync(0xFFFFFFFF, most[row], 2));
        const float base = most[row] == -INFINITY ? 0.0f : most[row];
        sums[row] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& weight = scores[i / 2][row * 2 + i % 2];
            weight = exp2f(weight - base);
            sums[row] += weight;
        }
        sums[row] += __shfl_xor_sync(0xFFFFFFFF, sums[row], 1);
        sums[row] += __shfl_xor_sync(0xFFFFFFFF, sums[row], 2);
    }
}

// Where the 16-byte piece `unit` (0 to 31) of row `row` of a warp's part lies, permuted against bank conflicts.
__device__ __forceinline__ uint32_t place(uint32_t scratch, int warp, int row, int unit) {
    const int permuted = unit / 8 * 8 + ((unit % 8) ^ (unit / 8 * 2 + row % 2));
    return scratch + ((warp * 16 + row) * 32 + permuted) * 16;
}

// This warp's weights times its values, to its part of `scratch`: [16, 128] fp32, sums not divided.
__device__ __forceinline__ void mix_values(const float (&weights)[4][4], const uint4 (&values)[2][4][2], uint32_t scratch) {
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    float sums[16][4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const float(&low)[4] = weights[step * 2], (&high)[4] = weights[step * 2 + 1];
        const uint32_t a0 = packed(low[0], low[1]), a1 = packed(low[2], low[3]);
        const uint32_t a2 = packed(high[0], high[1]), a3 = packed(high[2], high[3]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // two dimensions of this thread's 16 keys' values
            uint32_t words[4];
#pragma unroll
            for (int key = 0; key < 4; ++key) {
                const uint4& four = values[step][key][i / 4];
                words[key] = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
            }
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const uint32_t order = odd ? 0x7632 : 0x5410;
                multiply_warp(sums[i * 2 + odd], a0, a1, a2, a3, __byte_perm(words[0], words[1], order),
                              __byte_perm(words[2], words[3], order));
            }
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int unit = 0; unit < 8; ++unit) {  // dimensions 32 * column on: 16 of the even columns, then of the odd
            const int from = unit % 4 * 4, i = row * 2 + unit / 4;
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                             place(scratch, warp, group + row * 8, column * 8 + unit)),
                         "f"(sums[from][i]), "f"(sums[from + 1][i]), "f"(sums[from + 2][i]), "f"(sums[from + 3][i])
                         : "memory");
        }
}

// The four warps' parts to 16 rows of `out`, of 128 each; rows from `rows` on are none.
__device__ __forceinline__ void combine(uint32_t scratch, uint32_t stats, __nv_bfloat16* out, int rows) {
    const int row = threadIdx.x / 8, unit = threadIdx.x % 8;
    float most[4], factor[4], largest = -INFINITY, total = 0;
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
        most[warp] = load_shared(stats + (warp * 16 + row) * 8);
        largest = fmaxf(largest, most[warp]);
    }
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
        factor[warp] = most[warp] == -INFINITY ? 0.0f : exp2f(most[warp] - largest);
        total += factor[warp] * load_shared(stats + (warp * 16 + row) * 8 + 4);
    }
    const float inverse = total > 0 ? 1.0f / total : 0.0f;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) {
            const float4 value = load_shared4(place(scratch, warp, row, part * 8 + unit));
            const float by = factor[warp] * inverse;
            sum.x += by * value.x, sum.y += by * value.y, sum.z += by * value.z, sum.w += by * value.w;
        }
        if (row < rows)
            *reinterpret_cast<uint2*>(out + static_cast<int64_t>(row) * kQueryHeads * kHeadDim + part * 32 + unit * 4) =
                make_uint2(packed(sum.x, sum.y), packed(sum.z, sum.w));
    }
}

// Attention of blockIdx.x's 16 queries of a head to their rows of `context`. stride: tokens in `squares`.
__device__ __forceinline__ void attend(const __nv_bfloat16* qkv, const float* squares, int stride, const Bounds& bounds,
                                       float eps, float scale, uint32_t scratch, __nv_bfloat16* context, int num_tokens) {
    const int head = blockIdx.x % kQueryHeads, first = blockIdx.x / kQueryHeads * 16;
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    const int base = bounds.first + warp * 32, value = (kRotatedHeads + head / 2) * kHeadDim + group * 16;
    const uint32_t stats = scratch + 4 * 16 * kHeadDim * 4;
    uint4 values[2][4][2];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int key = base + i / 8 * 16 + i / 4 % 2 * 8 + column * 2 + i / 2 % 2;
        values[i / 8][i / 2 % 4][i % 2] = piece(qkv, key, bounds.last, value + i % 2 * 8);
    }
    float scores[4][4] = {}, most[2], sums[2];
    score(qkv, squares, stride, head, first, base, num_tokens, bounds, eps, scale, scores);
    weigh(scores, most, sums);
    mix_values(scores, values, scratch);
    if (column == 0)
#pragma unroll
        for (int row = 0; row < 2; ++row) store_shared(stats + (warp * 16 + group + row * 8) * 8, most[row], sums[row]);
    sync_warpgroup();
    combine(scratch, stats, context + static_cast<int64_t>(first) * kQueryHeads * kHeadDim + head * kHeadDim,
            num_tokens - first);
}

}  // namespace
