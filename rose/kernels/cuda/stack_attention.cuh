// Attention inside a kernel that goes through all layers: 16 queries of a head against at most 128 keys.
//
// Each of eight warps weighs 16 keys, then mixes all values in 16 dimensions, if there are so many. Queries and keys
// that have norms come without being divided by them: those are factors of a row, and so of a score. Fragments are
// read from device memory straight into registers, again and again until they are there. A product does not care
// about the order of what it sums over, so a thread takes 8 dimensions in a row.

#pragma once

#include <climits>

#include "stack_exchange.cuh"

namespace {

// What attention is compiled for. kAreNormed: the squares of queries and keys are summed up beside them.
template <int kQueries, int kKeys, int kDim, bool kAreNormed>
struct Heads {
    static constexpr int kQueryHeads = kQueries, kKeyHeads = kKeys, kHeadDim = kDim;
    static constexpr bool kNormed = kAreNormed;
    static constexpr int kGroup = kQueries / kKeys;  // of queries that share keys
    static constexpr int kScored = kQueries + kKeys, kHeads = kScored + kKeys;
    static constexpr int kQkvWidth = kHeads * kDim;
    static constexpr int kPieces = kDim / 32;  // of 8 dimensions that a thread has of a row
    static constexpr int kMixing = kDim / 16;  // warps that mix values
    static_assert(kMixing <= kWarps, "dimensions without a warp");
};

// The keys that a thread's two queries see, [start, stop) each, and the block's 16 together.
struct Bounds {
    int start[2], stop[2], first, last;
    bool several;  // whether they are of several sequences
};

// Of queries first + lane / 4 and 8 further. Every lane finds one query's sequence, all together.
__device__ __forceinline__ Bounds find_bounds(const int* offsets, int num_seqs, int first, int num_tokens,
                                              bool causal) {
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
    bounds.several = __any_sync(0xFFFFFFFF, exists && start != bounds.first);
    return bounds;
}

// d [16, 8] += a [16, 16] @ b [16, 8]
__device__ __forceinline__ void multiply_warp(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One over a head's root mean square.
template <class H>
__device__ __forceinline__ float norm_factor(const float2& squares, float eps) {
    return rsqrtf((squares.x + squares.y) / H::kHeadDim + eps);
}

// What a thread has of its block's queries and of its warp's 16 keys; zeros of rows that are none.
template <class H>
struct Fragments {
    uint4 queries[2][H::kPieces] = {}, keys[2][H::kPieces] = {};
    float2 query_squares[2] = {}, key_squares[4] = {};

    // Until the squares are there: few bytes, and the last to be written of a head. first: query. base: key.
    __device__ __forceinline__ void await(const float2* squares, int first, int tokens, int base, int stop) {
        const int head = blockIdx.x % H::kQueryHeads, key = H::kQueryHeads + head / H::kGroup;
        const int group = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
        const float2* query_from = squares + head * kMaxTokens + first + group;
        const float2* key_from = squares + key * kMaxTokens + base + column * 2;
        bool there;
        do {
            there = true;
#pragma unroll
            for (int i = 0; i < 2; ++i) look(query_squares[i], query_from + i * 8, first + group + i * 8 < tokens);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i / 2 * 8 + i % 2;
                look(key_squares[i], key_from + row, base + column * 2 + row < stop);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) there &= is_there(query_squares[i % 2]) && is_there(key_squares[i]);
        } while (!there);
    }

    // All else, whether it is there or not.
    __device__ __forceinline__ void read(const __nv_bfloat16* qkv, int first, int tokens, int base, int stop) {
        constexpr int kPieces = H::kPieces;
        const int head = blockIdx.x % H::kQueryHeads, key = H::kQueryHeads + head / H::kGroup;
        const int group = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
        const __nv_bfloat16* query_at = qkv + (first + group) * H::kQkvWidth + head * H::kHeadDim + column * 8;
        const __nv_bfloat16* key_at = qkv + (base + group) * H::kQkvWidth + key * H::kHeadDim + column * 8;
#pragma unroll
        for (int i = 0; i < 2 * kPieces; ++i) {
            const int row = i / kPieces * 8, at = row * H::kQkvWidth + i % kPieces * 32;
            look(queries[i / kPieces][i % kPieces], query_at + at, first + group + row < tokens);
            look(keys[i / kPieces][i % kPieces], key_at + at, base + group + row < stop);
        }
    }

    __device__ __forceinline__ bool are_there() const {
        constexpr int kPieces = H::kPieces;
        bool there = true;
#pragma unroll
        for (int i = 0; i < 2 * kPieces; ++i)
            there &= is_there(queries[i / kPieces][i % kPieces]) && is_there(keys[i / kPieces][i % kPieces]);
        return there;
    }
};

// What a thread has of the values of all keys: two dimensions of four keys in each 16; zeros of rows that are none.
struct Values {
    uint32_t words[kWarps][4] = {};

    // from: the first key's head.
    template <class H>
    __device__ __forceinline__ void read(const __nv_bfloat16* from, int keys) {
        const int group = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
        const __nv_bfloat16* at = from + column * 2 * H::kQkvWidth + threadIdx.x / 32 * 16 + group * 2;
        if (keys == kMaxTokens) {
#pragma unroll
            for (int i = 0; i < kWarps * 4; ++i) look(words[i / 4][i % 4], at + row_of(i) * H::kQkvWidth, true);
            return;
        }
        // 16 rows at a time, one comparison for all of them where there are so many.
#pragma unroll
        for (int first = 0; first < kWarps * 4; first += 4) {
            if (row_of(first) >= keys) break;
            const int left = row_of(first) + 16 <= keys ? kMaxTokens : keys;
#pragma unroll
            for (int i = first; i < first + 4; ++i)
                look(words[i / 4][i % 4], at + row_of(i) * H::kQkvWidth, column * 2 + row_of(i) < left);
        }
    }

    // Of a thread's words, 4 in each 16 rows: its row, but for the thread's own part.
    static constexpr __device__ int row_of(int i) { return i / 4 * 16 + i / 2 % 2 * 8 + i % 2; }

    __device__ __forceinline__ bool are_there() const {
        bool there = true;
#pragma unroll
        for (int i = 0; i < kWarps * 4; ++i) there &= words[i / 4][i % 4] != kNothing;
        return there;
    }

    __device__ __forceinline__ bool are_numbers() const {
        bool numbers = true;
#pragma unroll
        for (int i = 0; i < kWarps * 4; ++i) {
            const uint32_t exponents = words[i / 4][i % 4] & 0x7F807F80;
            numbers &= exponents < 0x7F800000 && (exponents & 0xFFFF) != 0x7F80;
        }
        return numbers;
    }
};

// The scores of this warp's 16 keys, times `scale` and both norms' factors; -inf where not seen.
template <class H>
__device__ __forceinline__ void score(const Fragments<H>& read, int base, const Bounds& bounds, float eps, float scale,
                                      float (&scores)[2][4]) {
    const int column = threadIdx.x % 4;
    float queries[2], keys[4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        queries[i] = H::kNormed ? scale * norm_factor<H>(read.query_squares[i], eps) : scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) keys[i] = H::kNormed ? norm_factor<H>(read.key_squares[i], eps) : 1.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < H::kPieces; ++i) {
            const uint4 &a = read.queries[0][i], &b = read.queries[1][i], &k = read.keys[j][i];
            multiply_warp(scores[j], a.x, b.x, a.y, b.y, k.x, k.y);
            multiply_warp(scores[j], a.z, b.z, a.w, b.w, k.z, k.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = base + j * 8 + column * 2 + i % 2, row = i / 2;
            const bool seen = at >= bounds.start[row] && at < bounds.stop[row];
            scores[j][i] = seen ? scores[j][i] * queries[row] * keys[j * 2 + i % 2] : -INFINITY;
        }
    }
}

// The largest of each of a thread's two rows of scores, in its warp.
__device__ __forceinline__ void find_largest(const float (&scores)[2][4], float (&largest)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float& most = largest[row] = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; ++i) most = fmaxf(most, scores[i / 2][row * 2 + i % 2]);
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 2));
    }
}

// Scores to weights in `to`, a warp's 16 columns of [16, kWeightPitch]: 2 to the power of each less its row's largest.
__device__ __forceinline__ void weigh(const float (&scores)[2][4], uint32_t largest, int warps, uint32_t to) {
    const int group = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float most = -INFINITY;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp)
            if (warp < warps) most = fmaxf(most, load_shared(largest + (warp * 16 + group + row * 8) * 4));
        if (most == -INFINITY) most = 0;  // a row that sees nothing
#pragma unroll
        for (int j = 0; j < 2; ++j)
            store_word(to + (group + row * 8) * kWeightPitch + j * 16 + column * 4,
                       packed(exp2f(scores[j][row * 2] - most), exp2f(scores[j][row * 2 + 1] - most)));
    }
}

// What a warp makes of the values: of its 16 dimensions the thread's four of two rows, and the sums of their weights.
struct Mixed {
    float sums[2][4] = {}, totals[4] = {};

    // weights: of all warps, [16, kWeightPitch].
    __device__ __forceinline__ void multiply(const Values& values, uint32_t weights, int warps) {
        constexpr uint32_t kOnes = 0x3F803F80;
        const uint32_t from = weights + threadIdx.x % 32 / 4 * kWeightPitch + threadIdx.x % 4 * 4;
#pragma unroll
        for (int half = 0; half < kWarps; half += kWarps / 2) {
            if (half >= warps) break;
#pragma unroll
            for (int warp = half; warp < half + kWarps / 2; ++warp) {
                const uint32_t (&words)[4] = values.words[warp];
                uint32_t a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[i] = warp < warps ? load_word(from + warp * 32 + i % 2 * 8 * kWeightPitch + i / 2 * 16) : 0;
                multiply_warp(totals, a[0], a[1], a[2], a[3], kOnes, kOnes);
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const uint32_t order = odd ? 0x7632 : 0x5410;
                    multiply_warp(sums[odd], a[0], a[1], a[2], a[3], __byte_perm(words[0], words[1], order),
                                  __byte_perm(words[2], words[3], order));
                }
            }
        }
    }

    // width: of a row of `out`. row: 0, or 1 for the one that is 8 further.
    template <int kWidth>
    __device__ __forceinline__ void write(__nv_bfloat16* out, int row) const {
        const float by = totals[row * 2] > 0 ? 1.0f / totals[row * 2] : 0.0f;
        const float four[4] = {sums[0][row * 2] * by, sums[1][row * 2] * by, sums[0][row * 2 + 1] * by,
                               sums[1][row * 2 + 1] * by};
        store_row(out + (threadIdx.x % 32 / 4 + row * 8) * kWidth, four);
    }
};

// `multiply` and `write` for queries of several sequences, one sequence after another, each with its own values alone:
// a weight of zero times another's value that is no number would be none. Rows of padding keep what they held.
template <int kWidth>
__device__ __forceinline__ void mix_apart(const Values& values, const Bounds& bounds, uint32_t weights, int warps,
                                          __nv_bfloat16* out, int rows) {
    const int group = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll 1
    for (int next = bounds.first; next < bounds.last;) {
        int start = bounds.last, stop = 0;
#pragma unroll
        for (int row = 0; row < 2; ++row)
            if (bounds.start[row] >= next) start = min(start, bounds.start[row]);
        start = __reduce_min_sync(0xFFFFFFFF, start);
#pragma unroll
        for (int row = 0; row < 2; ++row)
            if (bounds.start[row] == start) stop = max(stop, bounds.stop[row]);
        stop = __reduce_max_sync(0xFFFFFFFF, stop);
        Values own;
#pragma unroll
        for (int i = 0; i < kWarps * 4; ++i) {
            const int key = bounds.first + column * 2 + i / 4 * 16 + i / 2 % 2 * 8 + i % 2;
            own.words[i / 4][i % 4] = key >= start && key < stop ? values.words[i / 4][i % 4] : 0;
        }
        Mixed mixed;
        mixed.multiply(own, weights, warps);
#pragma unroll
        for (int row = 0; row < 2; ++row)
            if (bounds.start[row] == start && group + row * 8 < rows) mixed.write<kWidth>(out, row);
        next = start + 1;
    }
}

// Attention of blockIdx.x's 16 queries of a head to their rows of `context`. scratch: kAttentionScratch bytes.
template <class H>
__device__ __forceinline__ void attend(const __nv_bfloat16* qkv, const float2* squares, const Bounds& bounds,
                                       float eps, float scale, uint32_t scratch, __nv_bfloat16* context, int tokens) {
    constexpr int kWidth = H::kQueryHeads * H::kHeadDim;
    const int head = blockIdx.x % H::kQueryHeads, first = blockIdx.x / H::kQueryHeads * 16, warp = threadIdx.x / 32;
    const int keys = bounds.last - bounds.first, warps = (keys + 15) / 16, base = bounds.first + warp * 16;
    const __nv_bfloat16* value_at =
        qkv + bounds.first * H::kQkvWidth + (H::kScored + head / H::kGroup) * H::kHeadDim;
    const uint32_t largest = scratch + 16 * kWeightPitch;
    const bool mixes = H::kMixing == kWarps || warp < H::kMixing;
    float scores[2][4] = {};
    Values values;
    if (warp < warps) {
        Fragments<H> fragments;
        if (H::kNormed) fragments.await(squares, first, tokens, base, bounds.last);
        fragments.read(qkv, first, tokens, base, bounds.last);
        while (!fragments.are_there()) fragments.read(qkv, first, tokens, base, bounds.last);
        score(fragments, base, bounds, eps, scale, scores);
    }
    if (mixes) values.read<H>(value_at, keys);
    if (warp < warps) {
        float most[2];
        find_largest(scores, most);
        if (threadIdx.x % 4 == 0)
#pragma unroll
            for (int row = 0; row < 2; ++row)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(
                                 largest + (warp * 16 + threadIdx.x % 32 / 4 + row * 8) * 4),
                             "f"(most[row])
                             : "memory");
    }
    sync_block();
    if (warp < warps) weigh(scores, largest, warps, scratch + warp * 32);
    while (mixes && !values.are_there()) values.read<H>(value_at, keys);
    sync_block();
    if (!mixes) return;
    __nv_bfloat16* out = context + first * kWidth + head * H::kHeadDim + warp * 16 + threadIdx.x % 4 * 4;
    if (bounds.several && __any_sync(0xFFFFFFFF, !values.are_numbers())) {
        mix_apart<kWidth>(values, bounds, scratch, warps, out, tokens - first);
        return;
    }
    Mixed mixed;
    mixed.multiply(values, scratch, warps);
#pragma unroll
    for (int row = 0; row < 2; ++row)
        if (threadIdx.x % 32 / 4 + row * 8 < tokens - first) mixed.write<kWidth>(out, row);
}

}  // namespace
