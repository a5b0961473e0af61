// chained_attention.cu: what a warpgroup has of its queries, from scores to rows of the output.

#pragma once

#include "chained_fetch.cuh"

namespace {

// Weights are powers of two over the level of a row, the maximum of its first tile. No other tile's is looked for: that
// takes 5 to 9 % of attention's time (log.md). A row of a greater sum, whose weights may leave the range of fp32 and bf16,
// is made once more (chained_row.cuh).
constexpr float kGreatestSum = 0x1p64f;

// d [64, kDim] += a [64, 16] @ b [16, kDim], or without what d held. a: a warp's 16 rows in registers. b: rows of 128
// bytes in shared memory, halves of the dimensions kHalfBytes apart.
__device__ __forceinline__ void mix(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}\n"
        : SUMS32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void mix(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}\n"
        : SUMS32(0), SUMS32(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// As `descriptor`, of an operand whose rows are K: 64 columns are kHalfBytes from the next.
__device__ __forceinline__ uint64_t value_descriptor(uint32_t address) {
    return ((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(kHalfBytes / 16) << 16) | (64ull << 32) | (1ull << 62);
}

// d [16, 8] += a [16, 16] @ ones: each of a row's four threads has its whole sum.
__device__ __forceinline__ void add_rows(float (&d)[4], const uint32_t (&a)[4]) {
    constexpr uint32_t kOnes = 0x3F803F80;
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(kOnes));
}

// As power_of_two, but computed where it stands: before the wait for the product that runs beside it.
__device__ __forceinline__ float power_of_two_here(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What a thread has of its two queries, lane / 4 of its warp's 16 and 8 further: scores (S), weights (P), mixed values
// (O), totals (sums of P, or its share of them), and the level that weights are powers of two over.
template <int kDim>
struct Chain {
    // What a warpgroup hands over: so many times 16 bytes of each thread.
    static constexpr int kParts = kDim / 8 + 1, kPitch = 128 * 16;
    // Totals by the tensor cores, of weights as they are rounded, are faster where those have time to spare (log.md).
    static constexpr bool kAddsByProducts = kDim == 64;
    float scores[kKeys / 2] = {}, mixed[kDim / 2] = {};
    uint32_t weights[kKeys / 16][4];
    float level[2], totals[2] = {}, done[2];  // done: totals of the work before

    // Hides a tile's keys from the one at `keys` on from the first query, and from `more` keys later from the second: 8
    // where a query sees no keys behind its own, else 0.
    __device__ __forceinline__ void hide(int keys, int more) {
        const int left = keys - threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i)
            if (i / 4 * 8 + i % 2 >= left + (i / 2 % 2) * more) scores[i] = -INFINITY;
    }

    // Scores become weights.
    template <bool kFirst>
    __device__ __forceinline__ void weigh(float scale) {
#pragma unroll
        for (int row = 0; kFirst && row < 2; ++row) {
            float most = scores[row * 2];
#pragma unroll
            for (int i = 1; i < kKeys / 4; ++i) most = fmaxf(most, scores[i / 2 * 4 + row * 2 + i % 2]);
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 2));
            done[row] = totals[row], totals[row] = 0, level[row] = most * scale;
        }
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
            scores[i] = power_of_two_here(scores[i] * scale - level[i / 2 % 2]);
            if (!kAddsByProducts) totals[i / 2 % 2] += scores[i];
        }
    }

    __device__ __forceinline__ void pack() {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = packed(scores[i * 2], scores[i * 2 + 1]);
        if (!kAddsByProducts) return;
        float sums[2][4] = {};  // two, so that no product waits for the one before
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) add_rows(sums[i % 2], weights[i]);
        totals[0] += sums[0][0] + sums[1][0], totals[1] += sums[0][2] + sums[1][2];
    }

    __device__ __forceinline__ void request_scores(uint32_t queries, uint32_t keys) {
        const uint64_t left = descriptor(queries), right = descriptor(keys);
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {  // 16 dimensions are 32 bytes: 2 in a descriptor's units
            const int at = step / 4 * (kHalfBytes / 16) + step % 4 * 2;
            multiply<kKeys>(scores, left + at, right + at, step > 0);
        }
    }

    __device__ __forceinline__ void request_mixed(uint32_t values, bool add) {
        const uint64_t right = value_descriptor(values);
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step)  // 16 keys are 2048 bytes
            mix(mixed, weights[step], right + step * 128, add || step > 0);
    }

    // What this warpgroup made of its keys, to shared memory.
    __device__ __forceinline__ void hand_over(uint32_t to) const {
        store_shared4(to, level[0], level[1], totals[0], totals[1]);
#pragma unroll
        for (int i = 0; i < kDim / 2; i += 4)
            store_shared4(to + (i / 4 + 1) * kPitch, mixed[i], mixed[i + 1], mixed[i + 2], mixed[i + 3]);
    }

    // Adds what the other made of its keys for the same queries; its threads have the rows and columns that this one's
    // have. What is under the lower level is scaled to the higher.
    __device__ __forceinline__ void take_over(uint32_t from) {
        const float4 other = load_shared4(from);
        const float levels[2] = {other.x, other.y}, others[2] = {other.z, other.w};
        float here[2], there[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float most = fmaxf(level[row], levels[row]);
            here[row] = power_of_two(level[row] - most), there[row] = power_of_two(levels[row] - most);
            const bool great = fmaxf(totals[row], others[row]) > kGreatestSum;
            totals[row] = great ? INFINITY : totals[row] * here[row] + others[row] * there[row];
        }
#pragma unroll
        for (int i = 0; i < kDim / 2; i += 4) {
            const float4 four = load_shared4(from + (i / 4 + 1) * kPitch);
            mixed[i] = mixed[i] * here[0] + four.x * there[0], mixed[i + 1] = mixed[i + 1] * here[0] + four.y * there[0];
            mixed[i + 2] = mixed[i + 2] * here[1] + four.z * there[1];
            mixed[i + 3] = mixed[i + 3] * here[1] + four.w * there[1];
        }
    }

    // What is mixed over `sums` of weights: by way of `stage`, this warp's rows of the work's queries, to up to `rows`
    // rows from `out` on. Returns whether one has too great a sum: what is written of it is no number.
    __device__ __forceinline__ bool write(const float (&sums)[2], uint32_t stage, __nv_bfloat16* out, int64_t stride,
                                          int rows) const {
        const int lane = threadIdx.x % 32;
        float by[2];
        bool great = false;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float total = sums[row];
            if (!kAddsByProducts) {
                total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
                total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
            }
            const bool too_great = total > kGreatestSum;
            by[row] = too_great ? NAN : __fdividef(1.0f, total);
            great |= too_great && lane / 4 + row * 8 < rows;
        }
#pragma unroll
        for (int pair = 0; pair < kDim / 16; ++pair) {
            const int row = lane % 16, piece = pair % 4 * 2 + lane / 16;
            const float* at = mixed + pair * 8;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             stage + pair / 4 * kHalfBytes + row * 128 + ((piece ^ (row % 8)) * 16)),
                         "r"(packed(at[0] * by[0], at[1] * by[0])), "r"(packed(at[2] * by[1], at[3] * by[1])),
                         "r"(packed(at[4] * by[0], at[5] * by[0])), "r"(packed(at[6] * by[1], at[7] * by[1]))
                         : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            constexpr int kPieces = kDim / 8, kRowsAtOnce = 32 / kPieces;
            const int row = step * kRowsAtOnce + lane / kPieces, piece = lane % kPieces;
            const float4 four = load_shared4(stage + piece / 8 * kHalfBytes + row * 128 + ((piece ^ row) % 8 * 16));
            if (row < rows) *reinterpret_cast<float4*>(out + row * stride + piece * 8) = four;
        }
        return great;
    }
};

}  // namespace
