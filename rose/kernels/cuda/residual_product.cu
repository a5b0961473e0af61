// A product that ends in the residual stream, on Hopper: residual += x weight^T, hidden = factors * residual, and each
// row's sums of squares, so that RMSNorm's division can be left to the next product. bf16 in and out, fp32 between.
//
// Tiles by pingpong.cuh. A warp of its own fetches the residual and stores the results, by way of one area that has room
// for a tile: a tile's end is much shorter than the products of the next, so more slots are worth more than a second area.

#include "pingpong.cuh"

namespace {

struct Maps {
    const CUtensorMap *weight, *x, *residual, *hidden;
};

// Beside operands: a tile on its way in or out, sums of squares.
template <int kTokens>
constexpr int kTileHalf = kTokens * kTileRows * 2;  // of the area, in bytes: 64 columns of a tile
template <int kTokens>
constexpr int kSumBytes = kReaders * kTokens * 4;

template <int kTokens>
struct ProductMemory : Operands<kTokens, 2 * kTileHalf<kTokens> + kSumBytes<kTokens>, 5> {
    static constexpr int kHalfBytes = kTileHalf<kTokens>;
    static_assert(kHalfBytes % 1024 == 0, "alignment");

    __device__ uint32_t area() const { return this->own(); }
    __device__ uint32_t sums() const { return area() + 2 * kHalfBytes; }
    // Of a tile of that warpgroup: its residual has come; the new one and the sums have been read, so that hidden may take
    // their place. Each warpgroup has its own: a wait that is two phases early would be over at once.
    __device__ uint32_t has_come(int group) const { return this->own_barrier(group); }
    __device__ uint32_t is_read(int group) const { return this->own_barrier(2 + group); }
    // Told by all warps of the tile's warpgroup, twice a tile: the new residual and the sums, then hidden are there.
    __device__ uint32_t written() const { return this->own_barrier(4); }

    __device__ __forceinline__ void start_all() const {
        this->start([this] {
            for (int group = 0; group < 2; ++group) start_barrier(has_come(group), 1), start_barrier(is_read(group), 1);
            start_barrier(written(), kReaders);
        });
    }
};

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
        if (leads) store_tile(shared.area(), shared.kHalfBytes, maps.residual, feature, row);
        __syncwarp();
        if (leads) arrive(shared.is_read(group));
        wait_for(shared.written(), 1);
        if (leads) store_tile(shared.area(), shared.kHalfBytes, maps.hidden, feature, row);
        __syncwarp();
    }
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

template <int kTokens>
__device__ __forceinline__ void compute(const ProductMemory<kTokens>& shared, const __nv_bfloat16* columns,
                                        const Sizes& sizes) {
    const int group = warpgroup(), warp = threadIdx.x % 128 / 32;
    columns += warp * 16 + threadIdx.x % 32 / 4;
    float sums[2][kTokens / 2];
    uint32_t parity = 0;
    const auto multiply_chunk = [&](uint64_t weight, uint64_t rows, int chunk) {
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)  // 16 columns are 32 bytes: 2 in a descriptor's units
#pragma unroll
            for (int half = 0; half < 2; ++half)
                multiply<kTokens>(sums[half], weight + half * (kTileBytes / 16) + step * 2, rows + step * 2,
                                  chunk + step > 0);
    };
    const auto finish = [&](int tile) {
        wait_for(shared.has_come(group), parity);
        add_residual<kTokens>(sums, shared.area(), shared.sums() + warp * kTokens * 4);
        tell_written(shared.written());
        const __nv_bfloat16* column = columns + sizes.first_feature(tile);
        const float factors[2][2] = {{__bfloat162float(column[0]), __bfloat162float(column[8])},
                                     {__bfloat162float(column[64]), __bfloat162float(column[72])}};
        wait_for(shared.is_read(group), parity);
        parity ^= 1;
        write_hidden<kTokens>(sums, shared.area(), factors);
        tell_written(shared.written());
    };
    take_turns<kTokens>(shared.weights(), shared.rows(), sizes, multiply_chunk, finish);
}

template <int kTokens>
__device__ __forceinline__ void product(const Maps& maps, const __nv_bfloat16* columns, float* partial,
                                        const Sizes& sizes) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const ProductMemory<kTokens> shared{{shared_address(memory)}};
    shared.start_all();
    divide_product([&] { compute<kTokens>(shared, columns, sizes); },
                   [&] { fetch_all<kTokens>(shared.weights(), shared.rows(), maps.weight, maps.x, sizes); },
                   [&] { exchange_all<kTokens>(shared, maps, sizes, partial); });
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
