// Rounding activations to signed bytes, with AVX2. (AVX-512 uses it too: it is a small part of the
// work.)
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "products/code_sums.h"

namespace {

inline float largest_of_8(__m256 v) {
    const __m128 of_4 = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 of_2 = _mm_max_ps(of_4, _mm_movehl_ps(of_4, of_4));
    return _mm_cvtss_f32(_mm_max_ss(of_2, _mm_movehdup_ps(of_2)));
}

// The largest magnitude of n numbers (a multiple of 8); NaN if one is not finite.
inline float largest_magnitude(const float *values, int n) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 largest = _mm256_setzero_ps();
    __m256 poison = _mm256_setzero_ps();  // sums 0 * value: NaN if a value is not finite
    for (int i = 0; i < n; i += 8) {
        const __m256 v = _mm256_loadu_ps(values + i);
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v));
        poison = _mm256_fmadd_ps(v, _mm256_setzero_ps(), poison);
    }
    const __m256 nan = _mm256_cmp_ps(poison, poison, _CMP_UNORD_Q);
    return _mm256_movemask_ps(nan) ? __builtin_nanf("") : largest_of_8(largest);
}

// 32 numbers times `factor`, rounded to signed bytes.
inline __m256i to_bytes(const float *values, float factor) {
    const __m256 f = _mm256_set1_ps(factor);
    __m256i part[4];
    for (int i = 0; i < 4; i++) {
        part[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values + 8 * i), f));
    }
    // The packing instructions work within 128-bit lanes; the permutation restores the order.
    const __m256i first_shorts = _mm256_packs_epi32(part[0], part[1]);
    const __m256i second_shorts = _mm256_packs_epi32(part[2], part[3]);
    const __m256i mixed = _mm256_packs_epi16(first_shorts, second_shorts);
    return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline CodeSums code_sums(__m256i bytes) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i positive = _mm256_max_epi8(bytes, zero);
    const __m256i negative = _mm256_subs_epi8(positive, bytes);
    // The instruction sums 8 bytes each. Each 64-bit lane gets both sums, then those of 16 bytes.
    const __m256i of_8 = _mm256_or_si256(_mm256_sad_epu8(positive, zero),
                                         _mm256_slli_epi64(_mm256_sad_epu8(negative, zero), 32));
    const __m256i of_16 = _mm256_add_epi32(of_8, _mm256_shuffle_epi32(of_8, 0x4e));
    const auto first = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(of_16)));
    const auto second =
        static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_extracti128_si256(of_16, 1)));
    return {{static_cast<int>(first & 0xffffffff), static_cast<int>(second & 0xffffffff)},
            {static_cast<int>(first >> 32), static_cast<int>(second >> 32)}};
}

// Round 32 activations and store them as 8 words, `stride` words apart.
inline CodeSums put_codes(const float *values, float factor, int32_t *word, int stride) {
    const __m256i bytes = to_bytes(values, factor);
    alignas(32) int32_t words[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(words), bytes);
    for (int g = 0; g < 8; g++) word[g * stride] = words[g];
    return code_sums(bytes);
}

}  // namespace
