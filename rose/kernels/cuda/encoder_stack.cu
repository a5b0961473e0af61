// All layers of a large BERT or XLM-R in one launch, for up to 128 tokens of any sequences.
//
// As decoder_stack.cu, whose comments say how blocks wait for each other: 128 of them go through the layers together.
// A layer is seven parts:
//   heads     QKV; a block has a head of queries, keys or values
//   attention a block has 16 queries of a head (stack_attention.cuh)
//   output    a block has 64 columns and an eighth of K; partial sums
//   sum       a block has a token: adds its partial sums to the residual, which stays in registers, and normalises
//   widening  with GELU; a block has 64 columns
//   narrowing as output
//   sum       as above
// All blocks must run at once: the launch is cooperative.

#include "encoder_layers.cuh"
#include "layer_norm.cuh"
#include "stack_ring.cuh"

namespace {

constexpr int kWideTiles = kInner / kTileRows, kHeadTiles = H::kHeads;
// Columns of K in a split.
constexpr int kWide = kInner / kSplits, kContext = H::kQueryHeads * H::kHeadDim / kSplits;

enum Part { kAttentionPart, kAttendedPart, kWidePart, kHiddenPart };

template <int kTokens>
using Memory = Shared<kTokens, kTokens == 32 ? 512 : 0>;  // attention writes more than sums of 32 tokens do

// What a block does in each part. With enough tokens there are two blocks for a head, or for 64 columns of the
// widening, each with half of them.
template <int kTokens>
struct Share {
    static constexpr int kHeadTokens = kTokens > 32 ? kTokens / 2 : kTokens;
    static constexpr int kWideTokens = kTokens == 128 ? kTokens / 2 : kTokens;
    static constexpr int kWideBlocks = kWideTiles * (kTokens / kWideTokens);
    int head_tile = blockIdx.x % kHeadTiles, head_token = blockIdx.x / kHeadTiles * kHeadTokens;
    bool heads = blockIdx.x < kHeadTiles * (kTokens / kHeadTokens);
    int tile = blockIdx.x % kOutputTiles, split = blockIdx.x / kOutputTiles;
    int wide_index = static_cast<int>(blockIdx.x) - (kBlocks - kWideBlocks);  // the last blocks: the first have heads
    bool wide = wide_index >= 0;
    int wide_tile = blockIdx.x % kWideTiles, wide_token = wide_index / kWideTiles * kWideTokens;
};

template <int kTokens>
__device__ void request_weights(const Stack& stack, Ring ring, uint32_t quiet) {
    constexpr int kAhead = Memory<kTokens>::kAhead;
    const Share<kTokens> share;
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const auto tile = [&](Weight weight, int index) {
            return [=, map = stack.weights + layer * kWeights + weight](uint32_t to, int column, uint32_t barrier) {
                fetch(to, map, column, index * kTileRows, barrier, kReadOnce);
            };
        };
        if (share.heads) request_tile<kAhead>(ring, 0, kHidden, tile(kQkvWeight, share.head_tile));
        request_tile<kAhead>(ring, share.split * kContext, kContext, tile(kOutputWeight, share.tile));
        if (share.wide) request_tile<kAhead>(ring, 0, kHidden, tile(kWideWeight, share.wide_tile));
        request_tile<kAhead>(ring, share.split * kWide, kWide, tile(kNarrowWeight, share.tile));
        wait_for(quiet, layer % 2);
    }
}

// hidden: a map of the tokens of a block of heads, and one of those of a block of the widening.
template <int kTokens>
__device__ void request_all_rows(const Stack& stack, const Memory<kTokens>& shared, const CUtensorMap* (&hidden)[2],
                                 const CUtensorMap* context, const CUtensorMap* wide) {
    constexpr int kHeadTokens = Share<kTokens>::kHeadTokens, kWideTokens = Share<kTokens>::kWideTokens;
    const Share<kTokens> share;
    const uint32_t tokens = stack.num_tokens, queries = 2 * query_groups(tokens);
    Ring ring = shared.rows();
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const auto at = [&](Part part, int group = 0) { return counter(stack.counters, layer, part, group); };
        const uint32_t* before = counter(stack.counters, max(layer - 1, 0), kHiddenPart);
        if (share.heads)
            request_rows<kHeadTokens>(ring, hidden[0], 0, kHidden, before, layer > 0 ? tokens : 0, share.head_token);
        request_rows<kTokens>(ring, context, share.split * kContext, kContext, at(kAttentionPart, share.split),
                              queries);
        if (share.wide)
            request_rows<kWideTokens>(ring, hidden[1], 0, kHidden, at(kAttendedPart), tokens, share.wide_token);
        request_rows<kTokens>(ring, wide, share.split * kWide, kWide, at(kWidePart, share.split),
                              share.kWideBlocks / kSplits);
    }
}

// Of this thread's two rows of the weight; the second is 8 further.
__device__ __forceinline__ float2 read_bias(const __nv_bfloat16* bias, int tile) {
    const __nv_bfloat16* at = bias + tile * kTileRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    return make_float2(__bfloat162float(at[0]), __bfloat162float(at[8]));
}

template <int kMine, bool kGelu>
__device__ __forceinline__ void add_bias(float2 bias, float (&sums)[kMine / 2]) {
#pragma unroll
    for (int i = 0; i < kMine / 2; ++i) sums[i] += i % 4 < 2 ? bias.x : bias.y;
    if (!kGelu) return;
#pragma unroll
    for (int i = 0; i < kMine / 4; ++i) gelu(sums[i / 2 * 4 + i % 2], sums[i / 2 * 4 + 2 + i % 2]);  // of a token
}

// 64 columns of a product, of this warpgroup's `here` tokens, with their biases. out: the first token's row.
template <int kMine, bool kGelu>
__device__ __forceinline__ void multiply_and_store(const __nv_bfloat16* biases, int tile, Products& products,
                                                   uint32_t stage, __nv_bfloat16* out, int here, int width) {
    float sums[kMine / 2];
    const float2 bias = read_bias(biases, tile);
    products.multiply_next<kMine>(kHidden, sums);
    add_bias<kMine, kGelu>(bias, sums);
    store<kMine>(sums, stage, out + tile * kTileRows, here, width, 1 + warpgroup());
}

// Where a layer's heads are: in turns, so that one is kNothing long before it is waited for.
__device__ __forceinline__ __nv_bfloat16* heads_of(const Stack& stack, int layer) {
    return stack.qkv + layer % 2 * kMaxTokens * H::kQkvWidth;
}

// Makes what this block wrote of the heads kNothing again. All have read them: they are behind the attention. The
// same words are written again two layers later, by other threads.
template <int kTokens>
__device__ __forceinline__ void forget_heads(const Stack& stack, const Share<kTokens>& share, int layer) {
    const int first = share.head_token, stop = min(first + share.kHeadTokens, stack.num_tokens);
    __nv_bfloat16* out = heads_of(stack, layer) + share.head_tile * kTileRows + threadIdx.x % 8 * 8;
    for (int token = first + threadIdx.x / 8; token < stop; token += kComputing / 8)
        *reinterpret_cast<uint4*>(out + token * H::kQkvWidth) = make_uint4(kNothing, kNothing, kNothing, kNothing);
    __threadfence();
    sync_block();
}

// Of token blockIdx.x: hidden = residual = LayerNorm(residual + its partial sums + bias).
__device__ __forceinline__ void add_and_norm(const Stack& stack, const Sum& sum, uint32_t scratch,
                                             float (&residual)[4]) {
    const int at = blockIdx.x * kHidden + threadIdx.x * 4;
    const auto read = [](const __nv_bfloat16* from) {
        return __ldg(reinterpret_cast<const uint2*>(from) + threadIdx.x);
    };
    const uint2 bias = read(sum.bias), weight = read(sum.weight), shift = read(sum.shift);
    float factors[4] = {}, shifts[4] = {};
    add(weight, factors), add(shift, shifts), add(bias, residual);
    take_partials(stack.partials + at, stack.num_tokens * kHidden, residual);
    const Moments moments = moments_of_row<kWarps>(residual, scratch);
    const float factor = rsqrtf(moments.squares / kHidden + stack.eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) residual[i] = (residual[i] - moments.mean) * factor * factors[i] + shifts[i];
    store_row(stack.hidden + at, residual);
}

template <int kTokens>
__device__ __forceinline__ void compute(const Stack& stack, const Memory<kTokens>& shared) {
    constexpr int kMine = kTokens / 2;
    const Share<kTokens> share;
    const int tokens = stack.num_tokens, first = blockIdx.x / H::kQueryHeads * 16;
    const auto here = [&](int from, int most) { return max(min(tokens - from, most), 0); };
    constexpr int kMyHeads = Share<kTokens>::kHeadTokens / 2, kMyWide = Share<kTokens>::kWideTokens / 2;
    const int mine = warpgroup() * kMine, head_token = share.head_token + warpgroup() * kMyHeads;
    const int wide_token = share.wide_token + warpgroup() * kMyWide, barrier = 1 + warpgroup();
    const bool attends = first < tokens, adds = blockIdx.x < tokens;
    const uint32_t stage = shared.stage();
    __nv_bfloat16* partials = stack.partials + (share.split * tokens + mine) * kHidden + share.tile * kTileRows;
    Products products{shared.weights(), shared.rows()};
    float sums[kMine / 2], residual[4] = {};
    if (adds) add(*reinterpret_cast<const uint2*>(stack.hidden + blockIdx.x * kHidden + threadIdx.x * 4), residual);
    const Bounds bounds = attends ? find_bounds(stack.offsets, stack.num_seqs, first, tokens, false) : Bounds{};
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const Layer& numbers = stack.layers[layer];
        const auto at = [&](Part part, int group = 0) { return counter(stack.counters, layer, part, group); };
        if (share.heads)
            multiply_and_store<kMyHeads, false>(numbers.qkv, share.head_tile, products, stage,
                                                heads_of(stack, layer) + head_token * H::kQkvWidth,
                                                here(head_token, kMyHeads), H::kQkvWidth);
        if (attends) {
            sync_block();
            // With nothing but padding it waits for nothing here. Caution: what else it waits for keeps it from
            // writing sums that are still to be read, but only by way of other blocks.
            if (layer > 0 && bounds.first >= bounds.last)
                while (counted(counter(stack.counters, layer - 1, kHiddenPart)) < tokens) {
                }
            attend<H>(heads_of(stack, layer), nullptr, bounds, 0, stack.scale, shared.scratch(), stack.context, tokens);
            count(at(kAttentionPart, blockIdx.x % H::kQueryHeads / 2));
        }
        products.multiply_next<kMine>(kContext, sums);
        store<kMine>(sums, stage, partials, here(mine, kMine), kHidden, barrier);
        if (adds) {
            sync_block();
            add_and_norm(stack, numbers.attended, shared.scratch(), residual);
            count(at(kAttendedPart));
        }
        if (share.wide) {
            multiply_and_store<kMyWide, true>(numbers.wide, share.wide_tile, products, stage,
                                              stack.wide + wide_token * kInner, here(wide_token, kMyWide), kInner);
            count(at(kWidePart, share.wide_tile / (kWideTiles / kSplits)));
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.quiet());
        products.multiply_next<kMine>(kWide, sums);
        store<kMine>(sums, stage, partials, here(mine, kMine), kHidden, barrier);
        if (adds) {
            sync_block();
            add_and_norm(stack, numbers.hidden, shared.scratch(), residual);
            count(at(kHiddenPart));
        }
        if (share.heads) forget_heads(stack, share, layer);
    }
}

template <int kTokens>
__device__ __forceinline__ void run(const CUtensorMap* heads, const CUtensorMap* wide, const CUtensorMap* context,
                                    const CUtensorMap* narrow, const Stack& stack) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Memory<kTokens> shared{shared_address(memory)};
    const CUtensorMap* hidden[2] = {heads, wide};
    divide_work(
        shared, [&] { compute<kTokens>(stack, shared); },
        [&] { request_weights<kTokens>(stack, shared.weights(), shared.quiet()); },
        [&] { request_all_rows<kTokens>(stack, shared, hidden, context, narrow); });
}

}  // namespace

// heads, wide: hidden's columns of the tokens of a block of that part. context, narrow: of what those products read.
#define KERNEL(tokens)                                                                                     \
    extern "C" __global__ __launch_bounds__(kThreads, 1) void encoder_stack_##tokens(                      \
        const __grid_constant__ CUtensorMap heads, const __grid_constant__ CUtensorMap wide,               \
        const __grid_constant__ CUtensorMap context, const __grid_constant__ CUtensorMap narrow,           \
        const __grid_constant__ Stack stack) {                                                             \
        run<tokens>(&heads, &wide, &context, &narrow, stack);                                              \
    }

KERNEL(32)
KERNEL(64)
KERNEL(128)
