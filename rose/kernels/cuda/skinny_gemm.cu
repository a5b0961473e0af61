// Products of few rows on Hopper: out[split] = x[:, part] @ weight[:, part]^T, bf16 in, fp32 sums, bf16 out.
//
// A block owns a tile of the weight so small that all of it fits into shared memory at once: one thread asks the
// copy engine for the whole of it before the wait for the kernel in front (programmatic dependent launch), which
// hides launch, ramp-up and device memory behind that kernel. Only x and the stores come after. Each 64 columns
// of K report to a barrier of their own and the tensor cores follow; x goes through a ring where it does not fit.
// The two blocks of a cluster have the same part of x: each fetches half of it for both.

#include "hopper.cuh"

namespace {

// What all threads of a block know. Shared memory: barriers, then x [stages][kTokens][64], then the weight
// [groups][chunks][64][64]; columns of 64 are swizzled rows. Every chunk of K has barriers of its own, so that
// none has a second phase: `ready` when its weight and x are there, `taken` when its x may be overwritten.
template <int kGroups, int kTokens>
struct Block {
    static constexpr int kXBytes = kTokens * kChunk * 2;
    uint32_t shared;
    int chunks, stages, cluster;

    __device__ uint32_t ready(int chunk) const { return shared + chunk * 8; }
    __device__ uint32_t taken(int chunk) const { return shared + kHeaderBytes / 2 + chunk * 8; }
    __device__ uint32_t x(int stage) const { return shared + kHeaderBytes + stage * kXBytes; }
    __device__ uint32_t weight(int group, int chunk) const {
        return x(stages) + (group * chunks + chunk) * kTileBytes;
    }
};

// Starts the barriers; each `ready` already counts the bytes it will see.
template <int kGroups, int kTokens>
__device__ __forceinline__ void start_barriers(const Block<kGroups, kTokens>& block) {
#pragma unroll 1
    for (int chunk = 0; chunk < block.chunks; ++chunk) {
        start_barrier(block.ready(chunk), 1);
        if (chunk + block.stages < block.chunks) start_barrier(block.taken(chunk), kGroups * 4 * block.cluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

template <int kGroups, int kTokens, bool kGated>
__device__ __forceinline__ void request_weight(const Block<kGroups, kTokens>& block, const CUtensorMap* map) {
    const int first_column = blockIdx.y * block.chunks * kChunk, first_row = blockIdx.x * kGroups * kTileRows;
#pragma unroll 1
    for (int chunk = 0; chunk < block.chunks; ++chunk) {
        expect_bytes(block.ready(chunk), block.kXBytes + kGroups * kTileBytes);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const uint32_t to = block.weight(group, chunk);
            const int column = first_column + chunk * kChunk, row = first_row + group * kTileRows;
            if (kGated)
                fetch_gated(to, map, column, row, block.ready(chunk));
            else
                fetch(to, map, column, row, block.ready(chunk), kReadOnce);
        }
    }
}

// Waits for the kernel in front, with all that the first request needs already known. A cluster is 1 or 2 blocks.
template <int kGroups, int kTokens>
__device__ __forceinline__ void request_x(const Block<kGroups, kTokens>& block, const CUtensorMap* map) {
    const bool alone = block.cluster == 1;
    const int row = alone ? 0 : cluster_rank() * (kTokens / 2), stop = (blockIdx.y + 1) * block.chunks * kChunk;
    uint32_t to = block.x(0) + row * kChunk * 2, ready = block.ready(0), taken = block.taken(0) - block.stages * 8;
    int column = stop - block.chunks * kChunk, before_reuse = block.stages, stage = 0;
    asm volatile("griddepcontrol.wait;" : "+r"(to), "+r"(ready), "+r"(taken), "+r"(column) : "r"(stop) : "memory");
#pragma unroll 1
    for (; column < stop; column += kChunk, ready += 8, taken += 8) {
        if (--before_reuse < 0) wait_for(taken);
        if (alone)
            fetch(to, map, column, row, ready, kReadOften);
        else
            fetch_for_both(to, map, column, row, ready, kReadOften);
        to += block.kXBytes;
        if (++stage == block.stages) stage = 0, to -= block.stages * block.kXBytes;
    }
}

// One warpgroup's sums over the block's part of K.
template <int kGroups, int kTokens>
__device__ __forceinline__ void accumulate(
    const Block<kGroups, kTokens>& block, int group, float (&sums)[kTokens / 2]) {
    const uint64_t first_x = descriptor(block.x(0));
    uint64_t x = first_x, weight = descriptor(block.weight(group, 0));
    int stage = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < block.chunks; ++chunk) {
        wait_for(block.ready(chunk));
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)  // 16 columns are 32 bytes: 2 in a descriptor's units
            multiply<kTokens>(sums, weight + step * 2, x + step * 2, chunk + step > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        weight += kTileBytes / 16;
        x += block.kXBytes / 16;
        if (++stage == block.stages) stage = 0, x = first_x;
        const int before = chunk - 1;  // its x has been read once at most this chunk's products are under way
        if (before >= 0 && before + block.stages < block.chunks) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (threadIdx.x % 32 < block.cluster) release(block.taken(before), threadIdx.x % 32);
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

template <int kGroups, int kTokens, bool kGated>
__device__ __forceinline__ void product(const CUtensorMap* weight_map, const CUtensorMap* x_map, __nv_bfloat16* out,
                                        int num_tokens, int n, int chunks, int stages) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Block<kGroups, kTokens> block{shared_address(memory), chunks, stages, static_cast<int>(cluster_size())};
    // From lane 0, so that the compiler knows it is the same in a whole warp and keeps addresses in uniform registers.
    const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    const bool requests = threadIdx.x == kGroups * 128;
    if (requests) {
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(x_map) : "memory");
        start_barriers(block);
        request_weight<kGroups, kTokens, kGated>(block, weight_map);
    }
    __syncthreads();
    if (block.cluster > 1) {
        cluster_arrive();
        cluster_wait();  // until the barriers of all its blocks exist
    }
    if (requests) request_x(block, x_map);
    if (group < kGroups) {
        float sums[kTokens / 2];
        accumulate(block, kGroups == 1 ? 0 : group, sums);
        if (kGated) {
            store_gated<kTokens>(sums, block.weight(0, 0), out + blockIdx.x * (kTileRows / 2), num_tokens, n / 2);
        } else {
            const int column = (blockIdx.x * kGroups + group) * kTileRows;
            out += static_cast<int64_t>(blockIdx.y) * num_tokens * n + column;
            store<kTokens>(sums, block.weight(group, 0), out, num_tokens, n, group + 1);
        }
    }
    if (block.cluster > 1 && stages < chunks) {  // others may still report to this block's barriers
        cluster_arrive();
        cluster_wait();
    }
}

}  // namespace

#define KERNEL(name, groups, tokens, gated)                                                                 \
    extern "C" __global__ __launch_bounds__((groups) * 128 + 32, 1) void name(                               \
        const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map,           \
        __nv_bfloat16* out, int num_tokens, int n, int chunks, int stages) {                                 \
        product<groups, tokens, gated>(&weight_map, &x_map, out, num_tokens, n, chunks, stages);             \
    }
#define KERNELS(tokens)                            \
    KERNEL(skinny_1x64_##tokens, 1, tokens, false) \
    KERNEL(skinny_2x64_##tokens, 2, tokens, false) \
    KERNEL(skinny_3x64_##tokens, 3, tokens, false) \
    KERNEL(skinny_gated_##tokens, 1, tokens, true)

KERNELS(16)
KERNELS(32)
KERNELS(64)
KERNELS(128)
KERNEL(skinny_1x64_256, 1, 256, false)
