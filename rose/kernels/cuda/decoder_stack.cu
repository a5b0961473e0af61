// All layers of a small Qwen3 in one launch, for up to 128 tokens of any sequences.
//
// 128 blocks, one a multiprocessor, go through the layers together. Where one needs what others made it waits for
// a counter in device memory (0.9 µs on an H200, a third of a kernel's launch, ramp-up and tail), while a thread
// of its own keeps asking for the weights to come: those depend on nothing, so they are there when the rows are.
// A layer is seven parts:
//   heads     QKV; a block has half of a head, its pairs of dimensions side by side, and rotates them
//   attention a block has 16 queries of a head (decoder_attention.cuh)
//   output    a block has 64 columns and an eighth of K; partial sums
//   sum       a block has a token: adds its partial sums to the residual, which stays in registers, and norms it
//   gated     SwiGLU; a block has 32 columns
//   down      as output
//   sum       as above, normed for the next layer
// All blocks must run at once: the launch is cooperative.

#include "decoder_attention.cuh"

namespace {

constexpr int kThreads = 192;  // a warpgroup that computes, a warp that asks for weights, one for rows
constexpr int kBlocks = 128, kHidden = 1024, kInner = 3072;
constexpr int kSplits = 8, kOutputTiles = kHidden / kTileRows, kGatedTiles = 2 * kInner / kTileRows;
constexpr int kHeadTiles = 2 * kHeads, kNarrow = kInner / kSplits, kContext = kQueryHeads * kHeadDim;
constexpr int kScratchBytes = 34 * 1024;
constexpr int kRingBytes = 227 * 1024 - kHeaderBytes - kScratchBytes;

enum Part { kHeadsPart, kAttentionPart, kOutputPart, kMlpSumPart, kGatedPart, kDownPart, kNextSumPart, kParts };
enum Weight { kQkvWeight, kOutputWeight, kGatedWeight, kDownWeight, kWeights };

// Of one layer: the norms of queries and keys [2, 128], of the MLP's input and of the next layer's, [1024] each.
struct Layer {
    const __nv_bfloat16 *heads, *mlp, *next;
};

struct Stack {
    const CUtensorMap* weights;  // [layers][kWeights]
    const Layer* layers;
    __nv_bfloat16 *hidden, *residual, *qkv, *context, *narrow, *partials;
    float* squares;       // [kRotatedHeads][kTokens][2]: sums of squares of each half of a head before its norm
    const float* angles;  // [positions][128]: cosines, then sines
    const int *positions, *offsets;
    uint32_t* counters;  // [layers][kParts][kGroups][8], zeros; the first of each eight counts
    int num_layers, num_tokens, num_seqs, causal;
    float eps, scale;
};

__device__ __forceinline__ uint32_t* counter(const Stack& stack, int layer, int part, int group = 0) {
    return stack.counters + ((layer * kParts + part) * kGroups + group) * 8;
}

// A ring of slots in shared memory, each with a barrier that tells it is full and one that tells it is empty.
struct Ring {
    uint32_t full, empty, slots, bytes;
    int count, slot;
    uint32_t parity;

    __device__ uint32_t here() const { return slots + slot * bytes; }
    __device__ uint32_t is_full() const { return full + slot * 8; }
    __device__ uint32_t is_empty() const { return empty + slot * 8; }
    __device__ void next() {
        if (++slot == count) slot = 0, parity ^= 1;
    }
    // For the thread that fills it: until the slot is empty, then the barrier for what will come.
    __device__ uint32_t open() const {
        wait_for(is_empty(), parity ^ 1);
        expect_bytes(is_full(), bytes);
        return is_full();
    }
};

template <int kTokens>
struct Shared {
    static constexpr int kRowBytes = kTokens * kChunk * 2;
    static constexpr int kRowSlots = kTokens == 128 ? 6 : kTokens == 16 ? 16 : 8;
    static constexpr int kWeightSlots = (kRingBytes - kRowSlots * kRowBytes) / kTileBytes;
    static_assert(2 * (kRowSlots + kWeightSlots) * 8 <= kHeaderBytes, "barriers");
    uint32_t base;

    __device__ Ring weights() const {
        return {base, base + kWeightSlots * 8, base + kHeaderBytes, kTileBytes, kWeightSlots, 0, 0};
    }
    __device__ Ring rows() const {
        const uint32_t at = base + 2 * kWeightSlots * 8;
        return {at, at + kRowSlots * 8, base + kHeaderBytes + kWeightSlots * kTileBytes, kRowBytes, kRowSlots, 0, 0};
    }
    __device__ uint32_t scratch() const { return base + kHeaderBytes + kRingBytes; }
};

// What a block does in each part.
struct Share {
    int tile = blockIdx.x % kOutputTiles, split = blockIdx.x / kOutputTiles;
    bool heads = blockIdx.x < kHeadTiles, gated = blockIdx.x >= kBlocks - kGatedTiles;
    int gated_tile = blockIdx.x - (kBlocks - kGatedTiles);
};

// Half a head: of its eight groups of 8 rows, and of the eight that are 64 rows further, four in turn.
__device__ __forceinline__ void fetch_half_head(uint32_t to, const CUtensorMap* map, int column, int tile,
                                                uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(map), "r"(column), "r"(0), "r"(tile % 2 * 4), "r"(tile / 2), "r"(barrier), "l"(kReadOnce)
        : "memory");
}

template <int kTokens>
__device__ void request_weights(const Stack& stack, Ring ring) {
    const Share share;
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const CUtensorMap* maps = stack.weights + layer * kWeights;
        if (share.heads)
            for (int at = 0; at < kHidden; at += kChunk, ring.next())
                fetch_half_head(ring.here(), maps + kQkvWeight, at, blockIdx.x, ring.open());
        for (int at = 0; at < kContext / kSplits; at += kChunk, ring.next())
            fetch(ring.here(), maps + kOutputWeight, share.split * (kContext / kSplits) + at,
                  share.tile * kTileRows, ring.open(), kReadOnce);
        if (share.gated)
            for (int at = 0; at < kHidden; at += kChunk, ring.next())
                fetch_gated(ring.here(), maps + kGatedWeight, at, share.gated_tile * kTileRows, ring.open());
        for (int at = 0; at < kNarrow; at += kChunk, ring.next())
            fetch(ring.here(), maps + kDownWeight, share.split * kNarrow + at, share.tile * kTileRows, ring.open(),
                  kReadOnce);
    }
}

// Until the counter has that value, for the copy engine as well.
__device__ __forceinline__ void await_rows(const uint32_t* counter, uint32_t value) {
    while (counted(counter) < value) {
    }
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void request_columns(Ring& ring, const CUtensorMap* map, int first, int columns) {
    for (int at = 0; at < columns; at += kChunk, ring.next())
        fetch(ring.here(), map, first + at, 0, ring.open(), kReadOften);
}

template <int kTokens>
__device__ void request_rows(const Stack& stack, Ring ring, const CUtensorMap* hidden, const CUtensorMap* context,
                             const CUtensorMap* narrow) {
    const Share share;
    const uint32_t tokens = stack.num_tokens, queries = 2 * query_groups(tokens);
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        if (share.heads) {
            if (layer > 0) await_rows(counter(stack, layer - 1, kNextSumPart), tokens);
            request_columns(ring, hidden, 0, kHidden);
        }
        await_rows(counter(stack, layer, kAttentionPart, share.split), queries);
        request_columns(ring, context, share.split * (kContext / kSplits), kContext / kSplits);
        if (share.gated) {
            await_rows(counter(stack, layer, kMlpSumPart), tokens);
            request_columns(ring, hidden, 0, kHidden);
        }
        await_rows(counter(stack, layer, kGatedPart, share.split), kGatedTiles / kSplits);
        request_columns(ring, narrow, share.split * kNarrow, kNarrow);
    }
}

// sums = weight [64, chunks * 64] @ rows [kTokens, chunks * 64]^T, from what the rings hold next.
template <int kTokens>
__device__ __forceinline__ void product(Ring& weights, Ring& rows, int chunks, float (&sums)[kTokens / 2]) {
    const bool reports = threadIdx.x % 32 == 0;
    uint32_t weight_read = 0, row_read = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const uint64_t weight = descriptor(weights.here()), row = descriptor(rows.here());
        wait_for(weights.is_full(), weights.parity);
        wait_for(rows.is_full(), rows.parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < kChunk / 16; ++step)  // 16 columns are 32 bytes: 2 in a descriptor's units
            multiply<kTokens>(sums, weight + step * 2, row + step * 2, chunk + step > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (chunk > 0) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (reports) arrive(weight_read), arrive(row_read);
        }
        weight_read = weights.is_empty(), row_read = rows.is_empty();
        weights.next(), rows.next();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (reports) arrive(weight_read), arrive(row_read);
}

// cos and sin of this thread's pair of dimensions at each of its tokens; the same in every layer.
template <int kTokens>
__device__ __forceinline__ void read_angles(const Stack& stack, __half2 (&angles)[kTokens / 4]) {
    const int pair = pair_of_thread();
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
        const int token = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (token >= stack.num_tokens) continue;
        const float* row = stack.angles + static_cast<int64_t>(stack.positions[token]) * kHeadDim + pair;
        angles[i] = __floats2half2_rn(row[0], row[kHeadDim / 2]);
    }
}

// Norms' weights and rotation of the pairs in `sums`; their squares before that to `squares` of the other blocks.
template <int kTokens>
__device__ __forceinline__ void rotate(const Stack& stack, const __nv_bfloat16* norms, uint32_t scratch,
                                       const __half2 (&angles)[kTokens / 4], float (&sums)[kTokens / 2]) {
    constexpr int kPitch = kTokens + 8;  // words: what eight rows of a warp write falls into different banks
    const int head = blockIdx.x / 2, pair = pair_of_thread(), band = threadIdx.x / 4, column = threadIdx.x % 4;
    const __nv_bfloat16* weight = norms + (head < kQueryHeads ? 0 : kHeadDim) + pair;
    const float first_weight = __bfloat162float(weight[0]), second_weight = __bfloat162float(weight[kHeadDim / 2]);
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
        float squares[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float &first = sums[j * 4 + i], &second = sums[j * 4 + 2 + i];
            squares[i] = first * first + second * second;
            const float2 angle = __half22float2(angles[j * 2 + i]);
            const float a = first * first_weight, b = second * second_weight;
            first = a * angle.x - b * angle.y;
            second = b * angle.x + a * angle.y;
        }
        store_shared(scratch + (band * kPitch + j * 8 + column * 2) * 4, squares[0], squares[1]);
    }
    sync_warpgroup();
    if (threadIdx.x < kTokens) {
        float total = 0;
#pragma unroll
        for (int row = 0; row < 32; ++row) total += load_shared(scratch + (row * kPitch + threadIdx.x) * 4);
        __stcg(stack.squares + (head * kTokens + threadIdx.x) * 2 + blockIdx.x % 2, total);
    }
}

// Of token blockIdx.x: residual += its partial sums; hidden = RMSNorm(residual), or the sums as they are if `last`.
__device__ __forceinline__ void add_and_norm(const Stack& stack, const __nv_bfloat16* norm, uint32_t scratch,
                                             bool last, float (&residual)[8]) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kHidden + threadIdx.x * 8;
    const int64_t stride = static_cast<int64_t>(stack.num_tokens) * kHidden;
    uint4 parts[kSplits];
#pragma unroll
    for (int i = 0; i < kSplits; ++i)
        parts[i] = __ldcg(reinterpret_cast<const uint4*>(stack.partials + i * stride + at));
    float added[8] = {};
#pragma unroll
    for (int i = 0; i < kSplits; ++i) add(parts[i], added);
    if (last) {
        store_row(stack.hidden + at, added);
        store_row(stack.residual + at, residual);
        return;
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) residual[i] += added[i], squares += residual[i] * residual[i];
    float weight[8] = {};
    add(__ldg(reinterpret_cast<const uint4*>(norm) + threadIdx.x), weight);
    const float factor = rsqrtf(sum_of_warpgroup(squares, scratch) / kHidden + stack.eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) added[i] = residual[i] * factor * weight[i];
    store_row(stack.hidden + at, added);
}

template <int kTokens>
__device__ __forceinline__ void compute(const Stack& stack, const Shared<kTokens>& shared) {
    const Share share;
    const uint32_t scratch = shared.scratch();
    const int tokens = stack.num_tokens, head = blockIdx.x % kQueryHeads, first = blockIdx.x / kQueryHeads * 16;
    const bool attends = first < tokens, adds = blockIdx.x < tokens;
    const int64_t split_stride = static_cast<int64_t>(tokens) * kHidden;
    __nv_bfloat16* partials = stack.partials + share.split * split_stride + share.tile * kTileRows;
    Ring weights = shared.weights(), rows = shared.rows();
    __half2 angles[kTokens / 4] = {};
    float sums[kTokens / 2], residual[8] = {};
    if (share.heads && blockIdx.x < 2 * kRotatedHeads) read_angles<kTokens>(stack, angles);
    if (adds) add(*reinterpret_cast<const uint4*>(stack.residual + blockIdx.x * kHidden + threadIdx.x * 8), residual);
    const Bounds bounds = attends ? find_bounds(stack.offsets, stack.num_seqs, first, tokens, stack.causal) : Bounds{};
#pragma unroll 1
    for (int layer = 0; layer < stack.num_layers; ++layer) {
        const Layer norms = stack.layers[layer];
        if (share.heads) {
            product<kTokens>(weights, rows, kHidden / kChunk, sums);
            if (blockIdx.x < 2 * kRotatedHeads) rotate<kTokens>(stack, norms.heads, scratch + kTokens * 128, angles, sums);
            const int tile = blockIdx.x, out = tile / 2 * kHeadDim + tile % 2 * 32;
            store<kTokens, true>(sums, scratch, stack.qkv + out, tokens, kQkvWidth, 1);
            count(counter(stack, layer, kHeadsPart, key_head(tile / 2)));
        }
        if (attends) {
            await(counter(stack, layer, kHeadsPart, head / 2), 8);
            attend(stack.qkv, stack.squares, kTokens, bounds, stack.eps, stack.scale, scratch, stack.context, tokens);
            count(counter(stack, layer, kAttentionPart, head / 2));
        }
        product<kTokens>(weights, rows, kContext / kSplits / kChunk, sums);
        store<kTokens>(sums, scratch, partials, tokens, kHidden, 1);
        count(counter(stack, layer, kOutputPart));
        if (adds) {
            await(counter(stack, layer, kOutputPart), kBlocks);
            add_and_norm(stack, norms.mlp, scratch, false, residual);
            count(counter(stack, layer, kMlpSumPart));
        }
        if (share.gated) {
            product<kTokens>(weights, rows, kHidden / kChunk, sums);
            store_gated<kTokens>(sums, scratch, stack.narrow + share.gated_tile * 32, tokens, kInner);
            count(counter(stack, layer, kGatedPart, share.gated_tile / (kGatedTiles / kSplits)));
        }
        product<kTokens>(weights, rows, kNarrow / kChunk, sums);
        store<kTokens>(sums, scratch, partials, tokens, kHidden, 1);
        count(counter(stack, layer, kDownPart));
        if (adds) {
            await(counter(stack, layer, kDownPart), kBlocks);
            add_and_norm(stack, norms.next, scratch, layer + 1 == stack.num_layers, residual);
            count(counter(stack, layer, kNextSumPart));
        }
    }
}

template <int kTokens>
__device__ __forceinline__ void run(const CUtensorMap* hidden, const CUtensorMap* context, const CUtensorMap* narrow,
                                    const Stack& stack) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Shared<kTokens> shared{shared_address(memory)};
    if (threadIdx.x == 0) {
        for (const Ring& ring : {shared.weights(), shared.rows()})
            for (int slot = 0; slot < ring.count; ++slot)
                start_barrier(ring.full + slot * 8, 1), start_barrier(ring.empty + slot * 8, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 128) request_weights<kTokens>(stack, shared.weights());
    if (threadIdx.x == 160) request_rows<kTokens>(stack, shared.rows(), hidden, context, narrow);
    if (threadIdx.x < 128) compute<kTokens>(stack, shared);
}

}  // namespace

#define KERNEL(tokens)                                                                                     \
    extern "C" __global__ __launch_bounds__(kThreads, 1) void decoder_stack_##tokens(                      \
        const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap context,           \
        const __grid_constant__ CUtensorMap narrow, const __grid_constant__ Stack stack) {                 \
        run<tokens>(&hidden, &context, &narrow, stack);                                                    \
    }

KERNEL(16)
KERNEL(32)
KERNEL(64)
KERNEL(128)
