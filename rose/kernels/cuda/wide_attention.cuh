// Attention inside a kernel that goes through all layers: 64 queries of a head against the keys of their sequences.
//
// Both warpgroups have all queries, each half of every tile of keys, with a largest score, a sum of weights and
// mixed values of its own; these are put together at the end. Weights of values stay in registers.

#pragma once

#include "wide_share.cuh"

namespace {

// In a warpgroup's own, behind 8 KB: of its 64 queries the largest scores and sums of weights, flags of its keys.
constexpr int kFigures = 8 * 1024, kFlags = kFigures + kQueries * 8, kAttentionOwn = kFlags + 8;

// d [64, 64] += a [64, 16] @ b [16, 64], a of a warp's 16 rows in registers, b's rows 128 bytes of shared memory.
__device__ __forceinline__ void multiply_values(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n"
        : SUMS32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Whether it is so for any thread of this warpgroup; all wait for each other.
__device__ __forceinline__ bool any_of_warpgroup(bool value) {
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"(static_cast<uint32_t>(value)), "r"(1 + static_cast<int>(threadIdx.x / 128))
        : "memory");
    return any != 0;
}

// The larger magnitude of each of two bf16, side by side. Those that are no numbers are the largest.
__device__ __forceinline__ uint32_t larger(uint32_t magnitudes, uint32_t two) {
    return __vmaxu2(magnitudes, two & 0x7FFF7FFF);
}

__device__ __forceinline__ uint32_t largest_of(uint32_t from) {
    const float4 four = load_shared4(from);
    uint32_t largest = larger(0, __float_as_uint(four.x));
    largest = larger(largest, __float_as_uint(four.y));
    largest = larger(largest, __float_as_uint(four.z));
    return larger(largest, __float_as_uint(four.w));
}

__device__ __forceinline__ bool are_numbers(uint32_t magnitudes) {
    return magnitudes < 0x7F800000 && (magnitudes & 0xFFFF) < 0x7F80;
}

// Scores of kKeys keys from `base` on that the queries do not see become -inf.
template <int kKeys>
__device__ __forceinline__ void hide(float (&scores)[kKeys / 2], const Bounds& bounds, int base) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const uint32_t unseen = bounds.start[row] - base - threadIdx.x % 4 * 2;
        const uint32_t seen = max(bounds.stop[row] - bounds.start[row], 0);
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) {
            float& score = scores[i / 2 * 4 + row * 2 + i % 2];
            if (i / 2 * 8 + i % 2 - unseen >= seen) score = -INFINITY;  // also what lies before: a large number
        }
    }
}

// What a thread has of its two queries, first + lane / 4 of its warp's 16 and 8 further.
template <class H>
struct Mixing {
    static constexpr int kChunks = H::kHeadDim / kChunk;
    float (&values)[kChunks][32];  // of 64 dimensions each
    float largest[2] = {-INFINITY, -INFINITY}, totals[2] = {};

    // Scores of kKeys keys from `base` on to weights, in the form of a product's left operand.
    template <int kKeys>
    __device__ __forceinline__ void weigh(float (&scores)[kKeys / 2], const Bounds& bounds, bool whole, int base,
                                          float scale, uint32_t (&weights)[kKeys / 16][4]) {
        if (!whole) hide<kKeys>(scores, bounds, base);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float most = largest[row];
#pragma unroll
            for (int i = 0; i < kKeys / 4; ++i) most = fmaxf(most, scores[i / 2 * 4 + row * 2 + i % 2]);
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 2));
            const float level = most == -INFINITY ? 0 : most * scale, before = largest[row] * scale;
            const float factor = power_of_two(before - level);
            largest[row] = most;
            totals[row] *= factor;
#pragma unroll
            for (int i = 0; i < kChunks * 16; ++i) values[i / 16][i % 16 / 2 * 4 + row * 2 + i % 2] *= factor;
#pragma unroll
            for (int i = 0; i < kKeys / 8; ++i) {
                const float* two = scores + i * 4 + row * 2;
                const float a = power_of_two(two[0] * scale - level), b = power_of_two(two[1] * scale - level);
                totals[row] += a + b;
                weights[i / 2][i % 2 * 2 + row] = packed(a, b);
            }
        }
    }
};

// A weight of zero times a value that is no number would be none. So where not all queries see all keys of a tile,
// such values become zeros, and the sums of weights of queries that see them no numbers, in all dimensions. slots: of
// this warpgroup's kKeys keys, 64 dimensions each. flags: 64 bits of shared memory.
template <int kKeys, int kChunks>
__device__ __forceinline__ void set_apart(const uint32_t (&slots)[kChunks], uint32_t flags, const Bounds& bounds,
                                          int base, float (&totals)[2]) {
    constexpr int kThreads = 128 / kKeys, kPieces = 8 * kChunks / kThreads;  // of a key, 16 bytes at a time
    const int key = threadIdx.x % 128 / kThreads, part = threadIdx.x % kThreads;
    const uint32_t from = (part * kPieces < 8 ? slots[0] : slots[kChunks - 1]) + key * 128 + part * kPieces % 8 * 16;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) largest = __vmaxu2(largest, largest_of(from + i * 16));
    const bool bad = !are_numbers(largest);
    if (!any_of_warpgroup(bad)) return;
    if (threadIdx.x % 128 < 2) store_word(flags + threadIdx.x % 128 * 4, 0);
    sync_warpgroup();
#pragma unroll 1
    for (uint32_t at = from; at < from + kPieces * 16; at += 16)
        if (!are_numbers(largest_of(at))) store_shared(at, 0, 0), store_shared(at + 8, 0, 0);
    if (bad)
        asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(flags + key / 32 * 4), "r"(1u << key % 32) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    sync_warpgroup();
#pragma unroll 1
    for (int i = 0; i < kKeys; ++i) {
        if (!(load_word(flags + i / 32 * 4) >> i % 32 & 1)) continue;
#pragma unroll
        for (int row = 0; row < 2; ++row)
            if (base + i >= bounds.start[row] && base + i < bounds.stop[row]) totals[row] = NAN;
    }
}

// Asks the tensor cores for the scores of this warpgroup's half of the tile of keys that comes next.
template <int kTile, int kChunks, class Memory>
__device__ __forceinline__ void request_scores(const Memory& shared, Ring& ring, uint32_t (&read)[kChunks],
                                               float (&scores)[kTile / 4]) {
    constexpr int kMine = kTile / 2;
    begin_products();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk, ring.next()) {
        const uint64_t left = descriptor(shared.own(chunk));
        const uint64_t right = descriptor(ring.here() + warpgroup() * kMine * kChunk * 2);
        read[chunk] = ring.is_empty();
        wait_for(ring.is_full(), ring.parity);
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)
            multiply<kMine>(scores, left + step * 2, right + step * 2, chunk + step > 0);
    }
    end_products();
}

// From the ring, keys and values tile by tile. The next tile's scores are made while this one's become weights.
template <class H, int kTile, class Memory>
__device__ __forceinline__ void mix_all(const Memory& shared, Ring& ring, const Keys& keys, const Bounds& bounds,
                                        float scale, int layer, float (&scores)[kTile / 4], Mixing<H>& mixing) {
    constexpr int kMine = kTile / 2, kChunks = Mixing<H>::kChunks;  // keys of a warpgroup
    const auto report = [](const uint32_t (&read)[kChunks]) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
            if (threadIdx.x % 32 == 0) arrive(read[chunk]);
    };
    const bool reports = threadIdx.x % 32 == 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (reports) arrive(shared.own_is_free());
    wait_for(shared.queries_are_there(), layer % 2);
    uint32_t keys_read[kChunks];
    float following[kMine / 2] = {};
    request_scores<kTile, kChunks>(shared, ring, keys_read, scores);
    await_products();
    report(keys_read);
#pragma unroll 1
    for (int from = keys.first; from < keys.stop; from += kTile) {
        const int base = from + warpgroup() * kMine;
        const bool whole = base >= keys.from && base + kMine <= keys.to, more = from + kTile < keys.stop;
        uint32_t read[kChunks], slots[kChunks], weights[kMine / 16][4];
        Ring values = ring;
        if (more) {
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) ring.next();
            request_scores<kTile, kChunks>(shared, ring, keys_read, following);
        }
        mixing.weigh<kMine>(scores, bounds, whole, base, scale, weights);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk, values.next()) {
            slots[chunk] = values.here() + warpgroup() * kMine * kChunk * 2, read[chunk] = values.is_empty();
            wait_for(values.is_full(), values.parity);
        }
        if (!whole) set_apart<kMine, kChunks>(slots, shared.own(warpgroup()) + kFlags, bounds, base, mixing.totals);
        begin_products();
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
            for (int step = 0; step < kMine / 16; ++step)  // 16 keys are 2048 bytes
                multiply_values(mixing.values[chunk], weights[step], descriptor(slots[chunk]) + step * 128);
        end_products();
        await_products();
        report(read);
        if (more) report(keys_read);
        if (!more) ring = values;
#pragma unroll
        for (int i = 0; i < kMine / 2; ++i) scores[i] = following[i];
    }
}

// Adds to `kept` what the other warpgroup has of the same dimensions, and gives it `given`. own: 8 KB of this one,
// other: of that.
template <int kCount>
__device__ __forceinline__ void exchange(float (&kept)[kCount], const float (&given)[kCount], uint32_t own,
                                         uint32_t other) {
    const uint32_t at = threadIdx.x % 128 * 16;
#pragma unroll
    for (int round = 0; round < kCount / 16; ++round) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* four = given + round * 16 + i * 4;
            const uint32_t to = own + i * 2048 + at;
            store_shared(to, four[0], four[1]), store_shared(to + 8, four[2], four[3]);
        }
        sync_block();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = load_shared4(other + i * 2048 + at);
            float* to = kept + round * 16 + i * 4;
            to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
        }
        sync_block();
    }
}

// Both warpgroups' sums under one maximum; totals then are of both. own, other: 512 bytes each.
template <class H>
__device__ __forceinline__ void put_together(Mixing<H>& mixing, float scale, uint32_t own, uint32_t other) {
    const int place = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float& total = mixing.totals[row];
        total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
        total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
        if (threadIdx.x % 4 == 0) store_shared(own + (place + row * 8) * 8, mixing.largest[row], total);
    }
    sync_block();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float theirs = load_shared(other + (place + row * 8) * 8);
        const float total = load_shared(other + (place + row * 8) * 8 + 4);
        const float most = fmaxf(mixing.largest[row], theirs), at = most == -INFINITY ? 0 : most;
        const float factor = power_of_two((mixing.largest[row] - at) * scale);
        mixing.totals[row] = mixing.totals[row] * factor + total * power_of_two((theirs - at) * scale);
#pragma unroll
        for (int i = 0; i < Mixing<H>::kChunks * 16; ++i)
            mixing.values[i / 16][i % 16 / 2 * 4 + row * 2 + i % 2] *= factor;
    }
}

// Of a thread's two queries, divided by their totals.
template <int kCount>
__device__ __forceinline__ void divide(float (&values)[kCount], const float (&totals)[2]) {
    float by[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) by[row] = totals[row] == 0 ? 0 : 1 / totals[row];  // 0: padding
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] *= by[i / 2 % 2];
}

// Attention of a block's queries, to their rows of `context`. A sync_block must stand before it and after it.
template <class H, int kTile, class Stack, class Memory>
__device__ __forceinline__ void attend_wide(const Stack& stack, const Memory& shared, Ring& ring,
                                            const WideShare<H, kTile>& share, const Keys& keys, const Bounds& bounds,
                                            int layer, float (&values)[H::kHeadDim / kChunk][32],
                                            float (&scores)[kTile / 4]) {
    static_assert(Memory::kOwnBytes >= kAttentionOwn, "attention's own");
    constexpr int kWidth = H::kQueryHeads * H::kHeadDim, kCount = H::kHeadDim / 4, kColumns = H::kHeadDim / 2;
    const int group = warpgroup(), warp = threadIdx.x % 128 / 32;
    const uint32_t own = shared.own(group), other = shared.own(1 - group), stage = own + warp * kStageBytes;
    Mixing<H> mixing{values};
#pragma unroll
    for (int i = 0; i < H::kHeadDim / 2; ++i) values[i / 32][i % 32] = 0;
    if (keys.first < keys.stop) mix_all<H, kTile>(shared, ring, keys, bounds, stack.scale, layer, scores, mixing);
    put_together(mixing, stack.scale, own + kFigures, other + kFigures);
    const int first = share.first_query + warp * 16, rows = stack.num_tokens - first;
    __nv_bfloat16* out = stack.context + static_cast<int64_t>(first) * kWidth + share.query_head * H::kHeadDim +
                         group * kColumns;
    const auto place = [&](int row, int piece) { return out + row * kWidth + piece * 8; };
    // Halves of the dimensions, of which a warpgroup writes one.
    auto& first_half = reinterpret_cast<float(&)[kCount]>(values[0][0]);
    auto& second_half = reinterpret_cast<float(&)[kCount]>(values[kCount / 32][kCount % 32]);
    if (group == 0) {
        exchange(first_half, second_half, own, other);
        divide(first_half, mixing.totals);
        store_rows<kColumns>(first_half, stage, rows, place);
    } else {
        exchange(second_half, first_half, own, other);
        divide(second_half, mixing.totals);
        store_rows<kColumns>(second_half, stage, rows, place);
    }
}

}  // namespace
