// A product that ends in the residual stream, on Hopper: residual += x weight^T, hidden = factors * residual, and each
// row's sums of squares, so that RMSNorm's division can be left to the next product. bf16 in and out, fp32 between.
//
// A tile is 128 rows of the weight and kTokens rows of x. Two blocks, a cluster, have tiles with the same rows of x, of
// which each fetches half for both. The two warpgroups of a block have its tiles in turn, as in CUTLASS's
// KernelTmaWarpSpecializedPingpong: while one multiplies, the other adds the residual to its sums and writes what is made
// of them. So the tensor cores wait for the end of a block's last tile only.
//
// One thread fetches operands, tile after tile, into rings that both warpgroups read. A warp of its own fetches the
// residual and stores the results, by way of one area that has room for a tile: a tile's end is much shorter than the
// products of the next, so more slots are worth more than a second area.

#include "stack_ring.cuh"

namespace {

constexpr int kFeatures = 2 * kTileRows;
constexpr int kProductThreads = kComputing + 128, kComputingRegisters = 232, kOtherRegisters = 40;
constexpr int kReaders = kWarps / 2;  // of a slot: the warps of the warpgroup that has the tile

struct Maps {
    const CUtensorMap *weight, *x, *residual, *hidden;
};

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

// Shared memory: barriers, the weight's slots, the rows', a tile on its way in or out, sums of squares.
template <int kTokens>
struct ProductMemory {
    static constexpr int kWeightBytes = 2 * kTileBytes, kRowBytes = kTokens * kChunk * 2;
    static constexpr int kHalfBytes = kTokens * kTileRows * 2;  // of the area: 64 columns of a tile
    static constexpr int kSumBytes = kReaders * kTokens * 4;
    static constexpr int kSlots =
        (kSharedBytes - kHeaderBytes - 2 * kHalfBytes - kSumBytes) / (kWeightBytes + kRowBytes);
    static_assert(kTokens % 16 == 0 && kHalfBytes % 1024 == 0 && kRowBytes % 2048 == 0, "alignment");
    static_assert((4 * kSlots + 5) * 8 <= kHeaderBytes, "barriers");
    uint32_t base;

    __device__ Ring weights() const {
        return {base, base + kSlots * 8, base + kHeaderBytes, kWeightBytes, kSlots, 0, 0};
    }
    __device__ Ring rows() const {
        const uint32_t at = base + 2 * kSlots * 8;
        return {at, at + kSlots * 8, base + kHeaderBytes + kSlots * kWeightBytes, kRowBytes, kSlots, 0, 0};
    }
    __device__ uint32_t area() const { return base + kHeaderBytes + kSlots * (kWeightBytes + kRowBytes); }
    __device__ uint32_t sums() const { return area() + 2 * kHalfBytes; }
    // Of a tile of that warpgroup: its residual has come; the new one and the sums have been read, so that hidden may take
    // their place. Each warpgroup has its own: a wait that is two phases early would be over at once.
    __device__ uint32_t has_come(int group) const { return base + (4 * kSlots + group) * 8; }
    __device__ uint32_t is_read(int group) const { return base + (4 * kSlots + 2 + group) * 8; }
    // Told by all warps of the tile's warpgroup, twice a tile: the new residual and the sums, then hidden are there.
    __device__ uint32_t written() const { return base + (4 * kSlots + 4) * 8; }

    // By all threads. Those that fetch rows wait for the warps of both blocks, and tell both: no block's warps may be done
    // with a slot that the other's still have for its last use.
    __device__ __forceinline__ void start() const {
        if (threadIdx.x == 0) {
            const Ring weight_ring = weights(), row_ring = rows();
            for (int slot = 0; slot < kSlots; ++slot) {
                start_barrier(weight_ring.full + slot * 8, 1), start_barrier(weight_ring.empty + slot * 8, kReaders);
                start_barrier(row_ring.full + slot * 8, 2);
                start_barrier(row_ring.empty + slot * 8, 2 * kReaders);
            }
            for (int group = 0; group < 2; ++group) start_barrier(has_come(group), 1), start_barrier(is_read(group), 1);
            start_barrier(written(), kReaders);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
    }
};

// The first use of a map waits for it to come.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// By one thread. The weight depends on no kernel in front, so the first chunks of it are asked for before the wait.
template <int kTokens>
__device__ __forceinline__ void fetch_all(const ProductMemory<kTokens>& shared, const Maps& maps, const Sizes& sizes) {
    Ring weights = shared.weights(), rows = shared.rows();
    const auto fetch_weight = [&](int column, int feature) {
        const uint32_t barrier = weights.open(weights.bytes);
        fetch(weights.here(), maps.weight, column, feature, barrier, kReadAgain);
        weights.next();
    };
    const int rank = cluster_rank();
    const auto fetch_rows = [&](int column, int row) {
        const uint32_t barrier = rows.open(rows.bytes);
        release(barrier, rank ^ 1);
        fetch_for_both(rows.here() + rank * (rows.bytes / 2), maps.x, column, row + rank * (kTokens / 2), barrier);
        rows.next();
    };
    const int ahead = sizes.chunks < weights.count ? sizes.chunks : weights.count, tiles = sizes.tiles<kTokens>();
    prefetch_map(maps.x);
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

// By one thread: what is in the area, to a tile of `map`. Returns when it has been read.
template <int kTokens>
__device__ __forceinline__ void store_tile(const ProductMemory<kTokens>& shared, const CUtensorMap* map, int column,
                                           int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                     "r"(column + half * kTileRows), "r"(row), "r"(shared.area() + half * shared.kHalfBytes)
                     : "memory");
    asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}

// By one warp: each tile's residual into the area, and out of it what the tile's warpgroup makes of it.
template <int kTokens>
__device__ __forceinline__ void exchange_all(const ProductMemory<kTokens>& shared, const Maps& maps, const Sizes& sizes,
                                             float* partial) {
    const int lane = threadIdx.x % 32, tiles = sizes.tiles<kTokens>();
    const bool leads = lane == 0;
    if (leads) prefetch_map(maps.residual), prefetch_map(maps.hidden);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int group = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, group ^= 1) {
        const int row = sizes.first_token<kTokens>(tile), feature = sizes.first_feature(tile);
        if (leads) {
            expect_bytes(shared.has_come(group), 2 * shared.kHalfBytes);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                fetch(shared.area() + half * shared.kHalfBytes, maps.residual, feature + half * kTileRows, row,
                      shared.has_come(group), kReadOften);
        }
        wait_for(shared.written(), 0);
#pragma unroll 1
        for (int token = lane; token < kTokens; token += 32) {
            float total = 0;
#pragma unroll
            for (int warp = 0; warp < kReaders; ++warp)
                total += load_shared(shared.sums() + (warp * kTokens + token) * 4);
            const int64_t at = row + token;
            if (at < sizes.num_tokens) partial[at * sizes.features + tile % sizes.features] = total;
        }
        if (leads) store_tile(shared, maps.residual, feature, row);
        __syncwarp();
        if (leads) arrive(shared.is_read(group));
        wait_for(shared.written(), 1);
        if (leads) store_tile(shared, maps.hidden, feature, row);
        __syncwarp();
    }
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

// sums [2][64, kTokens] = both halves of the weight's rows @ rows^T. Returns the last chunk, whose products may still run.
template <int kTokens>
__device__ __forceinline__ Chunk multiply_all(Ring& weights, Ring& rows, int chunks, float (&sums)[2][kTokens / 2]) {
    Chunk before;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const uint64_t weight = descriptor(weights.here()), row = descriptor(rows.here());
        wait_for(weights.is_full(), weights.parity);
        wait_for(rows.is_full(), rows.parity);
        begin_products();
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)  // 16 columns are 32 bytes: 2 in a descriptor's units
#pragma unroll
            for (int half = 0; half < 2; ++half)
                multiply<kTokens>(sums[half], weight + half * (kTileBytes / 16) + step * 2, row + step * 2,
                                  chunk + step > 0);
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

// Where a thread's first 8 of a warp's 16 columns and 16 tokens are in a tile of 64 columns, permuted as the copy engine
// does; the next 16 tokens are kPairBytes further.
constexpr int kPairBytes = 16 * 128;

__device__ __forceinline__ uint32_t matrix_place() {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, piece = warp * 2 + lane / 8 % 2;
    return (lane / 16 * 8 + lane % 8) * 128 + ((piece ^ (lane % 8)) * 16);
}

// As the sums of products have them: of 16 tokens, pairs of tokens of the first 8 and the next 8 columns, twice.
__device__ __forceinline__ void load_matrices(uint32_t from, uint32_t (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t to, const float* from, float first, float second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(packed(from[0] * first, from[1] * first)), "r"(packed(from[2] * second, from[3] * second)),
                 "r"(packed(from[4] * first, from[5] * first)), "r"(packed(from[6] * second, from[7] * second))
                 : "memory");
}

// Of kCount sums in each of two lanes kStep apart, one gets the first half of both together, the other the second.
template <int kStep, int kCount>
__device__ __forceinline__ void halve(float* sums) {
    const bool upper = (threadIdx.x & kStep) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
        const float kept = upper ? sums[i + kCount / 2] : sums[i], given = upper ? sums[i] : sums[i + kCount / 2];
        sums[i] = kept + __shfl_xor_sync(0xFFFFFFFF, given, kStep);
    }
}

// squares: of 16 tokens, a thread's four. Adds up what the eight lanes with the same tokens have, and leaves a warp's sums
// of all at `to`.
__device__ __forceinline__ void leave_sums(float (&squares)[4], uint32_t to) {
    const int lane = threadIdx.x % 32;
    halve<16, 4>(squares);
    halve<8, 2>(squares);
    squares[0] += __shfl_xor_sync(0xFFFFFFFF, squares[0], 4);
    const int token = lane / 16 * 8 + lane % 4 * 2 + lane / 8 % 2;
    if (lane / 4 % 2 == 0) store_word(to + token * 4, __float_as_uint(squares[0]));
}

// sums += the residual in the area, whose place they take. squares: where a warp's sums of squares go. 16 tokens at a
// time, as few registers are left beside the sums.
template <int kTokens>
__device__ __forceinline__ void add_residual(float (&sums)[2][kTokens / 2], uint32_t area, uint32_t squares) {
    const uint32_t place = area + matrix_place();
#pragma unroll
    for (int pair = 0; pair < kTokens / 16; ++pair) {
        float parts[4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t at = place + half * ProductMemory<kTokens>::kHalfBytes + pair * kPairBytes;
            float* mine = sums[half] + pair * 8;
            uint32_t old[4];
            load_matrices(at, old);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                mine[i * 2] += __uint_as_float(old[i] << 16);
                mine[i * 2 + 1] += __uint_as_float(old[i] & 0xFFFF0000u);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float first = mine[i / 2 * 4 + i % 2], second = mine[i / 2 * 4 + i % 2 + 2];
                parts[i] += first * first + second * second;
            }
            store_matrices(at, mine, 1, 1);
        }
        leave_sums(parts, squares + pair * 16 * 4);
    }
}

// sums * factors, of each half the two columns that a thread has, to the area.
template <int kTokens>
__device__ __forceinline__ void write_hidden(const float (&sums)[2][kTokens / 2], uint32_t area,
                                             const float (&factors)[2][2]) {
    const uint32_t place = area + matrix_place();
#pragma unroll
    for (int pair = 0; pair < kTokens / 16; ++pair)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_matrices(place + half * ProductMemory<kTokens>::kHalfBytes + pair * kPairBytes, sums[half] + pair * 8,
                           factors[half][0], factors[half][1]);
}

// Of a warp: what it wrote to the area may be stored.
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

template <int kTokens>
__device__ __forceinline__ void compute(const ProductMemory<kTokens>& shared, const __nv_bfloat16* columns,
                                        const Sizes& sizes) {
    const int group = warpgroup(), warp = threadIdx.x % 128 / 32, blocks = gridDim.x;
    const int tiles = sizes.tiles<kTokens>();
    columns += warp * 16 + threadIdx.x % 32 / 4;
    Ring weights = shared.weights(), rows = shared.rows();
    uint32_t parity = 0;
    if (group > 0) weights.skip(sizes.chunks), rows.skip(sizes.chunks);
#pragma unroll 1
    for (int tile = blockIdx.x + group * blocks; tile < tiles; tile += 2 * blocks, parity ^= 1) {
        float sums[2][kTokens / 2];
        if (tile >= blocks) await_turn(group);  // all but a block's first
        const Chunk last = multiply_all<kTokens>(weights, rows, sizes.chunks, sums);
        if (tile + blocks < tiles) pass_turn(group);
        weights.skip(sizes.chunks), rows.skip(sizes.chunks);
        await_products();
        last.leave();
        wait_for(shared.has_come(group), parity);
        add_residual<kTokens>(sums, shared.area(), shared.sums() + warp * kTokens * 4);
        tell_written(shared.written());
        const __nv_bfloat16* column = columns + sizes.first_feature(tile);
        const float factors[2][2] = {{__bfloat162float(column[0]), __bfloat162float(column[8])},
                                     {__bfloat162float(column[64]), __bfloat162float(column[72])}};
        wait_for(shared.is_read(group), parity);
        write_hidden<kTokens>(sums, shared.area(), factors);
        tell_written(shared.written());
    }
}

template <int kTokens>
__device__ __forceinline__ void product(const Maps& maps, const __nv_bfloat16* columns, float* partial,
                                        const Sizes& sizes) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const ProductMemory<kTokens> shared{shared_address(memory)};
    shared.start();
    cluster_arrive(), cluster_wait();  // until the other's barriers exist
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp < kWarps) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputingRegisters));
        compute<kTokens>(shared, columns, sizes);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
        if (threadIdx.x == kComputing) fetch_all<kTokens>(shared, maps, sizes);
        if (warp == kWarps + 1) exchange_all<kTokens>(shared, maps, sizes, partial);
        __syncwarp();
    }
    // The other may still tell this one's barriers, and what this one told must have come before it goes.
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    cluster_wait();
}

}  // namespace

// weight [N, K]: boxes of 64 columns and 128 rows. x [M, K]: of 64 columns and half of a tile's tokens. residual, hidden
// [M, N]: of 64 columns and a tile's tokens. columns [N]. partial [M, N / 128]. features: N / 128. chunks: K / 64.
extern "C" __global__ __launch_bounds__(kProductThreads, 1) void residual_160(
    const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
    const __grid_constant__ CUtensorMap residual, const __grid_constant__ CUtensorMap hidden,
    const __nv_bfloat16* columns, float* partial, int num_tokens, int features, int chunks) {
    product<160>({&weight, &x, &residual, &hidden}, columns, partial, {num_tokens, features, chunks});
}
