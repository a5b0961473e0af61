// Ragged attention on Hopper: out = softmax(q k^T * scale) v of each sequence, bf16 in and out, sums in fp32.
//
// A work is 128 queries of a head, against all keys of their sequence in tiles of 128. Each block has a list of works
// and goes through their tiles as through one: the scores of the next work's first tile are made beside the last
// product of this one's weights and values, and keys and values of works to come are fetched all the while. So short
// sequences, of a few tiles each, keep the tensor cores as busy as long ones do.
//
// Where works are left for half of the blocks or fewer, each is split for two: of its 64 queries a block's warpgroups
// have the keys in turn, a tile each, and add up what they make of them.
//
// Where two heads have the same keys, two blocks, a cluster, go through the same tiles of a head each, and each fetches
// half of every tile for both.
//
// Two warpgroups have 64 queries each, a third fetches. As FlashAttention-3 (arXiv 2407.08608, section 3.2), a
// warpgroup's weights of one tile are computed while the product of the tile before runs.

#include <type_traits>

#include "chained_fetch.cuh"
#include "chained_row.cuh"
#include "chained_softmax.cuh"

namespace {

constexpr int kAttentionThreads = kComputing + 128, kComputingRegisters = 232, kFetchingRegisters = 40;

// At the beginning of a work warpgroups ask for their products in turns, so that one's weights are computed while the
// other's products run. Turns at every tile are slower, and so are none (log.md).
__device__ __forceinline__ void await_turn() {
    asm volatile("bar.sync %0, %1;" ::"r"(4 + static_cast<int>(threadIdx.x / 128)), "n"(kComputing) : "memory");
}

__device__ __forceinline__ void pass_turn() {
    asm volatile("bar.arrive %0, %1;" ::"r"(5 - static_cast<int>(threadIdx.x / 128)), "n"(kComputing) : "memory");
}

template <int kDim, bool kCausal, bool kPaired>
__device__ __forceinline__ void compute(const AttentionMemory<kDim>& shared, const Heads& heads, const Works& works,
                                        const Out& out, float scale, int begin, int end) {
    const int warp = threadIdx.x % 128 / 32, mine = warpgroup() * kMine;
    const bool reports = threadIdx.x % 32 == 0;
    Ring queries = shared.queries(), keys = shared.keys();
    Chain<kDim> chain;
    bool adds = false;  // whether values of this work are mixed already
    Work before{}, work = read_work<kPaired>(works, begin);
    uint32_t before_queries = 0, before_empty = 0;
    bool great = false;  // whether rows have to be made again
    // Of this work: this warpgroup's queries, tiles of keys, and the keys that a thread's first query sees of the last of
    // them.
    uint32_t here = 0;
    int index = begin, tiles = 0, last_keys = 0;

    // Keys or values of a tile have been read: all blocks that fetch them are told.
    const auto leave = [&](uint32_t barrier) {
        if (!kPaired && reports) arrive(barrier);
        if (kPaired && threadIdx.x % 32 < 2) release(barrier, threadIdx.x % 32);
    };
    // Keys or values of a tile that the other warpgroup has. They must have come: told before, the barrier would count
    // it for what was in their slot before them.
    const auto skip = [&] {
        wait_for(keys.is_full(), keys.parity);
        leave(keys.is_empty());
        keys.next();
    };
    // Of the work before, whose weights are all used.
    const auto finish = [&](const float(&totals)[2]) {
        const int first = before.tile * kQueries + mine + warp * 16;
        const int64_t row = before.first + first;
        great |= chain.write(totals, before_queries + warp * 2048, out.at<kDim>(row, before.head), out.stride,
                             before.length - first);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (reports) arrive(before_empty);
    };
    // Of half a work, `tile` is this warpgroup's of a pair, and what comes with it for the other is skipped: in the order
    // in which it was fetched, keys of both tiles, then values of the pair before.
    const auto step = [&](auto first, auto half, int tile) {
        constexpr bool kFirst = decltype(first)::value, kHalf = decltype(half)::value;
        if (kHalf && mine > 0) skip();
        const uint32_t keys_empty = keys.is_empty();
        uint32_t values_empty = 0, values_full = 0, parity = 0;
        const bool mixes = !kFirst || index > begin;
        wait_for(keys.is_full(), keys.parity);
        if (kFirst) await_turn();
        begin_products();
        chain.request_scores(here, keys.here());
        end_products();
        keys.next();
        if (kHalf && mine == 0 && tile + 1 < tiles) skip();
        if (mixes) {
            // The last values of the work before are one tile, of both.
            if (kHalf && !kFirst && mine > 0) skip();
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
        chain.template weigh<kFirst>(scale);
        if (mixes) {
            // This wait is long over. It is a branch, across which the compiler does not move the next one: it would
            // stand before most of the powers.
            wait_for(values_full, parity);
            await_products();
            leave(values_empty);
            if (kHalf && !kFirst && mine == 0) skip();
        }
        if (kFirst && mixes) finish(chain.done);
        chain.pack();
        adds = !kFirst;
    };
    // Once in each branch below: if both lead to the same product, the compiler lets no two of all run side by side.
    const auto mix_last = [&] {
        wait_for(keys.is_full(), keys.parity);
        begin_products();
        chain.request_mixed(keys.here(), adds);
        end_products();
        await_products();
    };
    const std::true_type yes;
    const std::false_type no;
    const bool halved = read_work<kPaired>(works, end - 1).template is_half<kCausal>();
    if (mine > 0) pass_turn();
#pragma unroll 1
    for (; index < end - halved; ++index) {
        here = queries.here() + mine * 128;
        tiles = work.key_tiles<kCausal>();
        last_keys = kCausal ? mine + warp * 16 + threadIdx.x % 32 / 4 + 1 : work.length - (tiles - 1) * kKeys;
        const Work after = index + 1 < end ? read_work<kPaired>(works, index + 1) : work;
        wait_for(queries.is_full(), queries.parity);
        step(yes, no, 0);
#pragma unroll 1
        for (int tile = 1; tile < tiles; ++tile) step(no, no, tile);
        before = work, work = after;
        before_queries = here, before_empty = queries.is_empty();
        queries.next();
    }
    const int second = mine > 0;
    if (halved) {
        // As a work of a sequence that begins at its queries, which both warpgroups have. It has two tiles or more.
        const int first = ~work.tile * kMine;
        here = queries.here();
        tiles = work.key_tiles<kCausal>();
        last_keys = work.length - (tiles - 1) * kKeys;
        wait_for(queries.is_full(), queries.parity);
        step(yes, yes, second);
#pragma unroll 1
        for (int tile = second + 2; tile < tiles; tile += 2) step(no, yes, tile);
        before = {0, work.first + first, work.length - first, work.head};
        before_queries = here, before_empty = queries.is_empty();
        // Before the second's last values come the first's of that pair; before these the keys of a tile without a pair.
        if (second && tiles % 2 > 0) skip();
        if (second) skip();
        mix_last();
        // Each has waited for its own tiles, between them for all that was fetched, by either block of a pair: behind the
        // barrier nothing fills or reads the ring any more.
        static_assert(Chain<kDim>::kParts * Chain<kDim>::kPitch <= shared.kSlots * shared.kTileSize, "parts");
        const uint32_t parts = keys.slots + threadIdx.x % 128 * 16;
        sync_block();
        if (second) chain.hand_over(parts);
        sync_block();
        if (!second) chain.take_over(parts), finish(chain.totals);
    } else {
        mix_last();
        finish(chain.totals);
    }
    if (!__any_sync(0xFFFFFFFF, great)) return;
#pragma unroll 1
    for (index = begin; index < end; ++index) {
        work = read_work<kPaired>(works, index);
        const bool half = work.template is_half<kCausal>();
        if (half && second) break;
        const int first = (half ? ~work.tile * kMine : work.tile * kQueries + mine) + warp * 16;
        attend_again<kDim, kCausal>(heads, out, work, first, scale);
    }
}

template <int kDim, bool kCausal, bool kPaired>
__device__ __forceinline__ void attend(const HeadMaps& maps, const Heads& heads, const Works& works, const Out& out,
                                       float scale) {
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
        compute<kDim, kCausal, kPaired>(shared, heads, works, out, scale, begin, end);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchingRegisters));
        if (threadIdx.x == kComputing) fetch_all<kDim, kCausal, kPaired>(shared, maps, works, heads.group, begin, end);
        __syncwarp();
    }
    if (kPaired) {  // the other may still tell this one's barriers; what this one told must have come before it goes
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
        cluster_wait();
    }
}

}  // namespace

// q [T, Hq * D]: boxes of 64 columns and 128 rows. k, v [T, Hk * D]: the same, or of 64 rows for pairs of blocks, which
// have two heads with the same keys. qs, ks, vs: the same, for rows that a warp makes again. group: query heads a key head.
// scale: of logarithms to base 2. Strides: of a row, in numbers.
#define KERNEL(name, dim, causal, paired)                                                                      \
    extern "C" __global__ __launch_bounds__(kAttentionThreads, 1) void name(                                   \
        const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,                          \
        const __grid_constant__ CUtensorMap v, const __nv_bfloat16* qs, int64_t q_stride,                      \
        const __nv_bfloat16* ks, int64_t k_stride, const __nv_bfloat16* vs, int64_t v_stride,                  \
        __nv_bfloat16* out, int64_t stride, const int* list, int capacity, int group, float scale) {           \
        const Heads heads{{qs, q_stride}, {ks, k_stride}, {vs, v_stride}, group};                              \
        attend<dim, causal, paired>({&q, &k, &v}, heads, {list, capacity}, {out, stride}, scale);              \
    }
#define KERNELS(dim)                                          \
    KERNEL(chained_##dim, dim, false, false)                  \
    KERNEL(chained_causal_##dim, dim, true, false)            \
    KERNEL(chained_paired_##dim, dim, false, true)            \
    KERNEL(chained_causal_paired_##dim, dim, true, true)

KERNELS(64)
KERNELS(128)
