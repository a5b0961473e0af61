// QKV of many rows, on Hopper: x weight^T, its query and key heads normed and rotated. bf16 in and out, fp32 between.
//
// Tiles of 128 tokens and one head, by pingpong.cuh. Here tokens are the tensor cores' 64 rows, so that a head of a token
// lies in the four lanes of a quad: its sum of squares takes two shuffles, and a rotated pair, two adjacent columns, is in
// one thread. Angles come through shared memory into the place that the tile's results leave from; a warp reads those of
// its own 16 tokens before it writes there.

#include "pingpong.cuh"

namespace {

constexpr int kHead = kFeatures, kRotaryTokens = 2 * kTileRows;
constexpr int kHalfBytes = kRotaryTokens * kTileRows * 2, kAreaBytes = 2 * kHalfBytes;  // 64 columns, a tile
constexpr float kHeadEps = 1e-6f;

struct RotaryMemory : Operands<kRotaryTokens, 2 * kAreaBytes, 4> {
    // Of a warpgroup: its results, and before them angles.
    __device__ uint32_t area(int group) const { return own() + group * kAreaBytes; }
    // The area is free, and has the angles, if the tile's are needed; its warps have written to it.
    __device__ uint32_t is_ready(int group) const { return own_barrier(group); }
    __device__ uint32_t written(int group) const { return own_barrier(2 + group); }

    __device__ __forceinline__ void start_all() const {
        start([this] {
            for (int group = 0; group < 2; ++group) start_barrier(is_ready(group), 1), start_barrier(written(group), kReaders);
        });
    }
};

// By one thread: angles into areas that are free, and results out of them, one tile after the other.
__device__ __forceinline__ void exchange_all(const RotaryMemory& shared, const CUtensorMap* angles, const CUtensorMap* out,
                                             const Sizes& sizes, int rotated) {
    const int tiles = sizes.tiles<kRotaryTokens>(), blocks = gridDim.x;
    prefetch_map(angles), prefetch_map(out);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const auto make_ready = [&](int tile, int group) {
        if (tile % sizes.features >= rotated) {
            arrive(shared.is_ready(group));
            return;
        }
        expect_bytes(shared.is_ready(group), kAreaBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            fetch(shared.area(group) + half * kHalfBytes, angles, half * kTileRows, sizes.first_token<kRotaryTokens>(tile),
                  shared.is_ready(group), kReadOften);
    };
    if (blockIdx.x < tiles) make_ready(blockIdx.x, 0);
    uint32_t turn = 0;  // a group's parity changes with every second
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += blocks, ++turn) {
        const int group = turn & 1;
        if (tile + blocks < tiles) make_ready(tile + blocks, group ^ 1);  // what was there has been read a turn ago
        wait_for(shared.written(group), turn >> 1 & 1);
        store_tile(shared.area(group), kHalfBytes, out, sizes.first_feature(tile), sizes.first_token<kRotaryTokens>(tile));
    }
}

// Of a warp's 16 tokens, four 8x8 pieces: both of a thread's rows, at columns of 8 and the next 8.
__device__ __forceinline__ void store_pieces(uint32_t area, int pair, const uint32_t (&pieces)[4]) {
    const int row = threadIdx.x % 16, piece = pair % 4 * 2 + threadIdx.x % 32 / 16;
    const uint32_t to = area + pair / 4 * kHalfBytes + row * 128 + ((piece ^ (row % 8)) * 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pieces[0]),
                 "r"(pieces[1]), "r"(pieces[2]), "r"(pieces[3])
                 : "memory");
}

// A token's 16 cosines and sines of this lane's pairs, one of each piece of 8 columns, in the order that
// rotary_product.py gives them: of each half of the head 8 for every lane of a quad.
__device__ __forceinline__ void load_angles(uint32_t area, int row, uint4 (&angles)[4]) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const int piece = threadIdx.x % 4 * 2 + part % 2;
        const uint32_t from = area + part / 2 * kHalfBytes + row * 128 + ((piece ^ (row % 8)) * 16);
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(angles[part].x), "=r"(angles[part].y), "=r"(angles[part].z), "=r"(angles[part].w)
                     : "r"(from)
                     : "memory");
    }
}

__device__ __forceinline__ float2 cosine_and_sine(const uint4& four, int index) {
    const uint32_t bits = index == 0 ? four.x : index == 1 ? four.y : index == 2 ? four.z : four.w;
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// 1 / root mean square of a token's head times its scale, of sums before they are scaled. row: a thread's first or second.
__device__ __forceinline__ float norm_factor(const float (&sums)[kHead / 2], int row, float scale) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kHead / 8; ++i) {
        const float first = sums[i * 4 + row * 2], second = sums[i * 4 + row * 2 + 1];
        total += first * first + second * second;
    }
    total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
    total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
    return rsqrtf(total * scale * scale * (1.0f / kHead) + kHeadEps) * scale;
}

// A warp's sums of 16 tokens, normed and rotated, to the area, where their angles are. weights: of a thread's columns.
__device__ __forceinline__ void rotate(const float (&sums)[kHead / 2], uint32_t area, const uint32_t (&weights)[kHead / 8],
                                       const float (&scales)[2]) {
    const int row = threadIdx.x % 32 / 4;
    uint4 angles[2][4];
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        load_angles(area, row + i * 8, angles[i]);
        factors[i] = norm_factor(sums, i, scales[i]);
    }
    __syncwarp();  // all of the warp's have been read
#pragma unroll
    for (int pair = 0; pair < kHead / 16; ++pair) {
        uint32_t pieces[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int at = pair * 2 + k / 2, i = k % 2;
            const float2 turn = cosine_and_sine(angles[i][at / 4], at % 4);
            const float first = sums[at * 4 + i * 2] * __uint_as_float(weights[at] << 16) * factors[i];
            const float second = sums[at * 4 + i * 2 + 1] * __uint_as_float(weights[at] & 0xFFFF0000u) * factors[i];
            pieces[k] = packed(first * turn.x - second * turn.y, first * turn.y + second * turn.x);
        }
        store_pieces(area, pair, pieces);
    }
}

// The same of a value head: scaled.
__device__ __forceinline__ void keep(const float (&sums)[kHead / 2], uint32_t area, const float (&scales)[2]) {
#pragma unroll
    for (int pair = 0; pair < kHead / 16; ++pair) {
        uint32_t pieces[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float* mine = sums + (pair * 2 + k / 2) * 4 + k % 2 * 2;
            pieces[k] = packed(mine[0] * scales[k % 2], mine[1] * scales[k % 2]);
        }
        store_pieces(area, pair, pieces);
    }
}

__device__ __forceinline__ void compute(const RotaryMemory& shared, const __nv_bfloat16* columns, const float* scale,
                                        const Sizes& sizes, int rotated) {
    const int group = warpgroup(), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    float sums[2][kHead / 2];
    uint32_t parity = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");  // the kernel in front may make the scales
    const auto multiply_chunk = [&](uint64_t weight, uint64_t rows, int chunk) {
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)  // 16 columns are 32 bytes: 2 in a descriptor's units
#pragma unroll
            for (int half = 0; half < 2; ++half)
                multiply<kHead>(sums[half], rows + half * (kTileBytes / 16) + step * 2, weight + step * 2, chunk + step > 0);
    };
    const auto finish = [&](int tile) {
        const bool rotates = tile % sizes.features < rotated;
        uint32_t weights[kHead / 8];
        const uint32_t* mine = reinterpret_cast<const uint32_t*>(columns + sizes.first_feature(tile)) + lane % 4;
#pragma unroll
        for (int i = 0; i < kHead / 8; ++i) weights[i] = rotates ? mine[i * 4] : 0;
        wait_for(shared.is_ready(group), parity);
        parity ^= 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = half * kTileRows + warp * 16;
            const uint32_t area = shared.area(group) + row * 128;
            float scales[2] = {1, 1};
            if (scale != nullptr)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = sizes.first_token<kRotaryTokens>(tile) + row + lane / 4 + i * 8;
                    scales[i] = scale[min(token, sizes.num_tokens - 1)];
                }
            if (rotates)
                rotate(sums[half], area, weights, scales);
            else
                keep(sums[half], area, scales);
        }
        tell_written(shared.written(group));
    };
    take_turns<kRotaryTokens>(shared.weights(), shared.rows(), sizes, multiply_chunk, finish);
}

}  // namespace

// weight [N, K]: boxes of 64 columns and 128 rows. x [M, K]: of 64 columns and 64 tokens. angles f16[M, 128], out [M, N]: of
// 64 columns and 128 tokens. columns [N]: the norms' weights. scale f32[M] or null. features: N / 128. chunks: K / 64.
// rotated: heads, the first ones.
extern "C" __global__ __launch_bounds__(kProductThreads, 1) void rotary_128(
    const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
    const __grid_constant__ CUtensorMap angles, const __grid_constant__ CUtensorMap out, const __nv_bfloat16* columns,
    const float* scale, int num_tokens, int features, int chunks, int rotated) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const RotaryMemory shared{{shared_address(memory)}};
    const Sizes sizes{num_tokens, features, chunks};
    shared.start_all();
    divide_product([&] { compute(shared, columns, scale, sizes, rotated); },
                   [&] { fetch_all<kRotaryTokens>(shared.weights(), shared.rows(), &weight, &x, sizes); },
                   [&] {
                       if (threadIdx.x % 32 == 0) exchange_all(shared, &angles, &out, sizes, rotated);
                   });
}
