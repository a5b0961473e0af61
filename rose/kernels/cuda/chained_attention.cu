// Ragged attention on Hopper: out = softmax(q k^T * scale) v of each sequence, bf16 in and out, sums in fp32.
//
// A work is 128 queries of a head, against all keys of their sequence in tiles of 128. Each block has a list of works
// and goes through their tiles as through one: the scores of the next work's first tile are made beside the last
// product of this one's weights and values, and keys and values of works to come are fetched all the while. So short
// sequences, of a few tiles each, keep the tensor cores as busy as long ones do.
//
// Where two heads have the same keys, two blocks, a cluster, go through the same tiles of a head each, and each fetches
// half of every tile for both.
//
// Two warpgroups have 64 queries each, a third fetches. As FlashAttention-3 (arXiv 2407.08608, section 3.2), a
// warpgroup's weights of one tile are computed while the product of the tile before runs.

#include <type_traits>

#include "chained_fetch.cuh"

namespace {

constexpr int kAttentionThreads = kComputing + 128, kComputingRegisters = 232, kFetchingRegisters = 40;
// Weights are powers of two under a maximum that may be too low by so many: values need not be scaled at each new one.
constexpr float kSlack = 8;

// d [64, kDim] += a [64, 16] @ b [16, kDim], or without what d held. a: a warp's 16 rows in registers. b: rows of 128
// bytes in shared memory, halves of the dimensions kHalfBytes apart.
__device__ __forceinline__ void mix(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}\n"
        : SUMS32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void mix(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}\n"
        : SUMS32(0), SUMS32(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// As `descriptor`, of an operand whose rows are K: 64 columns are kHalfBytes from the next.
__device__ __forceinline__ uint64_t value_descriptor(uint32_t address) {
    return ((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(kHalfBytes / 16) << 16) | (64ull << 32) | (1ull << 62);
}

// As power_of_two, but computed where it stands: before the wait for the product that runs beside it.
__device__ __forceinline__ float power_of_two_here(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What a thread has of its two queries, lane / 4 of its warp's 16 and 8 further: scores (S), weights (P), mixed values
// (O), totals (sums of P), and the level that weights are powers of two under (a maximum that may lag behind).
template <int kDim>
struct Chain {
    float scores[kKeys / 2] = {}, mixed[kDim / 2] = {};
    uint32_t weights[kKeys / 16][4];
    float level[2], totals[2] = {}, done[2];  // done: totals of the work before

    // Hides a tile's keys from the one at `keys` on from the first query, and from `more` keys later from the second: 8
    // where a query sees no keys behind its own, else 0.
    __device__ __forceinline__ void hide(int keys, int more) {
        const int left = keys - threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i)
            if (i / 4 * 8 + i % 2 >= left + (i / 2 % 2) * more) scores[i] = -INFINITY;
    }

    // Scores become weights. Returns whether `factors` must scale what is mixed already. rows: of the sequence from this
    // thread's first query on. Queries past its end must not raise the level, whatever their scores are.
    template <bool kFirst>
    __device__ __forceinline__ bool weigh(float scale, int rows, float (&factors)[2]) {
        float most[2];
        bool higher = false;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            most[row] = scores[row * 2];
#pragma unroll
            for (int i = 1; i < kKeys / 4; ++i)
                most[row] = fmaxf(most[row], scores[i / 2 * 4 + row * 2 + i % 2]);
            most[row] = fmaxf(most[row], __shfl_xor_sync(0xFFFFFFFF, most[row], 1));
            most[row] = fmaxf(most[row], __shfl_xor_sync(0xFFFFFFFF, most[row], 2)) * scale;
            if (!kFirst) higher |= row * 8 < rows && most[row] > level[row] + kSlack;
        }
        const bool scales = !kFirst && __any_sync(0xFFFFFFFF, higher);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            if (kFirst) {
                done[row] = totals[row], totals[row] = 0, level[row] = most[row];
            } else if (scales) {
                const float next = fmaxf(level[row], most[row]);
                factors[row] = power_of_two_here(level[row] - next);
                totals[row] *= factors[row], level[row] = next;
            }
        }
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
            scores[i] = power_of_two_here(scores[i] * scale - level[i / 2 % 2]);
            totals[i / 2 % 2] += scores[i];
        }
        return scales;
    }

    __device__ __forceinline__ void pack() {
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = packed(scores[i * 2], scores[i * 2 + 1]);
    }

    __device__ __forceinline__ void scale_mixed(const float (&factors)[2]) {
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) mixed[i] *= factors[i / 2 % 2];
    }

    __device__ __forceinline__ void request_scores(uint32_t queries, uint32_t keys) {
        const uint64_t left = descriptor(queries), right = descriptor(keys);
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {  // 16 dimensions are 32 bytes: 2 in a descriptor's units
            const int at = step / 4 * (kHalfBytes / 16) + step % 4 * 2;
            multiply<kKeys>(scores, left + at, right + at, step > 0);
        }
    }

    __device__ __forceinline__ void request_mixed(uint32_t values, bool add) {
        const uint64_t right = value_descriptor(values);
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step)  // 16 keys are 2048 bytes
            mix(mixed, weights[step], right + step * 128, add || step > 0);
    }

    // What is mixed over `sums` of weights: by way of `stage`, this warp's rows of the work's queries, to up to `rows`
    // rows from `out` on.
    __device__ __forceinline__ void write(const float (&sums)[2], uint32_t stage, __nv_bfloat16* out, int64_t stride,
                                          int rows) const {
        const int lane = threadIdx.x % 32;
        float by[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float total = sums[row];
            total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
            total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
            by[row] = __fdividef(1.0f, total);
        }
#pragma unroll
        for (int pair = 0; pair < kDim / 16; ++pair) {
            const int row = lane % 16, piece = pair % 4 * 2 + lane / 16;
            const float* at = mixed + pair * 8;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             stage + pair / 4 * kHalfBytes + row * 128 + ((piece ^ (row % 8)) * 16)),
                         "r"(packed(at[0] * by[0], at[1] * by[0])), "r"(packed(at[2] * by[1], at[3] * by[1])),
                         "r"(packed(at[4] * by[0], at[5] * by[0])), "r"(packed(at[6] * by[1], at[7] * by[1]))
                         : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            constexpr int kPieces = kDim / 8, kRowsAtOnce = 32 / kPieces;
            const int row = step * kRowsAtOnce + lane / kPieces, piece = lane % kPieces;
            const float4 four = load_shared4(stage + piece / 8 * kHalfBytes + row * 128 + ((piece ^ row) % 8 * 16));
            if (row < rows) *reinterpret_cast<float4*>(out + row * stride + piece * 8) = four;
        }
    }
};

// At the beginning of a work warpgroups ask for their products in turns, so that one's weights are computed while the
// other's products run. Turns at every tile are slower, and so are none (log.md).
__device__ __forceinline__ void await_turn() {
    asm volatile("bar.sync %0, %1;" ::"r"(4 + static_cast<int>(threadIdx.x / 128)), "n"(kComputing) : "memory");
}

__device__ __forceinline__ void pass_turn() {
    asm volatile("bar.arrive %0, %1;" ::"r"(5 - static_cast<int>(threadIdx.x / 128)), "n"(kComputing) : "memory");
}

struct Out {
    __nv_bfloat16* rows;
    int64_t stride;  // of a row, in numbers
};

template <int kDim, bool kCausal, bool kPaired>
__device__ __forceinline__ void compute(const AttentionMemory<kDim>& shared, const Works& works, const Out& out,
                                        float scale, int begin, int end) {
    const int warp = threadIdx.x % 128 / 32, mine = warpgroup() * kMine;
    const bool reports = threadIdx.x % 32 == 0;
    Ring queries = shared.queries(), keys = shared.keys();
    Chain<kDim> chain;
    bool adds = false;  // whether values of this work are mixed already
    Work before{}, work = read_work<kPaired>(works, begin);
    uint32_t before_queries = 0, before_empty = 0;

    // Keys or values of a tile have been read: all blocks that fetch them are told.
    const auto leave = [&](uint32_t barrier) {
        if (!kPaired && reports) arrive(barrier);
        if (kPaired && threadIdx.x % 32 < 2) release(barrier, threadIdx.x % 32);
    };
    // Of the work before, whose weights are all used.
    const auto finish = [&](const float(&totals)[2]) {
        const int first = before.tile * kQueries + mine + warp * 16;
        const int64_t row = before.first + first;
        chain.write(totals, before_queries + warp * 2048, out.rows + row * out.stride + before.head * kDim, out.stride,
                    before.length - first);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (reports) arrive(before_empty);
    };
    if (mine > 0) pass_turn();
#pragma unroll 1
    for (int index = begin; index < end; ++index) {
        const uint32_t here = queries.here() + mine * 128;
        const int tiles = work.key_tiles<kCausal>();
        const int last_keys = kCausal ? mine + warp * 16 + threadIdx.x % 32 / 4 + 1 : work.length - (tiles - 1) * kKeys;
        const int rows = work.length - work.tile * kQueries - mine - warp * 16 - threadIdx.x % 32 / 4;
        const Work after = index + 1 < end ? read_work<kPaired>(works, index + 1) : work;
        wait_for(queries.is_full(), queries.parity);
        const auto step = [&](auto first, int tile) {
            constexpr bool kFirst = decltype(first)::value;
            float factors[2];
            const uint32_t keys_empty = keys.is_empty();
            uint32_t values_empty = 0, values_full = 0, parity = 0;
            const bool mixes = !kFirst || index > begin;
            wait_for(keys.is_full(), keys.parity);
            if (kFirst) await_turn();
            begin_products();
            chain.request_scores(here, keys.here());
            end_products();
            keys.next();
            if (mixes) {
                values_empty = keys.is_empty(), values_full = keys.is_full(), parity = keys.parity;
                wait_for(values_full, parity);
                chain.request_mixed(keys.here(), adds);
                end_products();
                if (kFirst && (mine == 0 || index + 1 < end)) pass_turn();
                keys.next();
                await_products<1>();
            } else {
                if (mine == 0 || index + 1 < end) pass_turn();
                await_products();
            }
            leave(keys_empty);
            if (tile == tiles - 1 && (kCausal || last_keys < kKeys)) chain.hide(last_keys, kCausal ? 8 : 0);
            const bool scales = chain.template weigh<kFirst>(scale, rows, factors);
            if (mixes) {
                // This wait is long over. It is a branch, across which the compiler does not move the next one: it would
                // stand before most of the powers.
                wait_for(values_full, parity);
                await_products();
                leave(values_empty);
            }
            if (kFirst && mixes) finish(chain.done);
            if (scales) chain.scale_mixed(factors);
            chain.pack();
            adds = !kFirst;
        };
        step(std::true_type{}, 0);
#pragma unroll 1
        for (int tile = 1; tile < tiles; ++tile) step(std::false_type{}, tile);
        before = work, work = after;
        before_queries = here, before_empty = queries.is_empty();
        queries.next();
    }
    wait_for(keys.is_full(), keys.parity);
    begin_products();
    chain.request_mixed(keys.here(), adds);
    end_products();
    await_products();
    finish(chain.totals);
}

template <int kDim, bool kCausal, bool kPaired>
__device__ __forceinline__ void attend(const HeadMaps& maps, const Works& works, const Out& out, int group, float scale) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const AttentionMemory<kDim> shared{shared_address(memory)};
    if (threadIdx.x == 0) {
        const Ring queries = shared.queries(), keys = shared.keys();
        for (int slot = 0; slot < queries.count; ++slot)
            start_barrier(queries.full + slot * 8, 1), start_barrier(queries.empty + slot * 8, kWarps);
        for (int slot = 0; slot < keys.count; ++slot)
            start_barrier(keys.full + slot * 8, 1), start_barrier(keys.empty + slot * 8, kWarps << kPaired);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (kPaired) cluster_arrive(), cluster_wait();  // until the other's barriers exist
    // For the kernel in front, if this one came up early; the next may come up, too.
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
    const int* begins = works.list + 5 * works.capacity + (blockIdx.x >> kPaired);
    const int begin = begins[0], end = begins[1];
    if (begin >= end) return;
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    if (warp < kWarps) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputingRegisters));
        compute<kDim, kCausal, kPaired>(shared, works, out, scale, begin, end);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchingRegisters));
        if (threadIdx.x == kComputing) fetch_all<kDim, kCausal, kPaired>(shared, maps, works, group, begin, end);
        __syncwarp();
    }
    if (kPaired) {  // the other may still tell this one's barriers; what this one told must have come before it goes
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
        cluster_wait();
    }
}

}  // namespace

// q [T, Hq * D]: boxes of 64 columns and 128 rows. k, v [T, Hk * D]: the same, or of 64 rows for pairs of blocks, which
// have two heads with the same keys. group: query heads a key head. scale: of logarithms to base 2. stride: of a row of
// `out`.
#define KERNEL(name, dim, causal, paired)                                                                    \
    extern "C" __global__ __launch_bounds__(kAttentionThreads, 1) void name(                                 \
        const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,                        \
        const __grid_constant__ CUtensorMap v, __nv_bfloat16* out, int64_t stride, const int* list,          \
        int capacity, int group, float scale) {                                                              \
        attend<dim, causal, paired>({&q, &k, &v}, {list, capacity}, {out, stride}, group, scale);            \
    }
#define KERNELS(dim)                                          \
    KERNEL(chained_##dim, dim, false, false)                  \
    KERNEL(chained_causal_##dim, dim, true, false)            \
    KERNEL(chained_paired_##dim, dim, false, true)            \
    KERNEL(chained_causal_paired_##dim, dim, true, true)

KERNELS(64)
KERNELS(128)
