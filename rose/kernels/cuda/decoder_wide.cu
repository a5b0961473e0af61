// All layers of a small Qwen3 in one launch, for 129 to 512 tokens of any sequences.
//
// As decoder_stack.cu, which see, but a block's products are of tiles: the batch's tokens make up to four, of 64 or
// 128, and 32 blocks work on each. A layer is seven parts:
//   heads     QKV; a block has a head, with its norm and rotation
//   attention a block has 64 queries of a head (wide_attention.cuh)
//   output    a block has 128 columns and a quarter of K; partial sums
//   sum       a block has two or four tokens: adds their partial sums to the residuals, which stay in registers, and
//             norms them
//   gated     SwiGLU; a block has 96 columns
//   down      as output
//   sum       as above, normed for the next layer
// What others made is waited for by counters, the partial sums by looking at them. A block cannot get far ahead: the
// attention of a layer waits for heads of every tile, made only when all of that tile's blocks were through the layer
// before. So heads lie in two buffers in turns, and nothing else needs more than one. Blocks whose queries are all
// padding wait for no other tile: what they write too early nobody sees.

#include "decoder_rotation.cuh"
#include "wide_attention.cuh"
#include "wide_fetch.cuh"
#include "wide_sums.cuh"

namespace {

constexpr int kGatedTilesOfBlock = 2 * kInner / kTileRows / kTileBlocks;
constexpr int kWideContext = H::kQueryHeads * H::kHeadDim / kWideSplits, kWideNarrow = kInner / kWideSplits;
static_assert(kTileBlocks == H::kHeads && kWideColumns == 2 * kTileRows, "tiles of two times 64 rows");

template <int kTile>
using Share = WideShare<H, kTile>;

// The more is angles of rotation, a thread's pair in both halves, two tokens in 8. Slots: the fastest division of what
// is left (log.md).
template <int kTile>
using Memory = WideMemory<kTile, 12 * 1024, kComputing * kTile, kTileBytes, kTile == 128 ? 5 : 8>;

// sums = weights [kTiles * 64, columns] @ rows [kMine, columns]^T, this warpgroup's half of the rows, from what comes
// next.
template <int kMine, int kTiles>
__device__ __forceinline__ void multiply_tiles(Products& products, int columns, float (&sums)[kTiles][kMine / 2]) {
    Ring &weights = products.weights, &rows = products.rows;
    const bool reports = threadIdx.x % 32 == 0;
    uint32_t read[kTiles + 1], next_read[kTiles + 1];
#pragma unroll 1
    for (int at = 0; at < columns; at += kChunk) {
        const uint64_t row = descriptor(rows.here() + warpgroup() * kMine * kChunk * 2);
        wait_for(rows.is_full(), rows.parity);
        begin_products();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile, weights.next()) {
            const uint64_t weight = descriptor(weights.here());
            wait_for(weights.is_full(), weights.parity);
            next_read[tile] = weights.is_empty();
#pragma unroll
            for (int step = 0; step < kChunk / 16; ++step)  // 16 columns are 32 bytes: 2 in a descriptor's units
                multiply<kMine>(sums[tile], weight + step * 2, row + step * 2, at + step > 0);
        }
        end_products();
        next_read[kTiles] = rows.is_empty();
        if (at > 0) {
            await_products<1>();
#pragma unroll
            for (int i = 0; i <= kTiles; ++i)
                if (reports) arrive(read[i]);
        }
#pragma unroll
        for (int i = 0; i <= kTiles; ++i) read[i] = next_read[i];
        rows.next();
    }
    await_products();
#pragma unroll
    for (int i = 0; i <= kTiles; ++i)
        if (reports) arrive(read[i]);
    sync_warpgroup();  // what was written out before has been read from where these sums will be transposed
}

// A head of this block's tokens, normed and rotated, to all other blocks.
template <int kTile>
struct HeadPart {
    static constexpr int kMine = kTile / 2;
    static_assert(32 * (kMine + 8) * 4 + kMine * 4 <= Memory<kTile>::kOwnBytes, "squares and factors of a head");
    int head, first, here;  // this warpgroup's first token, and how many it has
    uint32_t angles;  // where this thread has them: registers are too few
    bool rotates;

    __device__ __forceinline__ HeadPart(const Stack& stack, const Memory<kTile>& shared,
                                        const Share<kTile>& share) {
        head = share.part, first = share.first_token + warpgroup() * kMine;
        here = max(min(stack.num_tokens - first, kMine), 0);
        angles = shared.more() + threadIdx.x * 16;
        rotates = head < H::kScored;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            __half2 read[kMine / 4] = {};
            if (rotates) read_angles<kMine>(stack, first, half, read);
#pragma unroll
            for (int i = 0; i < kMine / 4; ++i)
                store_word(place(half, i), *reinterpret_cast<const uint32_t*>(&read[i]));
        }
    }

    __device__ __forceinline__ uint32_t place(int half, int i) const {
        return angles + (half * kMine / 16 + i / 4) * kComputing * 16 + i % 4 * 4;
    }

    __device__ __forceinline__ void load_angles(int half, __half2 (&loaded)[kMine / 4]) const {
#pragma unroll
        for (int i = 0; i < kMine / 4; i += 4) {
            const float4 four = load_shared4(place(half, i));
            const float words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) loaded[i + j] = reinterpret_cast<const __half2&>(words[j]);
        }
    }

    // own: of this warpgroup.
    __device__ __forceinline__ void norm_and_rotate(const float2 (&weights)[2], float eps, uint32_t own,
                                                    float (&sums)[2][kMine / 2]) const {
        const uint32_t factors = own + Memory<kTile>::kOwnBytes - kMine * 4;
        const int thread = threadIdx.x % 128;
        float squares[kMine / 4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            __half2 turns[kMine / 4];
            load_angles(half, turns);
            rotate<kMine>(weights[half], turns, sums[half], squares);
        }
        store_squares<kMine>(squares, own);
        sync_warpgroup();
        if (thread < kMine) {
            const float factor = rsqrtf(add_squares<kMine>(own, thread) / H::kHeadDim + eps);
            store_word(factors + thread * 4, __float_as_uint(factor));
        }
        sync_warpgroup();
#pragma unroll
        for (int i = 0; i < kMine / 4; ++i) {
            const float factor = load_shared(factors + (i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2) * 4);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                sums[half][i / 2 * 4 + i % 2] *= factor, sums[half][i / 2 * 4 + 2 + i % 2] *= factor;
        }
    }

    __device__ __forceinline__ void operator()(const Stack& stack, Products& products, const __nv_bfloat16* norms,
                                               uint32_t own, int layer, float (&sums)[2][kMine / 2]) const {
        float2 weights[2] = {};
        if (rotates) weights[0] = read_norm_weights(norms, head, 0), weights[1] = read_norm_weights(norms, head, 1);
        multiply_tiles<kMine, 2>(products, kHidden, sums);
        if (rotates) norm_and_rotate(weights, stack.eps, own, sums);
        __nv_bfloat16* out = stack.qkv + (layer % 2 * kTokenTiles * kTile + first) * H::kQkvWidth + head * H::kHeadDim;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half > 0) sync_warpgroup();
            store<kMine, true>(sums[half], own, out + half * 32, here, H::kQkvWidth, 1 + warpgroup());
        }
        const int key = head < H::kQueryHeads ? head / H::kGroup : head % H::kKeyHeads;
        count(wide_counter(stack.counters, layer, kHeadsPart, key));
    }
};

// A product of 128 columns and a part of K, from what comes next, to its partial sums.
template <int kTile>
__device__ __forceinline__ void multiply_part(const Stack& stack, const Share<kTile>& share, Products& products,
                                              LayerHalf layer_half, uint32_t own, float (&sums)[2][kTile / 4]) {
    constexpr int kMine = kTile / 2;
    const int first = share.first_token + warpgroup() * kMine, here = max(min(stack.num_tokens - first, kMine), 0);
    __nv_bfloat16* out = partials_of(stack.partials, stack.num_tokens, layer_half, share.split, first) + share.columns;
    multiply_tiles<kMine, 2>(products, layer_half == kMlpHalf ? kWideNarrow : kWideContext, sums);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        if (tile > 0) sync_warpgroup();
        store<kMine>(sums[tile], own, out + tile * kTileRows, here, kHidden, 1 + warpgroup());
    }
}

// SwiGLU's 96 columns, from what comes next.
template <int kTile>
__device__ __forceinline__ void multiply_gated(const Stack& stack, const Share<kTile>& share, Products& products,
                                               uint32_t own, float (&sums)[kGatedTilesOfBlock][kTile / 4]) {
    constexpr int kMine = kTile / 2, kTiles = kGatedTilesOfBlock;
    static_assert(kTiles * kMine * 64 <= Memory<kTile>::kOwnBytes, "SwiGLU on its way out");
    const int first = share.first_token + warpgroup() * kMine, here = max(min(stack.num_tokens - first, kMine), 0);
    __nv_bfloat16* out = stack.narrow + first * kInner + share.part * kTiles * 32;
    multiply_tiles<kMine, kTiles>(products, kHidden, sums);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
        store_gated<kMine>(sums[tile], own + tile * kMine * 64, out + tile * 32, here, kInner, 1 + warpgroup());
}

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
            if (exists) add8(*reinterpret_cast<const uint4*>(stack.residual + place(i)), residual[i]);
    }

    // residual += partial sums; hidden = RMSNorm(residual). `last`: hidden is the sums as they are, and the residual
    // goes to memory without them. scratch: 32 bytes that nobody else has used since the last sync_block.
    __device__ __forceinline__ void operator()(const Stack& stack, LayerHalf layer_half, const __nv_bfloat16* norm,
                                               uint32_t scratch, bool last) {
        float added[kPieces][8] = {}, factors[kPieces][8] = {}, squares = 0;
        uint4 weights[kPieces] = {};
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            if (!last) weights[i] = read_ahead(norm + column(i));
        Base::take(stack.partials, stack.num_tokens, layer_half, added);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            if (last) {
                store8(stack.hidden + place(i), added[i]);
                store8(stack.residual + place(i), residual[i]);
                continue;
            }
            add8(weights[i], factors[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) residual[i][j] += added[i][j], squares += residual[i][j] * residual[i][j];
        }
        if (last) return;
        const float factor = rsqrtf(sum_of_token(squares, scratch) / kHidden + stack.eps);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) added[i][j] = residual[i][j] * factor * factors[i][j];
            store8(stack.hidden + place(i), added[i]);
        }
    }

    __device__ __forceinline__ static float sum_of_token(float value, uint32_t scratch) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
        const int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) store_word(scratch + warp * 4, __float_as_uint(value));
        sync_block();
        float total = 0;
#pragma unroll
        for (int i = 0; i < kTheirs / 32; ++i)
            total += load_shared(scratch + (warp / (kTheirs / 32) * (kTheirs / 32) + i) * 4);
        return total;
    }
};

template <int kTile>
__device__ __forceinline__ void compute(const Stack& stack, const Memory<kTile>& shared) {
    const Share<kTile> share;
    const int tokens = stack.num_tokens;
    const bool attends = share.first_query < tokens, adds = share.first_sum < tokens;
    const uint32_t own = shared.own(warpgroup());
    // All products' sums, one after another: the compiler finds no room for each part's own.
    float sums[kGatedTilesOfBlock][kTile / 4] = {};
    auto& two = reinterpret_cast<float(&)[2][kTile / 4]>(sums);
    Products products{shared.weights(), shared.rows()};
    const HeadPart<kTile> make_head(stack, shared, share);
    SumPart<kTile> sum(stack, share);
    const Keys keys = find_keys(stack.offsets, stack.num_seqs, stack.causal, share.first_query);
    const Bounds bounds = find_bounds(stack.offsets, stack.num_seqs, share.first_query + threadIdx.x % 128 / 32 * 16,
                                      tokens, stack.causal);
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const Layer norms = stack.layers[layer];
        make_head(stack, products, norms.heads, own, layer, two);
        if (attends) {
            if constexpr (kTile == 128) {
                auto& values = reinterpret_cast<float(&)[2][32]>(sums);
                attend_wide<H, kTile>(stack, shared, products.rows, share, keys, bounds, layer, values, sums[2]);
            } else {
                float values[2][32];
                attend_wide<H, kTile>(stack, shared, products.rows, share, keys, bounds, layer, values, sums[2]);
            }
            count(wide_counter(stack.counters, layer, kWideAttentionPart, share.attended()));
        }
        multiply_part<kTile>(stack, share, products, kAttentionHalf, own, two);
        if (adds) {
            sync_block();
            sum(stack, kAttentionHalf, norms.mlp, shared.own(0), false);
            count(wide_counter(stack.counters, layer, kWideMlpSumPart, share.tile));
            sum.forget(stack.partials, tokens, kAttentionHalf);
        }
        multiply_gated<kTile>(stack, share, products, own, sums);
        count(wide_counter(stack.counters, layer, kWideMlpPart, share.widened()));
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.quiet());
        multiply_part<kTile>(stack, share, products, kMlpHalf, own, two);
        if (adds) {
            sync_block();
            sum(stack, kMlpHalf, norms.next, shared.own(0), layer + 1 == stack.num_layers);
            count(wide_counter(stack.counters, layer, kWideNextSumPart, share.tile));
            sum.forget(stack.partials, tokens, kMlpHalf);
        }
    }
}

template <int kTile>
__device__ void request_weights(const Stack& stack, Ring ring, uint32_t quiet) {
    constexpr int kAhead = Memory<kTile>::kAhead;
    const Share<kTile> share;
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const CUtensorMap* maps = stack.weights + layer * kWeights;
        const auto plain = [&](Weight weight) {
            return [&, map = maps + weight](uint32_t to, int column, int tile, uint32_t barrier) {
                fetch(to, map, column, share.columns + tile * kTileRows, barrier, kReadOnce);
            };
        };
        const auto half_head = [&](uint32_t to, int column, int tile, uint32_t barrier) {
            fetch_half_head(to, maps + kQkvWeight, column, share.part * 2 + tile, barrier);
        };
        const auto gated = [&](uint32_t to, int column, int tile, uint32_t barrier) {
            fetch_gated(to, maps + kGatedWeight, column, (share.part * kGatedTilesOfBlock + tile) * kTileRows, barrier);
        };
        request_tiles<kAhead, 2>(ring, 0, kHidden, kTileBytes, half_head);
        request_tiles<kAhead, 2>(ring, share.split * kWideContext, kWideContext, kTileBytes, plain(kOutputWeight));
        request_tiles<kAhead, kGatedTilesOfBlock>(ring, 0, kHidden, kTileBytes, gated);
        request_tiles<kAhead, 2>(ring, share.split * kWideNarrow, kWideNarrow, kTileBytes, plain(kDownWeight));
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
            const Keys keys = find_keys(stack.offsets, stack.num_seqs, stack.causal, share.first_query);
            if (threadIdx.x % 32 == 0)
                request_all_rows<H, kTile, kInner, H::kGroup + 2>(stack, shared, maps, keys);
        },
        [&] { request_weights<kTile>(stack, shared.weights(), shared.quiet()); });
}

}  // namespace

#define KERNEL(tokens)                                                                              \
    extern "C" __global__ __launch_bounds__(kWideThreads, 1) void decoder_wide_##tokens(                \
        const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap context,    \
        const __grid_constant__ CUtensorMap narrow, const __grid_constant__ CUtensorMap queries,    \
        const __grid_constant__ CUtensorMap keys, const __grid_constant__ Stack stack) {            \
        run<tokens / kTokenTiles>(stack, {&hidden, &context, &narrow, &queries, &keys});            \
    }

KERNEL(256)
KERNEL(512)
