// All layers of a small Qwen3 in one launch, for up to 128 tokens of any sequences.
//
// 128 blocks, one a multiprocessor, go through the layers together. A thread of each asks for the weights to come,
// as far as there is room: they depend on nothing, so most are there when the rows are. What others made is waited
// for: by a counter where the copy engine fetches it, else by looking at the numbers themselves, which are kNothing
// until they are written, and again once they are read. A layer is seven parts:
//   heads     QKV; a block has half of a head, its pairs of dimensions side by side, and rotates them
//   attention a block has 16 queries of a head (stack_attention.cuh)
//   output    a block has 64 columns and an eighth of K; partial sums
//   sum       a block has a token: adds its partial sums to the residual, which stays in registers, and norms it
//   gated     SwiGLU; a block has 32 columns
//   down      as output
//   sum       as above, normed for the next layer
// All blocks must run at once: the launch is cooperative.

#include "decoder_fetch.cuh"
#include "decoder_rotation.cuh"

namespace {

// Sums of what `store_squares` left, to `out`, of tokens [tokens][2]; a sync_warpgroup later.
template <int kMine>
__device__ __forceinline__ void tell_squares(uint32_t scratch, float* out, int tokens) {
    const int thread = threadIdx.x % 128;
    if (thread >= tokens) return;
    const float total = add_squares<kMine>(scratch, thread);
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(out + thread * 2), "f"(total) : "memory");
}

// Where a layer's heads and their squares are: in turns, so that one is kNothing long before it is waited for.
__device__ __forceinline__ __nv_bfloat16* heads_of(const Stack& stack, int layer) {
    return stack.qkv + layer % 2 * kMaxTokens * H::kQkvWidth;
}

__device__ __forceinline__ float2* squares_of(const Stack& stack, int layer) {
    return stack.squares + layer % 2 * kMaxTokens * H::kScored;
}

// Makes what this block wrote of the heads kNothing again. All have read them: they are behind the attention. The
// same words are written again two layers later, by other threads, which a sync_block parts from these; blocks that
// meet none have at most 16 tokens, all of warpgroup 0.
template <int kTokens>
__device__ __forceinline__ void forget_heads(const Stack& stack, const Share<kTokens>& share, int layer) {
    const int head = share.head_tile / 2, half = share.head_tile % 2, piece = threadIdx.x % 8;
    const int first = share.first_token, stop = min(first + share.kHeadTokens, stack.num_tokens);
    __nv_bfloat16* out = heads_of(stack, layer) + head * H::kHeadDim + piece / 4 * 64 + half * 32 + piece % 4 * 8;
    for (int token = first + threadIdx.x / 8; token < stop; token += kComputing / 8)
        *reinterpret_cast<uint4*>(out + token * H::kQkvWidth) = make_uint4(kNothing, kNothing, kNothing, kNothing);
    if (head < H::kScored && first + threadIdx.x < stop)
        (&squares_of(stack, layer)[head * kMaxTokens + first + threadIdx.x].x)[half] = __uint_as_float(kNothing);
    __threadfence();
}

// Of token blockIdx.x: residual += its partial sums; hidden = RMSNorm(residual). `last`: hidden is the sums as they
// are, and the residual goes to memory without them.
__device__ __forceinline__ void add_and_norm(const Stack& stack, const __nv_bfloat16* norm, uint32_t scratch,
                                             bool last, float (&residual)[4]) {
    const int at = blockIdx.x * kHidden + threadIdx.x * 4, stride = stack.num_tokens * kHidden;
    const uint2 weight = last ? make_uint2(0, 0) : __ldg(reinterpret_cast<const uint2*>(norm) + threadIdx.x);
    float added[4] = {}, factors[4] = {}, squares = 0;
    take_partials(stack.partials + at, stride, added);
    if (last) {
        store_row(stack.hidden + at, added);
        store_row(stack.residual + at, residual);
        return;
    }
    add(weight, factors);
#pragma unroll
    for (int i = 0; i < 4; ++i) residual[i] += added[i], squares += residual[i] * residual[i];
    const float factor = rsqrtf(sum_of_block(squares, scratch) / kHidden + stack.eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) added[i] = residual[i] * factor * factors[i];
    store_row(stack.hidden + at, added);
}

// The heads of a layer, to all other blocks.
template <int kTokens>
struct HeadsPart {
    static constexpr int kHeadTokens = Share<kTokens>::kHeadTokens, kMine = kHeadTokens / 2;
    int tile, first, here;  // half head; this warpgroup's first token, and how many it has
    bool rotates;
    __half2 angles[kMine / 4];

    __device__ __forceinline__ HeadsPart(const Stack& stack, const Share<kTokens>& share) : angles{} {
        tile = share.head_tile, first = share.first_token + warpgroup() * kMine;
        here = max(min(stack.num_tokens - first, kMine), 0);
        rotates = tile < 2 * H::kScored;
        if (share.heads && rotates) read_angles<kMine>(stack, first, tile % 2, angles);
    }

    __device__ __forceinline__ void operator()(const Stack& stack, const Memory<kTokens>& shared, Products& products,
                                               const __nv_bfloat16* norms, int layer) const {
        float sums[kMine / 2], squared[kMine / 4] = {};
        const float2 weights = rotates ? read_norm_weights(norms, tile / 2, tile % 2) : float2{};
        products.multiply_next<kMine>(kHidden, sums);
        if (rotates) {
            rotate<kMine>(weights, angles, sums, squared);
            store_squares<kMine>(squared, shared.extra());
        }
        __nv_bfloat16* out = heads_of(stack, layer) + first * H::kQkvWidth + tile / 2 * H::kHeadDim + tile % 2 * 32;
        store<kMine, true>(sums, shared.stage(), out, here, H::kQkvWidth, 1 + warpgroup());
        float2* squares = squares_of(stack, layer) + tile / 2 * kMaxTokens + first;
        if (rotates) tell_squares<kMine>(shared.extra(), &squares->x + tile % 2, here);
    }
};

template <int kTokens>
__device__ __forceinline__ void compute(const Stack& stack, const Memory<kTokens>& shared) {
    constexpr int kMine = kTokens / 2;
    const Share<kTokens> share;
    const int tokens = stack.num_tokens, head = blockIdx.x % H::kQueryHeads, first = blockIdx.x / H::kQueryHeads * 16;
    const int barrier = 1 + warpgroup(), mine = warpgroup() * kMine, here = max(min(tokens - mine, kMine), 0);
    const bool attends = first < tokens, adds = blockIdx.x < tokens;
    const uint32_t stage = shared.stage(), scratch = shared.scratch();
    __nv_bfloat16* partials = stack.partials + (share.split * tokens + mine) * kHidden + share.tile * kTileRows;
    __nv_bfloat16* narrow = stack.narrow + mine * kInner + share.gated_tile * 32;
    Products products{shared.weights(), shared.rows()};
    const HeadsPart<kTokens> make_heads(stack, share);
    float sums[kMine / 2], residual[4] = {};
    if (adds) add(*reinterpret_cast<const uint2*>(stack.residual + blockIdx.x * kHidden + threadIdx.x * 4), residual);
    const Bounds bounds = attends ? find_bounds(stack.offsets, stack.num_seqs, first, tokens, stack.causal) : Bounds{};
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const Layer norms = stack.layers[layer];
        if (share.heads) make_heads(stack, shared, products, norms.heads, layer);
        if (attends) {
            sync_block();
            attend<H>(heads_of(stack, layer), squares_of(stack, layer), bounds, stack.eps, stack.scale, scratch,
                   stack.context, tokens);
            count(counter(stack.counters, layer, kAttentionPart, head / 2));
        }
        products.multiply_next<kMine>(kContext, sums);
        store<kMine>(sums, stage, partials, here, kHidden, barrier);
        if (adds) {
            sync_block();
            add_and_norm(stack, norms.mlp, scratch, false, residual);
            count(counter(stack.counters, layer, kMlpSumPart));
        }
        if (share.gated) {
            products.multiply_next<kMine>(kHidden, sums);
            store_gated<kMine>(sums, stage, narrow, here, kInner, barrier);
            count(counter(stack.counters, layer, kGatedPart, share.gated_tile / (kGatedTiles / kSplits)));
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.quiet());
        products.multiply_next<kMine>(kNarrow, sums);
        store<kMine>(sums, stage, partials, here, kHidden, barrier);
        if (adds) {
            sync_block();
            add_and_norm(stack, norms.next, scratch, layer + 1 == stack.num_layers, residual);
            count(counter(stack.counters, layer, kNextSumPart));
        }
        if (share.heads) forget_heads(stack, share, layer);
    }
}

template <int kTokens>
__device__ __forceinline__ void run(const CUtensorMap* hidden, const CUtensorMap* few, const CUtensorMap* context,
                                    const CUtensorMap* narrow, const Stack& stack) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Memory<kTokens> shared{shared_address(memory)};
    divide_work(
        shared, [&] { compute<kTokens>(stack, shared); },
        [&] { request_weights<kTokens>(stack, shared.weights(), shared.quiet()); },
        [&] { request_all_rows<kTokens>(stack, shared, hidden, few, context, narrow); });
}

}  // namespace

// hidden, context, narrow: their columns of all tokens. few: hidden's of the tokens of a block of heads.
#define KERNEL(tokens)                                                                                     \
    extern "C" __global__ __launch_bounds__(kThreads, 1) void decoder_stack_##tokens(                      \
        const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap few,               \
        const __grid_constant__ CUtensorMap context, const __grid_constant__ CUtensorMap narrow,           \
        const __grid_constant__ Stack stack) {                                                             \
        run<tokens>(&hidden, &few, &context, &narrow, stack);                                              \
    }

KERNEL(32)
KERNEL(64)
KERNEL(128)
