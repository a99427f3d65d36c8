// Rounding activations to signed bytes, with NEON: to the same ones as activation_codes_avx2.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "products/code_sums.h"

namespace {

// The largest magnitude of n numbers (a multiple of 4); NaN if one is not finite.
inline float largest_magnitude(const float *values, int n) {
    float32x4_t largest = vdupq_n_f32(0);
    float32x4_t poison = vdupq_n_f32(0);  // sums 0 * value: NaN if a value is not finite
    for (int i = 0; i < n; i += 4) {
        const float32x4_t v = vld1q_f32(values + i);
        largest = vmaxq_f32(largest, vabsq_f32(v));
        poison = vfmaq_f32(poison, v, vdupq_n_f32(0));
    }
    const bool finite = vminvq_u32(vceqq_f32(poison, poison)) != 0;
    return finite ? vmaxvq_f32(largest) : __builtin_nanf("");
}

// 16 numbers times `factor`, rounded to signed bytes.
inline int8x16_t to_bytes(const float *values, float factor) {
    int16x4_t part[4];
    for (int i = 0; i < 4; i++) {
        part[i] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(values + 4 * i), factor)));
    }
    return vcombine_s8(vqmovn_s16(vcombine_s16(part[0], part[1])),
                       vqmovn_s16(vcombine_s16(part[2], part[3])));
}

// Round 32 activations and store them as 8 words, `stride` words apart.
inline CodeSums put_codes(const float *values, float factor, int32_t *word, int stride) {
    CodeSums sums;
    int32_t words[8];
    for (int i = 0; i < 2; i++) {
        const int8x16_t bytes = to_bytes(values + 16 * i, factor);
        const int8x16_t positive = vmaxq_s8(bytes, vdupq_n_s8(0));
        sums.positive[i] = vaddlvq_s8(positive);
        sums.negative[i] = vaddlvq_s8(vsubq_s8(positive, bytes));
        vst1q_s32(words + 4 * i, vreinterpretq_s32_s8(bytes));
    }
    for (int g = 0; g < 8; g++) word[g * stride] = words[g];
    return sums;
}

}  // namespace
