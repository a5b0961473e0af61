// What Hopper's products of many rows share here: a block's two warpgroups have its tiles in turn, as in CUTLASS's
// KernelTmaWarpSpecializedPingpong. While one multiplies, the other finishes its sums, so the tensor cores wait for the
// end of a block's last tile only.
//
// A tile is 128 rows of the weight and kTokens rows of x. Two blocks, a cluster, have tiles with the same rows of x, of
// which each fetches half for both. One thread fetches operands, tile after tile, into rings that both warpgroups read.

#pragma once

#include "stack_ring.cuh"

namespace {

constexpr int kFeatures = 2 * kTileRows;
constexpr int kProductThreads = kComputing + 128, kComputingRegisters = 232, kOtherRegisters = 40;
constexpr int kReaders = kWarps / 2;  // of a slot: the warps of the warpgroup that has the tile

struct Sizes {
    int num_tokens, features, chunks;  // features: tiles of the weight's rows. chunks: of K

    __device__ int first_feature(int tile) const { return tile % features * kFeatures; }
    template <int kTokens>
    __device__ int first_token(int tile) const {
        return tile / features * kTokens;
    }
    template <int kTokens>
    __device__ int tiles() const {
        return (num_tokens + kTokens - 1) / kTokens * features;
    }
};

// Shared memory: barriers, the weight's slots, the rows', and what a kernel has of its own.
template <int kTokens, int kOwnBytes, int kOwnBarriers>
struct Operands {
    static constexpr int kWeightBytes = 2 * kTileBytes, kRowBytes = kTokens * kChunk * 2;
    static constexpr int kSlots = (kSharedBytes - kHeaderBytes - kOwnBytes) / (kWeightBytes + kRowBytes);
    static_assert(kTokens % 16 == 0 && kRowBytes % 2048 == 0, "alignment");
    static_assert((4 * kSlots + kOwnBarriers) * 8 <= kHeaderBytes, "barriers");
    uint32_t base;

    __device__ Ring weights() const {
        return {base, base + kSlots * 8, base + kHeaderBytes, kWeightBytes, kSlots, 0, 0};
    }
    __device__ Ring rows() const {
        const uint32_t at = base + 2 * kSlots * 8;
        return {at, at + kSlots * 8, base + kHeaderBytes + kSlots * kWeightBytes, kRowBytes, kSlots, 0, 0};
    }
    __device__ uint32_t own() const { return base + kHeaderBytes + kSlots * (kWeightBytes + kRowBytes); }
    __device__ uint32_t own_barrier(int index) const { return base + (4 * kSlots + index) * 8; }

    // By all threads; start_own: the kernel's barriers. Those that fetch rows wait for the warps of both blocks, and tell
    // both: no block's warps may be done with a slot that the other's still have for its last use.
    template <class Start>
    __device__ __forceinline__ void start(Start start_own) const {
        if (threadIdx.x == 0) {
            const Ring weight_ring = weights(), row_ring = rows();
            for (int slot = 0; slot < kSlots; ++slot) {
                start_barrier(weight_ring.full + slot * 8, 1), start_barrier(weight_ring.empty + slot * 8, kReaders);
                start_barrier(row_ring.full + slot * 8, 2);
                start_barrier(row_ring.empty + slot * 8, 2 * kReaders);
            }
            start_own();
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
        cluster_arrive(), cluster_wait();  // until the other's barriers exist
    }
};

// The first use of a map waits for it to come.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// By one thread. The weight depends on no kernel in front, so the first chunks of it are asked for before the wait.
template <int kTokens>
__device__ __forceinline__ void fetch_all(Ring weights, Ring rows, const CUtensorMap* weight_map,
                                          const CUtensorMap* row_map, const Sizes& sizes) {
    const auto fetch_weight = [&](int column, int feature) {
        const uint32_t barrier = weights.open(weights.bytes);
        fetch(weights.here(), weight_map, column, feature, barrier, kReadAgain);
        weights.next();
    };
    const int rank = cluster_rank();
    const auto fetch_rows = [&](int column, int row) {
        const uint32_t barrier = rows.open(rows.bytes);
        release(barrier, rank ^ 1);
        fetch_for_both(rows.here() + rank * (rows.bytes / 2), row_map, column, row + rank * (kTokens / 2), barrier,
                       kReadOften);
        rows.next();
    };
    const int ahead = sizes.chunks < weights.count ? sizes.chunks : weights.count, tiles = sizes.tiles<kTokens>();
    prefetch_map(row_map);
#pragma unroll 1
    for (int chunk = 0; chunk < ahead; ++chunk) fetch_weight(chunk * kChunk, sizes.first_feature(blockIdx.x));
    // For the kernel in front, if this one came up early; the next may come up, too.
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
    int asked = ahead;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, asked = 0) {
        const int row = sizes.first_token<kTokens>(tile), feature = sizes.first_feature(tile);
#pragma unroll 1
        for (int chunk = 0; chunk < sizes.chunks; ++chunk) {
            if (chunk >= asked) fetch_weight(chunk * kChunk, feature);
            fetch_rows(chunk * kChunk, row);
        }
    }
}

// By one thread: what lies at `from`, halves of 64 columns, to a tile of `map`. Returns when it has been read.
__device__ __forceinline__ void store_tile(uint32_t from, int half_bytes, const CUtensorMap* map, int column, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                     "r"(column + half * kTileRows), "r"(row), "r"(from + half * half_bytes)
                     : "memory");
    asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The barriers of what a chunk's products read.
struct Chunk {
    uint32_t weight = 0, rows = 0;

    // By a warp that is done with it: both blocks, which fetch its rows, are told.
    __device__ __forceinline__ void leave() const {
        const int lane = threadIdx.x % 32;
        if (lane == 0) arrive(weight);
        if (lane < 2) release(rows, lane);
    }
};

// The products of a tile's chunks. multiply_chunk(weight, rows, add): those of one, by its descriptors. Returns the last
// chunk, whose products may still run.
template <class Multiply>
__device__ __forceinline__ Chunk multiply_all(Ring& weights, Ring& rows, int chunks, Multiply multiply_chunk) {
    Chunk before;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const uint64_t weight = descriptor(weights.here()), row = descriptor(rows.here());
        wait_for(weights.is_full(), weights.parity);
        wait_for(rows.is_full(), rows.parity);
        begin_products();
        multiply_chunk(weight, row, chunk);
        end_products();
        if (chunk > 0) {
            await_products<1>();
            before.leave();
        }
        before = {weights.is_empty(), rows.is_empty()};
        weights.next(), rows.next();
    }
    return before;
}

// Of a warp: what it wrote to shared memory may be stored.
__device__ __forceinline__ void tell_written(uint32_t barrier) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// A warpgroup asks for its first products when the other has asked for its last: mixed, both tiles would end late. By then
// all of the tile before has come, which waits rely on: one that is two phases early would be over at once.
__device__ __forceinline__ void await_turn(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(4 + group), "n"(kComputing) : "memory");
}

__device__ __forceinline__ void pass_turn(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(5 - group), "n"(kComputing) : "memory");
}

// By a computing warpgroup, for each of its tiles in turn: multiply_chunk as of multiply_all, then, when the sums are
// complete, finish(tile).
template <int kTokens, class Multiply, class Finish>
__device__ __forceinline__ void take_turns(Ring weights, Ring rows, const Sizes& sizes, Multiply multiply_chunk,
                                           Finish finish) {
    const int group = warpgroup(), blocks = gridDim.x, tiles = sizes.tiles<kTokens>();
    if (group > 0) weights.skip(sizes.chunks), rows.skip(sizes.chunks);
#pragma unroll 1
    for (int tile = blockIdx.x + group * blocks; tile < tiles; tile += 2 * blocks) {
        if (tile >= blocks) await_turn(group);  // all but a block's first
        const Chunk last = multiply_all(weights, rows, sizes.chunks, multiply_chunk);
        if (tile + blocks < tiles) pass_turn(group);
        weights.skip(sizes.chunks), rows.skip(sizes.chunks);
        await_products();
        last.leave();
        finish(tile);
    }
}

// A block's work by its threads: warps that compute, one thread that fetches operands, one warp for what else comes and
// goes. The last barrier: the other block may still tell this one's barriers, and what this one told must have come before
// it goes.
template <class Compute, class Fetch, class Exchange>
__device__ __forceinline__ void divide_product(Compute compute, Fetch fetch_operands, Exchange exchange) {
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp < kWarps) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputingRegisters));
        compute();
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
        if (threadIdx.x == kComputing) fetch_operands();
        if (warp == kWarps + 1) exchange();
        __syncwarp();
    }
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    cluster_wait();
}

}  // namespace
