// Rounding activations to signed bytes, with AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

inline float largest_of_8(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// The largest absolute value of n (a multiple of 8) numbers; NaN if one is not finite.
inline float largest_magnitude(const float *values, int n) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 largest = _mm256_setzero_ps(), not_finite = _mm256_setzero_ps();
    for (int i = 0; i < n; i += 8) {
        const __m256 v = _mm256_loadu_ps(values + i);
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v));
        not_finite = _mm256_fmadd_ps(v, _mm256_setzero_ps(), not_finite);  // NaN, or 0
    }
    const __m256 nan = _mm256_cmp_ps(not_finite, not_finite, _CMP_UNORD_Q);
    return _mm256_movemask_ps(nan) ? __builtin_nanf("") : largest_of_8(largest);
}

// 32 numbers times `factor`, rounded to signed bytes.
inline __m256i to_bytes(const float *values, float factor) {
    const __m256 f = _mm256_set1_ps(factor);
    __m256i part[4];
    for (int i = 0; i < 4; i++) {
        part[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(values + 8 * i), f));
    }
    const __m256i shorts_0 = _mm256_packs_epi32(part[0], part[1]);
    const __m256i shorts_1 = _mm256_packs_epi32(part[2], part[3]);
    const __m256i mixed = _mm256_packs_epi16(shorts_0, shorts_1);  // in the order of 128-bit lanes
    return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline int sum_of_16(__m128i bytes) {
    const __m128i shifted = _mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(0x80)));
    const __m128i sums = _mm_sad_epu8(shifted, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

// 32 activations as 8 words from `word` on, `apart` from each other; `sums` are those of each 16.
inline void put_codes(const float *values, float factor, int32_t *word, int apart, int sums[2]) {
    const __m256i bytes = to_bytes(values, factor);
    sums[0] = sum_of_16(_mm256_castsi256_si128(bytes));
    sums[1] = sum_of_16(_mm256_extracti128_si256(bytes, 1));
    alignas(32) int32_t words[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(words), bytes);
    for (int g = 0; g < 8; g++) word[g * apart] = words[g];
}

}  // namespace
