// chained_attention.cu: what each block has to do, its shared memory, and the thread that fetches for the others.

#pragma once

#include "stack_ring.cuh"

namespace {

constexpr int kQueries = 128, kMine = kQueries / 2, kKeys = 128;  // of a work, of a warpgroup of it, of a tile
constexpr int kHalfBytes = kQueries * kChunk * 2;                 // 64 dimensions of a tile

// What the blocks do: `capacity` numbers each of tiles of queries, of first rows and lengths of their sequences, of
// heads and of sequences; then where each block's works begin, and the last's end. A block's last may be half a work:
// ~tile is then a tile of kMine queries. See rose/attention/work_list.py.
struct Works {
    const int* list;
    int capacity;
};

struct Work {
    int tile, first, length, head;

    // Queries of a causal work see no keys behind their own tile.
    template <bool kCausal>
    __device__ __forceinline__ int key_tiles() const {
        return kCausal ? tile + 1 : (length + kKeys - 1) / kKeys;
    }
    // Never of a causal kernel.
    template <bool kCausal>
    __device__ __forceinline__ bool is_half() const {
        return !kCausal && tile < 0;
    }
};

// A pair of blocks has the same list, of pairs of heads.
template <bool kPaired>
__device__ __forceinline__ Work read_work(const Works& works, int index) {
    const int* at = works.list + index;
    const int head = __ldg(at + 3 * works.capacity);
    return {__ldg(at), __ldg(at + works.capacity), __ldg(at + 2 * works.capacity),
            kPaired ? head * 2 + static_cast<int>(cluster_rank()) : head};
}

// Queries have slots of their own, so that a work's can come while another's are used, and its mixed values can go out
// through them. Keys and values share a ring.
template <int kDim>
struct AttentionMemory {
    static constexpr int kHalves = kDim / kChunk, kTileSize = kHalves * kHalfBytes, kQuerySlots = 2;
    static constexpr int kMost = (kSharedBytes - kHeaderBytes) / kTileSize - kQuerySlots;
    static constexpr int kSlots = kMost < 8 ? kMost : 8;
    uint32_t base;

    __device__ __forceinline__ Ring queries() const {
        return {base, base + kQuerySlots * 8, base + kHeaderBytes, kTileSize, kQuerySlots, 0, 0};
    }
    __device__ __forceinline__ Ring keys() const {
        const uint32_t at = base + kQuerySlots * 16;
        return {at, at + kSlots * 8, base + kHeaderBytes + kQuerySlots * kTileSize, kTileSize, kSlots, 0, 0};
    }
};

struct HeadMaps {
    const CUtensorMap *q, *k, *v;
};

template <int kDim>
__device__ __forceinline__ void fetch_queries(Ring& ring, const CUtensorMap* map, int head, int row) {
    const uint32_t barrier = ring.open(ring.bytes);
#pragma unroll
    for (int half = 0; half < kDim / kChunk; ++half)
        fetch(ring.here() + half * kHalfBytes, map, head * kDim + half * kChunk, row, barrier, kReadOnce);
    ring.next();
}

// A tile of keys or values; of a pair of blocks each fetches half of the rows for both. Those are read half as often, and
// forwards that keep them in the L2 cache longer than what else there is are slower (log.md).
template <int kDim, bool kPaired>
__device__ __forceinline__ void fetch_tile(Ring& ring, const CUtensorMap* map, int head, int row) {
    const uint32_t barrier = ring.open(ring.bytes), to = ring.here() + (kPaired ? cluster_rank() * kHalfBytes / 2 : 0);
#pragma unroll
    for (int half = 0; half < kDim / kChunk; ++half) {
        const int column = head * kDim + half * kChunk;
        if (kPaired)
            fetch_for_both(to + half * kHalfBytes, map, column, row + cluster_rank() * (kKeys / 2), barrier, kReadAgain);
        else
            fetch(to + half * kHalfBytes, map, column, row, barrier, kReadOften);
    }
    ring.next();
}

// In the order in which they are used: queries and keys of a tile, then the values of the tile before. Of half a work
// two tiles at a time, one for each warpgroup.
template <int kDim, bool kCausal, bool kPaired>
__device__ __forceinline__ void fetch_all(const AttentionMemory<kDim>& shared, const HeadMaps& maps, const Works& works,
                                          int group, int begin, int end) {
    Ring queries = shared.queries(), keys = shared.keys();
    const auto fetch_tiles = [&](const CUtensorMap* map, int head, int row, int tiles) {
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) fetch_tile<kDim, kPaired>(keys, map, head, row + tile * kKeys);
    };
    int value_head = 0, value_row = 0, value_tiles = 0;
#pragma unroll 1
    for (int index = begin; index < end; ++index) {
        const Work work = read_work<kPaired>(works, index);
        const bool half = work.is_half<kCausal>();
        const int head = work.head / group, tiles = work.key_tiles<kCausal>(), together = half ? 2 : 1;
        fetch_queries<kDim>(queries, maps.q, work.head, work.first + (half ? ~work.tile * kMine : work.tile * kQueries));
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile += together) {
            const int row = work.first + tile * kKeys, here = min(together, tiles - tile);
            fetch_tiles(maps.k, head, row, here);
            fetch_tiles(maps.v, value_head, value_row, value_tiles);
            value_head = head, value_row = row, value_tiles = here;
        }
    }
    fetch_tiles(maps.v, value_head, value_row, value_tiles);
}

}  // namespace
