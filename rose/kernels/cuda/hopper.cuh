// What the Hopper kernels of this folder share: barriers in shared memory, the copy engine, tensor cores, stores.
//
// The weight is the 64-row operand of the tensor cores and the tokens are the columns, so that 16 tokens cost a
// quarter of 64. Swizzles, descriptors and instructions: PTX ISA 9.0, "Asynchronous warpgroup level matrix
// instructions".

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>

namespace {

constexpr int kChunk = 64;                       // columns of K that arrive together: one 128-byte swizzled row
constexpr int kTileRows = 64;                    // rows of the weight a warpgroup multiplies
constexpr int kTileBytes = kTileRows * kChunk * 2;
constexpr int kHeaderBytes = 1024;               // barriers; what follows stays aligned for the swizzle
constexpr uint64_t kReadOnce = 0x12F0000000000000;   // L2 policy evict_first, as CUTLASS spells it
constexpr uint64_t kReadAgain = 0x1000000000000000;  // evict_normal
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

// Until the phase of that parity is over: 0 for a barrier's first.
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity = 0) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni over;\n"
        "bra.uni again;\n"
        "over:\n}" ::"r"(barrier), "r"(parity) : "memory");
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

// As `fetch`, of one of several tensors behind each other.
__device__ __forceinline__ void fetch_of(
    uint32_t to, const CUtensorMap* map, int column, int row, int tensor, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(tensor), "r"(barrier), "l"(policy)
        : "memory");
}

// As `fetch`, for both blocks of a cluster.
__device__ __forceinline__ void fetch_for_both(
    uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(3)), "l"(policy)
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

// Before a warpgroup's products whose sums it has touched since the last; behind them; until all but kLast groups of
// them are done.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kLast = 0>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLast) : "memory");
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
__device__ __forceinline__ void multiply<48>(float (&d)[24], uint64_t weight, uint64_t x, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
        "}, %24, %25, p, 1, 1, 0, 0;\n}\n"
        : SUMS16(0), SUMS8(16)
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
__device__ __forceinline__ void multiply<96>(float (&d)[48], uint64_t weight, uint64_t x, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
        "}, %48, %49, p, 1, 1, 0, 0;\n}\n"
        : SUMS32(0), SUMS16(32)
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
__device__ __forceinline__ void multiply<160>(float (&d)[80], uint64_t weight, uint64_t x, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,"
        "%72,%73,%74,%75,%76,%77,%78,%79"
        "}, %80, %81, p, 1, 1, 0, 0;\n}\n"
        : SUMS32(0), SUMS32(32), SUMS16(64)
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

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 bytes to device memory, where other blocks may look for them all the while. Also measured faster than a plain
// store, which may linger before it gets to where they look.
__device__ __forceinline__ void publish(__nv_bfloat16* to, const uint4& value) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

// Writes one warpgroup's sums [64 rows of the weight, kTokens] transposed, through `stage`: 128 bytes a token,
// 16-byte pieces permuted by token so that neither side meets a bank twice. kHalves: the rows are 8 of a head's
// first 64 and the 8 that are 64 further in turn, and go to their own places.
template <int kTokens, bool kHalves = false>
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
        const int place = kHalves ? column % 2 * 64 + column / 2 * 8 : column * 8;
        if (token < num_tokens) publish(out + static_cast<int64_t>(token) * n + place, value);
    }
}

constexpr int kStageBytes = 2048;  // of a warp: 16 rows of 64 columns

// Writes a warp's sums [16, kColumns], whose columns are the weight's rows, through `stage`: 128 bytes a row, permuted
// as in `store`. place(row, piece): where 8 columns of one of the first `rows` rows go.
template <int kColumns, class Place>
__device__ __forceinline__ void store_rows(const float (&d)[kColumns / 2], uint32_t stage, int rows, Place place) {
    constexpr int kPieces = kColumns / 8;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int pair = 0; pair < kPieces / 2; ++pair) {
        const int row = lane % 16, piece = pair * 2 + lane / 16;
        const float* at = d + pair * 8;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         stage + row * 128 + ((piece ^ (row % 8)) * 16)),
                     "r"(packed(at[0], at[1])), "r"(packed(at[2], at[3])), "r"(packed(at[4], at[5])),
                     "r"(packed(at[6], at[7]))
                     : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int step = 0; step < kPieces / 2; ++step) {
        const int row = (step * 32 + lane) / kPieces, piece = (step * 32 + lane) % kPieces;
        uint4 value;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(stage + row * 128 + ((piece ^ (row % 8)) * 16)));
        if (row < rows) publish(place(row, piece), value);
    }
}

__device__ __forceinline__ float gated(float gate, float up) {
    return __fdividef(gate * up, 1.0f + __expf(-gate));  // 0 where the exponential is infinite
}

// Like `store`, for rows that are 8 of the gate and the same 8 of up in turn: [kTokens, 32] of silu(gate) * up.
template <int kTokens>
__device__ __forceinline__ void store_gated(
    const float (&d)[kTokens / 2], uint32_t stage, __nv_bfloat16* out, int num_tokens, int width, int barrier = 1) {
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
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
#pragma unroll
    for (int step = 0; step < (kTokens + 31) / 32; ++step) {
        const int token = step * 32 + thread / 4, column = thread % 4;
        if (token >= num_tokens) break;
        uint4 value;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(stage + token * 64 + ((column ^ (token / 2 % 4)) * 16)));
        publish(out + static_cast<int64_t>(token) * width + column * 8, value);
    }
}

}  // namespace
