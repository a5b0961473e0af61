// All layers of a large BERT or XLM-R in one launch, for 129 to 512 tokens of any sequences.
//
// As decoder_wide.cu, whose comments say why no block waits for ever or reads too early or too late, and whose tiles
// and counters these are. A layer is seven parts:
//   heads     QKV; a block has half a head of queries, keys and values each, 96 columns
//   attention a block has 64 queries of a head (wide_attention.cuh)
//   output    a block has 128 columns and a quarter of K; partial sums
//   sum       a block has two or four tokens: adds their partial sums to the residuals, which stay in registers, and
//             normalises
//   widening  with GELU; a block has 128 columns
//   narrowing as output
//   sum       as above
// In products the tensor cores' 64 rows are tokens, so that a block may have 96 columns; of 128 tokens a warpgroup has
// half, of 64 both have all and half of the columns each.

#include "encoder_layers.cuh"
#include "layer_norm.cuh"
#include "wide_attention.cuh"
#include "wide_fetch.cuh"
#include "wide_sums.cuh"

namespace {

constexpr int kHalfHead = H::kHeadDim / 2, kHeadColumns = 3 * kHalfHead;  // of a block
constexpr int kWideContext = H::kQueryHeads * H::kHeadDim / kWideSplits, kWideNarrow = kInner / kWideSplits;
constexpr int kColumnBytes = kChunk * 2, kWeightBytes = kWideColumns * kColumnBytes;  // of a slot's columns of weights
static_assert(kTileBlocks * kHalfHead == kHidden && kTileBlocks * kWideColumns == kInner, "a block for all columns");

template <int kTile>
using Share = WideShare<H, kTile>;

template <int kTile>
using Memory = WideMemory<kTile, 9 * 1024, 0, kWeightBytes, kTile == 128 ? 6 : 8>;

// Two biases side by side, asked for here and not later: volatile.
__device__ __forceinline__ float2 read_biases(const __nv_bfloat16* from) {
    uint32_t two;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(two) : "l"(from));
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
}

// Through an instruction that the compiler cannot see into: it would keep sums that start alike in one register, and
// copy them between products, which then follow each other one at a time.
__device__ __forceinline__ float copied(float value) {
    float copy;
    asm volatile("mov.b32 %0, %1;" : "=f"(copy) : "f"(value));
    return copy;
}

// A warpgroup's sums of a block's product of kColumns columns: a thread has two tokens, 8 apart, and in each 8 columns
// two.
template <int kTile, int kColumns>
struct Product {
    static constexpr bool kAllColumns = kTile == 128;
    static constexpr int kMine = kAllColumns ? kColumns : kColumns / 2;
    float sums[kMine / 2] = {};

    __device__ __forceinline__ static int row() { return kAllColumns ? warpgroup() * 64 : 0; }
    __device__ __forceinline__ static int column() { return kAllColumns ? 0 : warpgroup() * kMine; }

    // place(column): where the biases of one of the block's columns and of the next are.
    template <class Place>
    __device__ __forceinline__ void start_from(Place place) {
#pragma unroll
        for (int i = 0; i < kMine / 8; ++i) {
            const float2 two = read_biases(place(column() + i * 8 + static_cast<int>(threadIdx.x % 4) * 2));
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i * 4 + j] = copied(j % 2 ? two.y : two.x);
        }
    }

    // sums += rows [64, columns] @ weights [kMine, columns]^T, from what comes next.
    __device__ __forceinline__ void multiply_next(Products& products, int columns) {
        Ring &weights = products.weights, &rows = products.rows;
        const bool reports = threadIdx.x % 32 == 0;
        uint32_t weight_read = 0, row_read = 0;
#pragma unroll 1
        for (int at = 0; at < columns; at += kChunk) {
            const uint64_t weight = descriptor(weights.here() + column() * kColumnBytes);
            const uint64_t left = descriptor(rows.here() + row() * kColumnBytes);
            wait_for(weights.is_full(), weights.parity);
            wait_for(rows.is_full(), rows.parity);
            begin_products();
#pragma unroll
            for (int step = 0; step < kChunk / 16; ++step)  // 16 columns are 32 bytes: 2 in a descriptor's units
                multiply<kMine>(sums, left + step * 2, weight + step * 2, 1);
            end_products();
            if (at > 0) {
                await_products<1>();
                if (reports) arrive(weight_read), arrive(row_read);
            }
            weight_read = weights.is_empty(), row_read = rows.is_empty();
            weights.next(), rows.next();
        }
        await_products();
        if (reports) arrive(weight_read), arrive(row_read);
    }

    // own: of this warpgroup. place(token, column): where 8 of the block's columns of one of its tile's `tokens` go.
    template <class Place>
    __device__ __forceinline__ void store_to(uint32_t own, int tokens, Place place) {
        constexpr int kFirst = kMine < 64 ? kMine : 64, kSecond = kMine - kFirst;
        const int warp = threadIdx.x % 128 / 32, first = row() + warp * 16;
        const uint32_t stage = own + warp * kStageBytes;
        // column() is of a whole warp: not in what only lanes with rows call.
        const auto from = [&](int columns) {
            return [=, at = column() + columns](int row, int piece) { return place(first + row, at + piece * 8); };
        };
        __syncwarp();
        store_rows<kFirst>(reinterpret_cast<float(&)[kFirst / 2]>(sums[0]), stage, tokens - first, from(0));
        if constexpr (kSecond > 0) {
            __syncwarp();
            store_rows<kSecond>(reinterpret_cast<float(&)[kSecond / 2]>(sums[kFirst / 2]), stage, tokens - first,
                                from(kFirst));
        }
    }
};

// What a block's threads have all the while.
template <int kTile>
struct Worker {
    const Stack& stack;
    const Memory<kTile>& shared;
    Share<kTile> share;
    uint32_t own;  // of this warpgroup
    int tokens;    // of the tile
    Products products;

    __device__ __forceinline__ Worker(const Stack& stack, const Memory<kTile>& shared)
        : stack(stack), shared(shared), own(shared.own(warpgroup())), products{shared.weights(), shared.rows()} {
        tokens = min(stack.num_tokens - share.first_token, kTile);
    }

    // Half a head of queries, of keys and of values.
    __device__ __forceinline__ void make_heads(const __nv_bfloat16* biases, int layer) {
        const auto place = [=, first = share.part * kHalfHead](int column) {
            return column / kHalfHead * kHidden + first + column % kHalfHead;
        };
        __nv_bfloat16* out = stack.qkv + (layer % 2 * kTokenTiles * kTile + share.first_token) * H::kQkvWidth;
        Product<kTile, kHeadColumns> product;
        product.start_from([=](int column) { return biases + place(column); });
        product.multiply_next(products, kHidden);
        product.store_to(own, tokens,
                         [=](int token, int column) { return out + token * H::kQkvWidth + place(column); });
    }

    // 128 columns and a part of K, to its partial sums.
    __device__ __forceinline__ void multiply_part(LayerHalf layer_half) {
        __nv_bfloat16* out =
            partials_of(stack.partials, stack.num_tokens, layer_half, share.split, share.first_token) + share.columns;
        Product<kTile, kWideColumns> product;
        product.multiply_next(products, layer_half == kMlpHalf ? kWideNarrow : kWideContext);
        product.store_to(own, tokens, [=](int token, int column) { return out + token * kHidden + column; });
    }

    // 128 columns of the widening, with GELU.
    __device__ __forceinline__ void widen(const __nv_bfloat16* biases) {
        const int first = share.part * kWideColumns;
        __nv_bfloat16* out = stack.wide + share.first_token * kInner + first;
        Product<kTile, kWideColumns> product;
        product.start_from([=](int column) { return biases + first + column; });
        product.multiply_next(products, kHidden);
#pragma unroll
        for (int i = 0; i < product.kMine / 4; ++i) gelu(product.sums[i * 2], product.sums[i * 2 + 1]);
        product.store_to(own, tokens, [=](int token, int column) { return out + token * kInner + column; });
    }
};

// The tokens whose partial sums a block adds up, and their residuals.
template <int kTile>
struct SumPart : Summed<Share<kTile>::kSummed> {
    using Base = Summed<Share<kTile>::kSummed>;
    using Base::add8, Base::column, Base::exists, Base::kPieces, Base::kTheirs, Base::place, Base::store8;
    float residual[kPieces][8];

    __device__ __forceinline__ SumPart(const Stack& stack, const Share<kTile>& share)
        : Base(share.first_sum, stack.num_tokens), residual{} {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            if (exists) add8(*reinterpret_cast<const uint4*>(stack.hidden + place(i)), residual[i]);
    }

    // hidden = residual = LayerNorm(residual + partial sums + bias). scratch: 64 bytes that nobody else has used since
    // the last sync_block.
    __device__ __forceinline__ void operator()(const Stack& stack, LayerHalf layer_half, const Sum& numbers,
                                               uint32_t scratch) {
        uint4 weights[kPieces], shifts[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            weights[i] = read_ahead(numbers.weight + column(i)), shifts[i] = read_ahead(numbers.shift + column(i));
            add8(read_ahead(numbers.bias + column(i)), residual[i]);
        }
        Base::take(stack.partials, stack.num_tokens, layer_half, residual);
        const auto& all = reinterpret_cast<const float(&)[kPieces * 8]>(residual);
        const Moments moments = moments_of_row<kTheirs / 32>(all, scratch);
        const float factor = rsqrtf(moments.squares / kHidden + stack.eps);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            float factors[8] = {}, added[8] = {};
            add8(weights[i], factors), add8(shifts[i], added);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                residual[i][j] = (residual[i][j] - moments.mean) * factor * factors[j] + added[j];
            store8(stack.hidden + place(i), residual[i]);
        }
    }
};

template <int kTile>
__device__ __forceinline__ void compute(const Stack& stack, const Memory<kTile>& shared) {
    Worker<kTile> worker(stack, shared);
    const Share<kTile>& share = worker.share;
    const int tokens = stack.num_tokens;
    const bool attends = share.first_query < tokens, adds = share.first_sum < tokens;
    SumPart<kTile> sum(stack, share);
    const Keys keys = find_keys(stack.offsets, stack.num_seqs, false, share.first_query);
    const Bounds bounds = find_bounds(stack.offsets, stack.num_seqs, share.first_query + threadIdx.x % 128 / 32 * 16,
                                      tokens, false);
    const auto add = [&](int layer, LayerHalf layer_half, WidePart part, const Sum& numbers) {
        if (!adds) return;
        sync_block();
        sum(stack, layer_half, numbers, shared.own(0));
        count(wide_counter(stack.counters, layer, part, share.tile));
        sum.forget(stack.partials, tokens, layer_half);
    };
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const Layer numbers = stack.layers[layer];
        worker.make_heads(numbers.qkv, layer);
        count(wide_counter(stack.counters, layer, kHeadsPart, share.part / 2));
        if (attends) {
            float values[1][32], scores[kTile / 4];
            attend_wide<H, kTile>(stack, shared, worker.products.rows, share, keys, bounds, layer, values, scores);
            count(wide_counter(stack.counters, layer, kWideAttentionPart, share.attended()));
        }
        worker.multiply_part(kAttentionHalf);
        add(layer, kAttentionHalf, kWideMlpSumPart, numbers.attended);
        worker.widen(numbers.wide);
        count(wide_counter(stack.counters, layer, kWideMlpPart, share.widened()));
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.quiet());
        worker.multiply_part(kMlpHalf);
        add(layer, kMlpHalf, kWideNextSumPart, numbers.hidden);
    }
}

template <int kTile>
__device__ void request_weights(const Stack& stack, Ring ring, uint32_t quiet) {
    constexpr int kAhead = Memory<kTile>::kAhead;
    const Share<kTile> share;
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const CUtensorMap* maps = stack.weights + layer * kWeights;
        const auto request = [&](Weight weight, int row, int first, int columns) {
            request_tiles<kAhead, 1>(ring, first, columns, kWeightBytes,
                                     [&](uint32_t to, int column, int, uint32_t barrier) {
                                         fetch(to, maps + weight, column, row, barrier, kReadOnce);
                                     });
        };
        request_tiles<kAhead, 1>(ring, 0, kHidden, kHeadColumns * kColumnBytes,
                                 [&](uint32_t to, int column, int, uint32_t barrier) {
                                     fetch_of(to, maps + kQkvWeight, column, share.part * kHalfHead, 0, barrier,
                                              kReadOnce);
                                 });
        request(kOutputWeight, share.columns, share.split * kWideContext, kWideContext);
        request(kWideWeight, share.part * kWideColumns, 0, kHidden);
        request(kNarrowWeight, share.columns, share.split * kWideNarrow, kWideNarrow);
        wait_for(quiet, layer % 2);
    }
}

template <int kTile>
__device__ __forceinline__ void run(const Stack& stack, const Maps& maps) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Memory<kTile> shared{shared_address(memory)};
    const Share<kTile> share;
    if (share.first_token >= stack.num_tokens) return;
    divide_wide_work(
        shared, [&] { compute<kTile>(stack, shared); },
        [&] {
            const Keys keys = find_keys(stack.offsets, stack.num_seqs, false, share.first_query);
            if (threadIdx.x % 32 == 0) request_all_rows<H, kTile, kInner, 2>(stack, shared, maps, keys);
        },
        [&] { request_weights<kTile>(stack, shared.weights(), shared.quiet()); });
}

}  // namespace

#define KERNEL(tokens)                                                                              \
    extern "C" __global__ __launch_bounds__(kWideThreads, 1) void encoder_wide_##tokens(            \
        const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap context,    \
        const __grid_constant__ CUtensorMap wide, const __grid_constant__ CUtensorMap queries,      \
        const __grid_constant__ CUtensorMap keys, const __grid_constant__ Stack stack) {            \
        run<tokens / kTokenTiles>(stack, {&hidden, &context, &wide, &queries, &keys});              \
    }

KERNEL(256)
KERNEL(512)
