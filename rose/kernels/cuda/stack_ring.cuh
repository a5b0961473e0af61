// How weights and rows of the batch come to the warps that multiply them, in a kernel that goes through all layers:
// rings of slots in shared memory, which one thread fills for each kind and all computing warps read.

#pragma once

#include "stack_exchange.cuh"

namespace {

constexpr int kThreads = kComputing + 64;  // two warpgroups that compute, a warp that asks for weights, one for rows
constexpr int kBlocks = 128, kHidden = 1024;
constexpr int kSplits = kGroups, kOutputTiles = kHidden / kTileRows;  // of K, and of what leaves a layer's two halves
constexpr int kStep = 2 * kChunk;                                     // columns of K in a slot
constexpr int kSharedBytes = 227 * 1024;

struct Ring {
    uint32_t full, empty, slots, bytes;
    int count, slot;
    uint32_t parity;
    bool started = false;

    __device__ uint32_t here() const { return slots + slot * bytes; }
    __device__ uint32_t is_full() const { return full + slot * 8; }
    __device__ uint32_t is_empty() const { return empty + slot * 8; }
    // For the thread that fills it: until fewer than `most` slots before this one are still to come.
    __device__ void await_fewer_than(int most) const {
        const int before = slot - most;
        if (before >= 0)
            wait_for(full + before * 8, parity);
        else if (started)
            wait_for(full + (before + count) * 8, parity ^ 1);
    }
    __device__ void next() {
        if (++slot == count) slot = 0, parity ^= 1, started = true;
    }
    __device__ void skip(int slots) {
        for (slot += slots; slot >= count; slot -= count) parity ^= 1, started = true;
    }
    // For the thread that fills it: until the slot is empty, then the barrier for so many bytes.
    __device__ uint32_t open(uint32_t expected) const {
        wait_for(is_empty(), parity ^ 1);
        expect_bytes(is_full(), expected);
        return is_full();
    }
};

// By all threads of a block: rings and a barrier that all computing warps arrive at.
__device__ __forceinline__ void start_rings(const Ring& weights, const Ring& rows, uint32_t quiet) {
    if (threadIdx.x == 0) {
        for (const Ring& ring : {weights, rows})
            for (int slot = 0; slot < ring.count; ++slot)
                start_barrier(ring.full + slot * 8, 1), start_barrier(ring.empty + slot * 8, kComputing / 32);
        start_barrier(quiet, kComputing / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

// Shared memory: barriers, sums on their way out, weights, rows. Attention writes where sums do. kExtraBytes: each
// warpgroup's own beside its sums.
template <int kTokens, int kExtraBytes>
struct Shared {
    static constexpr int kMine = kTokens / 2;  // a warpgroup's
    static constexpr int kRowBytes = kTokens * kStep * 2, kWeightBytes = kTileRows * kStep * 2;
    static constexpr int kOutBytes = kTokens * 128 + 2 * kExtraBytes;
    static constexpr int kRowSlots = kTokens == 128 ? 3 : kTokens == 64 ? 5 : 9;
    static constexpr int kWeightSlots =
        (kSharedBytes - kHeaderBytes - kOutBytes - kRowSlots * kRowBytes) / kWeightBytes;
    // Slots of weights that are asked for at a time: what comes keeps waiting all else that does.
    static constexpr int kAhead = kTokens == 128 ? 2 : 1;
    static_assert((2 * (kRowSlots + kWeightSlots) + 1) * 8 <= kHeaderBytes, "barriers");
    static_assert(kOutBytes % 1024 == 0 && kOutBytes >= kAttentionScratch, "scratch");
    uint32_t base;

    __device__ uint32_t slots() const { return base + kHeaderBytes + kOutBytes; }
    __device__ Ring weights() const {
        return {base, base + kWeightSlots * 8, slots(), kWeightBytes, kWeightSlots, 0, 0};
    }
    __device__ Ring rows() const {
        const uint32_t at = base + 2 * kWeightSlots * 8;
        return {at, at + kRowSlots * 8, slots() + kWeightSlots * kWeightBytes, kRowBytes, kRowSlots, 0, 0};
    }
    // Told by all computing warps once a layer, when they have told others of its widest rows; the next layer's weights
    // are asked for only then. A fence waits for all that the copy engine still brings: 1.5 µs in place of 0.4.
    __device__ uint32_t quiet() const { return base + 2 * (kWeightSlots + kRowSlots) * 8; }
    __device__ uint32_t scratch() const { return base + kHeaderBytes; }
    // Of this warpgroup: where its sums are transposed, and its own.
    __device__ uint32_t stage() const { return scratch() + warpgroup() * kMine * 128; }
    __device__ uint32_t extra() const { return scratch() + kTokens * 128 + warpgroup() * kExtraBytes; }

    __device__ __forceinline__ void start() const { start_rings(weights(), rows(), quiet()); }
};

// Fills slots with `columns` of a weight's tile from `first` on, kAhead at a time. fetch_part: 64 columns of it.
template <int kAhead, class Fetch>
__device__ __forceinline__ void request_tile(Ring& ring, int first, int columns, Fetch fetch_part) {
#pragma unroll 1
    for (int at = first; at < first + columns; at += kStep, ring.next()) {
        ring.await_fewer_than(kAhead);
        const uint32_t barrier = ring.open(ring.bytes);
#pragma unroll
        for (int part = 0; part < kStep / kChunk; ++part)
            fetch_part(ring.here() + part * kTileBytes, at + part * kChunk, barrier);
    }
}

// Until the counter has that value, and the copy engine sees what was written before it did.
__device__ __forceinline__ void await(const uint32_t* counter, uint32_t value) {
    while (counted(counter) < value) {
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// `columns` of kRows rows from `first` and `row` on, once the counter has that value.
template <int kRows>
__device__ __forceinline__ void request_rows(Ring& ring, const CUtensorMap* map, int first, int columns,
                                             const uint32_t* counter, uint32_t value, int row = 0) {
    await(counter, value);
#pragma unroll 1
    for (int at = first; at < first + columns; at += kStep, ring.next()) {
        const uint32_t barrier = ring.open(kRows * kStep * 2);
#pragma unroll
        for (int part = 0; part < kStep / kChunk; ++part)
            fetch(ring.here() + part * kRows * kChunk * 2, map, at + part * kChunk, row, barrier, kReadOften);
    }
}

// What the computing warpgroups read of the rings.
struct Products {
    Ring weights, rows;

    // sums = weight [64, columns] @ rows [kMine, columns]^T, this warpgroup's half of the rows, from what comes next.
    template <int kMine>
    __device__ __forceinline__ void multiply_next(int columns, float (&sums)[kMine / 2]) {
        const bool reports = threadIdx.x % 32 == 0;
        uint32_t weight_read = 0, row_read = 0;
#pragma unroll 1
        for (int at = 0; at < columns; at += kStep) {
            const uint64_t weight = descriptor(weights.here());
            const uint64_t row = descriptor(rows.here() + warpgroup() * kMine * kChunk * 2);
            wait_for(weights.is_full(), weights.parity);
            wait_for(rows.is_full(), rows.parity);
            begin_products();
#pragma unroll
            for (int step = 0; step < kStep / 16; ++step) {  // 16 columns are 32 bytes: 2 in a descriptor's units
                const int chunk = step / 4, column = step % 4 * 2;
                multiply<kMine>(sums, weight + chunk * (kTileBytes / 16) + column,
                                row + chunk * (kMine * kChunk * 4 / 16) + column, at + step > 0);
            }
            end_products();
            if (at > 0) {
                await_products<1>();
                if (reports) arrive(weight_read), arrive(row_read);
            }
            weight_read = weights.is_empty(), row_read = rows.is_empty();
            weights.next(), rows.next();
        }
        await_products();
        if (reports) arrive(weight_read), arrive(row_read);
        sync_warpgroup();  // what was written out before has been read from where these sums will be transposed
    }
};

// Four columns of a token's partial sums, added up. Until they are there; nothing again afterwards.
__device__ __forceinline__ void take_partials(__nv_bfloat16* from, int stride, float (&sums)[4]) {
    uint2 parts[kSplits];
    bool there;
    do {
        there = true;
#pragma unroll
        for (int i = 0; i < kSplits; ++i) parts[i] = look(from + i * stride);
#pragma unroll
        for (int i = 0; i < kSplits; ++i) there &= parts[i].x != kNothing && parts[i].y != kNothing;
    } while (!there);
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
        add(parts[i], sums);
        *reinterpret_cast<uint2*>(from + i * stride) = make_uint2(kNothing, kNothing);
    }
}

// A block's work by its threads: warps that compute, one thread that asks for weights, one for rows.
template <class Memory, class Compute, class Weights, class Rows>
__device__ __forceinline__ void divide_work(const Memory& shared, Compute compute, Weights ask_for_weights,
                                            Rows ask_for_rows) {
    shared.start();
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp < kWarps)
        compute();
    else if (threadIdx.x == kComputing)
        ask_for_weights();
    else if (threadIdx.x == kComputing + 32)
        ask_for_rows();
}

}  // namespace
