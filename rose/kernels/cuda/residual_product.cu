// A product that ends in the residual stream, on Hopper: residual += x weight^T, hidden = factors * residual, and each
// row's sums of squares, so that RMSNorm's division can be left to the next product. bf16 in and out, fp32 between.
//
// A tile is 128 rows of the weight, 64 for each of two warpgroups, and kTokens rows of x. Up to as many tiles as there
// are multiprocessors run at once, and nothing hides a tile's end, so it is short: the residual is fetched behind the
// last chunk of x and read while the last products run, what is made of it goes out through the copy engine, and a warp
// of its own sees to that while the others are at the next tile.
//
// Chunks of x, the residual and hidden have slots of one ring: half of a tile of the latter is as large as a chunk.

#include "stack_ring.cuh"

namespace {

constexpr int kFeatures = 2 * kTileRows;
constexpr int kProductThreads = kComputing + 128, kComputingRegisters = 232, kOtherRegisters = 40;
constexpr int kOwnSlots = 4;  // behind a tile's chunks: both warpgroups' residual, then their hidden

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

// Shared memory: barriers, sums of squares of each computing warp, the weight's slots, the rows'.
template <int kTokens>
struct ProductMemory {
    static constexpr int kWeightBytes = 2 * kTileBytes, kRowBytes = kTokens * kChunk * 2;
    static constexpr int kSumBytes = kWarps * kTokens * 4;
    static constexpr int kMost = (kSharedBytes - kHeaderBytes - kSumBytes) / (kWeightBytes + kRowBytes);
    static constexpr int kSlots = kMost < 8 ? kMost : 8;
    static_assert(kTokens % 32 == 0 && kSumBytes % 1024 == 0 && kRowBytes % 2048 == 0, "alignment");
    static_assert(kSlots >= kOwnSlots, "slots");
    uint32_t base;

    __device__ uint32_t sums() const { return base + kHeaderBytes; }
    __device__ Ring weights() const { return {base, base + kSlots * 8, sums() + kSumBytes, kWeightBytes, kSlots, 0, 0}; }
    __device__ Ring rows() const {
        const uint32_t at = base + 2 * kSlots * 8;
        return {at, at + kSlots * 8, sums() + kSumBytes + kSlots * kWeightBytes, kRowBytes, kSlots, 0, 0};
    }
    // Told by all computing warps when a tile's residual, hidden and sums are in shared memory; by who reads these sums
    // when it has.
    __device__ uint32_t written() const { return base + 4 * kSlots * 8; }
    __device__ uint32_t sums_read() const { return written() + 8; }

    // By all threads. Of a pair of blocks, those that fetch rows wait for the warps of both, and tell both: no block's
    // warps may be done with a slot that the other's still have for its last use.
    __device__ __forceinline__ void start(bool paired) const {
        if (threadIdx.x == 0) {
            const Ring weight_ring = weights(), row_ring = rows();
            for (int slot = 0; slot < kSlots; ++slot) {
                start_barrier(weight_ring.full + slot * 8, 1), start_barrier(weight_ring.empty + slot * 8, kWarps);
                start_barrier(row_ring.full + slot * 8, 1 << paired);
                start_barrier(row_ring.empty + slot * 8, kWarps << paired);
            }
            start_barrier(written(), kWarps), start_barrier(sums_read(), 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
    }
};

// As `release`, for all computing warps at once.
__device__ __forceinline__ void release_for_all(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there], %2;\n}" ::"r"(barrier),
        "r"(rank), "n"(kWarps)
        : "memory");
}

__device__ __forceinline__ void store_tile(const CUtensorMap* map, int column, int row, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column),
                 "r"(row), "r"(from)
                 : "memory");
}

// The first use of a map waits for it to come.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// By one thread. The weight depends on no kernel in front, so the first chunks of it are asked for before the wait.
template <int kTokens, bool kPaired>
__device__ __forceinline__ void fetch_all(const ProductMemory<kTokens>& shared, const Maps& maps, const Sizes& sizes) {
    Ring weights = shared.weights(), rows = shared.rows();
    const auto fetch_weight = [&](int column, int feature) {
        const uint32_t barrier = weights.open(weights.bytes);
        fetch(weights.here(), maps.weight, column, feature, barrier, kReadAgain);
        weights.next();
    };
    const int rank = kPaired ? cluster_rank() : 0;
    const auto open_rows = [&](uint32_t bytes) {
        const uint32_t barrier = rows.open(bytes);
        if (kPaired) release(barrier, rank ^ 1);
        return barrier;
    };
    const auto fetch_rows = [&](int column, int row) {
        const uint32_t barrier = open_rows(rows.bytes), to = rows.here() + rank * (rows.bytes / 2);
        if (kPaired)
            fetch_for_both(to, maps.x, column, row + rank * (kTokens / 2), barrier);
        else
            fetch(to, maps.x, column, row, barrier, kReadOften);
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
#pragma unroll 1
        for (int part = 0; part < kOwnSlots; ++part, rows.next()) {  // nothing comes to where hidden will be written
            const uint32_t barrier = open_rows(part < 2 ? rows.bytes : 0);
            if (part < 2) fetch(rows.here(), maps.residual, feature + part * kTileRows, row, barrier, kReadOften);
        }
    }
}

// By one warp: what the others wrote to shared memory, and the sums of theirs.
template <int kTokens, bool kPaired>
__device__ __forceinline__ void store_all(const ProductMemory<kTokens>& shared, const Maps& maps, const Sizes& sizes,
                                          float* partial) {
    const int lane = threadIdx.x % 32, tiles = sizes.tiles<kTokens>();
    Ring rows = shared.rows();
    uint32_t parity = 0;
    if (lane == 0) prefetch_map(maps.residual), prefetch_map(maps.hidden);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1, rows.skip(kOwnSlots)) {
        const int row = sizes.first_token<kTokens>(tile), feature = sizes.first_feature(tile);
        rows.skip(sizes.chunks);
        wait_for(shared.written(), parity);
        Ring mine = rows;
#pragma unroll 1
        for (int part = 0; part < kOwnSlots && lane == 0; ++part, mine.next())
            store_tile(part < 2 ? maps.residual : maps.hidden, feature + part % 2 * kTileRows, row, mine.here());
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#pragma unroll 1
        for (int token = lane; token < kTokens; token += 32) {
            float total = 0;
#pragma unroll
            for (int warp = 0; warp < kWarps; ++warp) total += load_shared(shared.sums() + (warp * kTokens + token) * 4);
            const int64_t at = row + token;
            if (at < sizes.num_tokens) partial[at * sizes.features + tile % sizes.features] = total;
        }
        __syncwarp();
        if (lane == 0) arrive(shared.sums_read());
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncwarp();
        mine = rows;
        mine.skip(lane % kOwnSlots);
        if (lane < kOwnSlots << kPaired) release_for_all(mine.is_empty(), lane / kOwnSlots);
    }
}

// The barriers of what a chunk's products read.
struct Chunk {
    uint32_t weight = 0, rows = 0;

    // By a warp that is done with it: all blocks that fetch its rows are told.
    template <bool kPaired>
    __device__ __forceinline__ void leave() const {
        const int lane = threadIdx.x % 32;
        if (lane == 0) arrive(weight);
        if (!kPaired && lane == 0) arrive(rows);
        if (kPaired && lane < 2) release(rows, lane);
    }
};

// sums [64, kTokens] = the warpgroup's rows of the weight @ rows^T. Returns the last chunk, whose products may still run.
template <int kTokens, bool kPaired>
__device__ __forceinline__ Chunk multiply_all(Ring& weights, Ring& rows, int chunks, float (&sums)[kTokens / 2]) {
    const uint32_t mine = warpgroup() * kTileBytes;
    Chunk before;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const uint64_t weight = descriptor(weights.here() + mine), row = descriptor(rows.here());
        wait_for(weights.is_full(), weights.parity);
        wait_for(rows.is_full(), rows.parity);
        begin_products();
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)  // 16 columns are 32 bytes: 2 in a descriptor's units
            multiply<kTokens>(sums, weight + step * 2, row + step * 2, chunk + step > 0);
        end_products();
        if (chunk > 0) {
            await_products<1>();
            before.leave<kPaired>();
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
template <int kTokens>
__device__ __forceinline__ void load_residual(uint32_t tile, uint32_t (&old)[kTokens / 16][4]) {
#pragma unroll
    for (int pair = 0; pair < kTokens / 16; ++pair)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(old[pair][0]), "=r"(old[pair][1]), "=r"(old[pair][2]), "=r"(old[pair][3])
                     : "r"(tile + matrix_place() + pair * kPairBytes)
                     : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t to, const float* from, float first, float second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(packed(from[0] * first, from[1] * first)), "r"(packed(from[2] * second, from[3] * second)),
                 "r"(packed(from[4] * first, from[5] * first)), "r"(packed(from[6] * second, from[7] * second))
                 : "memory");
}

// The new residual in the place of the old, and times `factors` at `hidden`. squares: sums over a thread's two columns,
// of each of its tokens.
template <int kTokens>
__device__ __forceinline__ void add_residual(float (&sums)[kTokens / 2], const uint32_t (&old)[kTokens / 16][4],
                                             uint32_t residual, uint32_t hidden, const float (&factors)[2],
                                             float (&squares)[kTokens / 4]) {
#pragma unroll
    for (int pair = 0; pair < kTokens / 16; ++pair) {
        float* mine = sums + pair * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            mine[i * 2] += __uint_as_float(old[pair][i] << 16);
            mine[i * 2 + 1] += __uint_as_float(old[pair][i] & 0xFFFF0000u);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float first = mine[i / 2 * 4 + i % 2], second = mine[i / 2 * 4 + i % 2 + 2];
            squares[pair * 4 + i] = first * first + second * second;
        }
        const uint32_t at = matrix_place() + pair * kPairBytes;
        store_matrices(residual + at, mine, 1, 1);
        store_matrices(hidden + at, mine, factors[0], factors[1]);
    }
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

// Adds up what the eight lanes with the same tokens have, and leaves a warp's sums [kTokens] at `to`.
template <int kTokens>
__device__ __forceinline__ void leave_sums(float (&squares)[kTokens / 4], uint32_t to) {
    constexpr int kLeft = kTokens / 32;
    const int lane = threadIdx.x % 32;
    halve<16, kLeft * 8>(squares);
    halve<8, kLeft * 4>(squares);
    halve<4, kLeft * 2>(squares);
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
        const int index = lane / 4 * kLeft + i, token = index / 2 * 8 + lane % 4 * 2 + index % 2;
        store_word(to + token * 4, __float_as_uint(squares[i]));
    }
}

template <int kTokens, bool kPaired>
__device__ __forceinline__ void compute(const ProductMemory<kTokens>& shared, const __nv_bfloat16* columns,
                                        const Sizes& sizes) {
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), tiles = sizes.tiles<kTokens>();
    Ring weights = shared.weights(), rows = shared.rows();
    uint32_t parity = 1;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
        const __nv_bfloat16* column = columns + sizes.first_feature(tile) + warp * 16 + threadIdx.x % 32 / 4;
        const float factors[2] = {__bfloat162float(column[0]), __bfloat162float(column[8])};
        float sums[kTokens / 2], squares[kTokens / 4];
        const Chunk last = multiply_all<kTokens, kPaired>(weights, rows, sizes.chunks, sums);
        Ring mine = rows;
        mine.skip(warpgroup());
        const uint32_t residual = mine.here();
        wait_for(mine.is_full(), mine.parity);
        uint32_t old[kTokens / 16][4];
        load_residual<kTokens>(residual, old);
        await_products();
        last.leave<kPaired>();
        mine.skip(2);
        wait_for(mine.is_full(), mine.parity);
        add_residual<kTokens>(sums, old, residual, mine.here(), factors, squares);
        wait_for(shared.sums_read(), parity);  // those of the tile before
        leave_sums<kTokens>(squares, shared.sums() + warp * kTokens * 4);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.written());
        rows.skip(kOwnSlots);
    }
}

template <int kTokens, bool kPaired>
__device__ __forceinline__ void product(const Maps& maps, const __nv_bfloat16* columns, float* partial,
                                        const Sizes& sizes) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const ProductMemory<kTokens> shared{shared_address(memory)};
    shared.start(kPaired);
    if (kPaired) cluster_arrive(), cluster_wait();  // until the other's barriers exist
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp < kWarps) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputingRegisters));
        compute<kTokens, kPaired>(shared, columns, sizes);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
        if (threadIdx.x == kComputing) fetch_all<kTokens, kPaired>(shared, maps, sizes);
        if (warp == kWarps + 1) store_all<kTokens, kPaired>(shared, maps, sizes, partial);
        __syncwarp();
    }
    if (kPaired) {  // the other may still tell this one's barriers; what this one told must have come before it goes
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
        cluster_wait();
    }
}

}  // namespace

// weight [N, K]: boxes of 64 columns and 128 rows. x [M, K]: of 64 columns and a tile's tokens, or half of them where
// pairs of blocks share them. residual, hidden [M, N]: of 64 columns and a tile's tokens. columns [N]. partial [M, N /
// 128]. features: N / 128. chunks: K / 64.
#define KERNEL(name, tokens, paired)                                                                         \
    extern "C" __global__ __launch_bounds__(kProductThreads, 1) void name(                                   \
        const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,                   \
        const __grid_constant__ CUtensorMap residual, const __grid_constant__ CUtensorMap hidden,            \
        const __nv_bfloat16* columns, float* partial, int num_tokens, int features, int chunks) {            \
        product<tokens, paired>({&weight, &x, &residual, &hidden}, columns, partial,                         \
                                {num_tokens, features, chunks});                                             \
    }
#define KERNELS(tokens)                         \
    KERNEL(residual_##tokens, tokens, false)    \
    KERNEL(residual_paired_##tokens, tokens, true)

KERNELS(96)
KERNELS(128)
KERNELS(160)
KERNELS(192)
KERNELS(256)
