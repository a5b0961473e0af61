// What the blocks of a kernel that goes through all layers say to each other and to themselves: waiting, shared memory.

#pragma once

#include "hopper.cuh"

namespace {

constexpr int kMaxTokens = 128;
constexpr int kParts = 4, kGroups = 8;  // counters of a layer: those of a part are for as many splits of K
constexpr int kComputing = 256, kWarps = kComputing / 32;  // threads and warps of a block that compute
constexpr int kWeightPitch = (kMaxTokens + 8) * 2;  // bytes: fragments of eight rows are in different banks
constexpr int kAttentionScratch = 16 * kWeightPitch + kWarps * 16 * 4;
// Two bf16 or a float that no rounding gives: a NaN that is not the usual one.
constexpr uint32_t kNothing = 0xFFFFFFFF;

__device__ __forceinline__ int query_groups(int num_tokens) { return (num_tokens + 15) / 16; }

// From lane 0, so that the compiler knows it is the same in a whole warp and keeps addresses in uniform registers.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0); }

__device__ __forceinline__ void sync_warpgroup() {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + static_cast<int>(threadIdx.x / 128)) : "memory");
}

// All that compute.
__device__ __forceinline__ void sync_block() { asm volatile("bar.sync 3, %0;" ::"n"(kComputing) : "memory"); }

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// counters: [layers][kParts][kGroups][8], zeros before; the first of each eight counts.
__device__ __forceinline__ uint32_t* counter(uint32_t* counters, int layer, int part, int group = 0) {
    return counters + ((layer * kParts + part) * kGroups + group) * 8;
}

__device__ __forceinline__ uint32_t counted(const uint32_t* counter) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// Tells other blocks that what this one wrote to device memory is there. Also where its own warps wait for each other:
// behind it shared memory is free for other uses.
__device__ __forceinline__ void count(uint32_t* counter) {
    sync_block();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Four bf16 that another block may be writing.
__device__ __forceinline__ uint2 look(const __nv_bfloat16* from) {
    uint2 value;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_shared(uint32_t to, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void store_shared4(uint32_t to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void store_word(uint32_t to, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_word(uint32_t from) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ float load_shared(uint32_t from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ float4 load_shared4(uint32_t from) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ void add(const uint2& row, float (&to)[4]) {
    to[0] += __uint_as_float(row.x << 16), to[1] += __uint_as_float(row.x & 0xFFFF0000u);
    to[2] += __uint_as_float(row.y << 16), to[3] += __uint_as_float(row.y & 0xFFFF0000u);
}

__device__ __forceinline__ void store_row(__nv_bfloat16* to, const float (&row)[4]) {
    *reinterpret_cast<uint2*>(to) = make_uint2(packed(row[0], row[1]), packed(row[2], row[3]));
}

// scratch: 32 bytes that nobody else has used since the last sync_block.
__device__ __forceinline__ float sum_of_block(float value, uint32_t scratch) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
    if (threadIdx.x % 32 == 0)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(scratch + threadIdx.x / 8), "f"(value) : "memory");
    sync_block();
    const float4 low = load_shared4(scratch), high = load_shared4(scratch + 16);
    return (low.x + low.y) + (low.z + low.w) + ((high.x + high.y) + (high.z + high.w));
}

// 16 bytes that another block may be writing; left as they are where there is no such row.
__device__ __forceinline__ void look(uint4& value, const __nv_bfloat16* from, bool exists) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
        : "l"(from), "r"(static_cast<int>(exists))
        : "memory");
}

__device__ __forceinline__ void look(uint32_t& value, const __nv_bfloat16* from, bool exists) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.relaxed.gpu.global.u32 %0, [%1];\n}"
                 : "+r"(value)
                 : "l"(from), "r"(static_cast<int>(exists))
                 : "memory");
}

// The sums of squares of both halves of a token's head, likewise.
__device__ __forceinline__ void look(float2& value, const float2* from, bool exists) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n}"
                 : "+f"(value.x), "+f"(value.y)
                 : "l"(from), "r"(static_cast<int>(exists))
                 : "memory");
}

__device__ __forceinline__ bool is_there(const uint4& value) {
    return value.x != kNothing && value.y != kNothing && value.z != kNothing && value.w != kNothing;
}

__device__ __forceinline__ bool is_there(const float2& value) {
    return __float_as_uint(value.x) != kNothing && __float_as_uint(value.y) != kNothing;
}

}  // namespace
