// Products of few rows on Hopper: out[split] = x[:, part] @ weight[:, part]^T, bf16 in, fp32 sums, bf16 out.
//
// A block owns a tile of the weight so small that all of it fits into shared memory at once: one thread asks the
// copy engine for the whole of it before the wait for the kernel in front (programmatic dependent launch), which
// hides launch, ramp-up and device memory behind that kernel. Only x and the stores come after. Each 64 columns
// of K report to a barrier of their own and the tensor cores follow; x goes through a ring where it does not fit.
// The two blocks of a cluster have the same part of x: each fetches half of it for both.
//
// The weight is the 64-row operand and the tokens are the columns, so that 16 tokens cost a quarter of 64.
// Swizzles, descriptors and instructions: PTX ISA 9.0, "Asynchronous warpgroup level matrix instructions".

#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

namespace {

constexpr int kChunk = 64;                       // columns of K in a barrier's care: one 128-byte swizzled row
constexpr int kTileRows = 64;                    // rows of the weight a warpgroup multiplies
constexpr int kTileBytes = kTileRows * kChunk * 2;
constexpr int kHeaderBytes = 1024;               // barriers; what follows stays aligned for the swizzle
constexpr uint64_t kReadOnce = 0x12F0000000000000;   // L2 policy evict_first, as CUTLASS spells it
constexpr uint64_t kReadOften = 0x14F0000000000000;  // evict_last

// Copied through an instruction that the compiler cannot see into: it would compute the address anew in each loop.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    uint32_t address;
    asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(pointer))));
    return address;
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

__device__ __forceinline__ void start_barrier(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the first phase of a barrier is over; none here has a second.
__device__ __forceinline__ void wait_for(uint32_t barrier) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
        "@done bra.uni over;\n"
        "bra.uni again;\n"
        "over:\n}" ::"r"(barrier) : "memory");
}

// Tells block `rank` of the cluster that a warp is done with what the barrier guards.
__device__ __forceinline__ void release(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void fetch(
    uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

// The same for both blocks of a cluster.
__device__ __forceinline__ void fetch_for_both(
    uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(3)), "l"(kReadOften)
        : "memory");
}

// A K-major operand, 128-byte swizzle: rows of 128 bytes, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return ((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// A gated weight [2 I, K] seen as [I / 8][2][8][K]: 8 rows of the gate, then the same 8 of up, and so on.
__device__ __forceinline__ void fetch_gated(
    uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(0), "r"(row / 16), "r"(barrier), "l"(kReadOnce)
        : "memory");
}

// d = weight [64, 16] @ x [kTokens, 16]^T, added to d if `add`.
template <int kTokens>
__device__ __forceinline__ void multiply(float (&d)[kTokens / 2], uint64_t weight, uint64_t x, int add);

#define SUMS4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define SUMS8(i) SUMS4(i), SUMS4((i) + 4)
#define SUMS16(i) SUMS8(i), SUMS8((i) + 8)
#define SUMS32(i) SUMS16(i), SUMS16((i) + 16)

template <>
__device__ __forceinline__ void multiply<16>(float (&d)[8], uint64_t weight, uint64_t x, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7"
        "}, %8, %9, p, 1, 1, 0, 0;\n}\n"
        : SUMS8(0)
        : "l"(weight), "l"(x), "r"(add));
}

template <>
__device__ __forceinline__ void multiply<32>(float (&d)[16], uint64_t weight, uint64_t x, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
        "}, %16, %17, p, 1, 1, 0, 0;\n}\n"
        : SUMS16(0)
        : "l"(weight), "l"(x), "r"(add));
}

template <>
__device__ __forceinline__ void multiply<64>(float (&d)[32], uint64_t weight, uint64_t x, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        : SUMS32(0)
        : "l"(weight), "l"(x), "r"(add));
}

template <>
__device__ __forceinline__ void multiply<128>(float (&d)[64], uint64_t weight, uint64_t x, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        : SUMS32(0), SUMS32(32)
        : "l"(weight), "l"(x), "r"(add));
}

template <>
__device__ __forceinline__ void multiply<256>(float (&d)[128], uint64_t weight, uint64_t x, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,"
        "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,"
        "%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,"
        "%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, p, 1, 1, 0, 0;\n}\n"
        : SUMS32(0), SUMS32(32), SUMS32(64), SUMS32(96)
        : "l"(weight), "l"(x), "r"(add));
}

__device__ __forceinline__ uint32_t packed(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

// Writes one warpgroup's sums [64 rows of the weight, kTokens] transposed, through `stage`: 128 bytes a token,
// 16-byte pieces permuted by token so that neither side meets a bank twice.
template <int kTokens>
__device__ __forceinline__ void store(
    const float (&d)[kTokens / 2], uint32_t stage, __nv_bfloat16* out, int num_tokens, int n, int barrier) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int piece = warp * 2 + (lane / 8) % 2;
#pragma unroll
    for (int pair = 0; pair < kTokens / 16; ++pair) {
        const int token = pair * 16 + lane / 16 * 8 + lane % 8;
        const uint32_t to = stage + token * 128 + ((piece ^ (token % 8)) * 16);
        const float* at = d + pair * 8;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                     "r"(packed(at[0], at[1])), "r"(packed(at[2], at[3])), "r"(packed(at[4], at[5])),
                     "r"(packed(at[6], at[7]))
                     : "memory");
    }
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
        const int token = step * 16 + thread / 8, column = thread % 8;
        uint4 value;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(stage + token * 128 + ((column ^ (token % 8)) * 16)));
        if (token < num_tokens)
            *reinterpret_cast<uint4*>(out + static_cast<int64_t>(token) * n + column * 8) = value;
    }
}

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

// Like `store`, for rows that are 8 of the gate and the same 8 of up in turn: [kTokens, 32] of silu(gate) * up.
template <int kTokens>
__device__ __forceinline__ void store_gated(
    const float (&d)[kTokens / 2], uint32_t stage, __nv_bfloat16* out, int num_tokens, int width) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (int pair = 0; pair < kTokens / 16; ++pair) {
        const int token = pair * 16 + lane % 16;
        const uint32_t to = stage + token * 64 + ((warp ^ (token / 2 % 4)) * 16);
        const float* at = d + pair * 8;
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                     "r"(packed(gated(at[0], at[2]), gated(at[1], at[3]))),
                     "r"(packed(gated(at[4], at[6]), gated(at[5], at[7])))
                     : "memory");
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll
    for (int step = 0; step < (kTokens + 31) / 32; ++step) {
        const int token = step * 32 + thread / 4, column = thread % 4;
        if (token >= num_tokens) break;
        uint4 value;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(stage + token * 64 + ((column ^ (token / 2 % 4)) * 16)));
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(token) * width + column * 8) = value;
    }
}

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
            fetch_for_both(to, map, column, row, ready);
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
