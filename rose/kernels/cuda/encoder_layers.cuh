// What both kernels of all layers of a large BERT or XLM-R are given, and GELU.

#pragma once

#include "stack_attention.cuh"

namespace {

using H = Heads<16, 16, 64, false>;
constexpr int kInner = 4096;

enum Weight { kQkvWeight, kOutputWeight, kWideWeight, kNarrowWeight, kWeights };

// A sum's bias, and the weight and bias of the LayerNorm after it: [1024] each.
struct Sum {
    const __nv_bfloat16 *bias, *weight, *shift;
};

// Of one layer. qkv [3072], wide [4096]: biases.
struct Layer {
    const __nv_bfloat16 *qkv, *wide;
    Sum attended, hidden;
};

// partials are kNothing before and after; in the kernel for few tokens also qkv. Sizes are that one's; in
// encoder_wide.cu qkv is [2][most tokens][kQkvWidth], and partials are [2][kWideSplits][num_tokens][kHidden].
struct Stack {
    const CUtensorMap* weights;  // [layers][kWeights]
    const Layer* layers;
    __nv_bfloat16 *hidden, *context, *wide;
    __nv_bfloat16 *qkv, *partials;  // [2][kMaxTokens][kQkvWidth], [kSplits][num_tokens][kHidden]
    const int* offsets;
    uint32_t* counters;
    int num_layers, num_tokens, num_seqs;
    float eps, scale;
};

// Coefficients of p as in rose/aot/gelu_polynomial.py.
constexpr float kGelu0 = -2.301121338633301f, kGelu1 = -0.10677572451526302f, kGelu2 = 0.0010142631142668259f;

// 2^(x * p(x²)), where gelu(x) = x / (1 + that) to 2.6e-5. Beyond 6 it is next to nothing, or all.
__device__ __forceinline__ float gelu_power(float x) {
    const float near = fminf(fmaxf(x, -6.0f), 6.0f), square = near * near;
    return power_of_two(near * (kGelu0 + square * (kGelu1 + square * kGelu2)));
}

// Of two numbers of a token, which share a reciprocal: no product of two such sums is too large.
__device__ __forceinline__ void gelu(float& a, float& b) {
    const float under_a = 1 + gelu_power(a), under_b = 1 + gelu_power(b);
    float both;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(both) : "f"(under_a * under_b));
    a *= both * under_b, b *= both * under_a;
}

}  // namespace
