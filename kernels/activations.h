// Columns of activations, prepared for the products.
//
// The columns of a tile are interleaved word by word, so that the kernel finds word w of column n
// at tile[w * n_columns + n]. For quantised weights, activations are rounded to signed bytes, with
// one scale for 256 of them (K types) or for 32, as llama.cpp does; beside them stand the sums that
// the formats' offsets and minima are multiplied with. For float weights they stay float32.
//
// A NaN or an infinity among the activations makes the scale NaN, and so every output of that
// column, and of no other.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

// Words of a prepared block of 256 activations.
struct SuperBlockWords {
    static constexpr int inputs = 256;
    static constexpr int codes = 0;        // 4 signed bytes each
    static constexpr int sums_of_16 = 64;  // pairs of int16
    static constexpr int sums_of_32 = 72;  // pairs of int16
    static constexpr int scale = 76;       // float32
    static constexpr int count = 77;
};
// Words of a prepared block of 32 activations.
struct BlockWords {
    static constexpr int inputs = 32;
    static constexpr int codes = 0;
    static constexpr int scale = 8;
    static constexpr int minus_8_sums = 9;  // int32: the sum of the codes times -8, -16, -128
    static constexpr int minus_16_sums = 10;
    static constexpr int minus_128_sums = 11;
    static constexpr int scaled_sum = 12;  // float32: the sum times the scale
    static constexpr int count = 13;
};
// Words of a float32 activation.
struct FloatWords {
    static constexpr int inputs = 1;
    static constexpr int count = 1;
};

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

inline int32_t float_word(float value) {
    int32_t word;
    std::memcpy(&word, &value, 4);
    return word;
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

inline int32_t pair_word(int first, int second) {
    return static_cast<int32_t>((static_cast<uint32_t>(first) & 0xffffU) |
                                (static_cast<uint32_t>(second) << 16));
}

// Tiles (see tiles.h) want the codes of a column side by side; all other words stay interleaved.
template <class W>
struct CodesOfColumn {
    CodesOfColumn(bool side_by_side, int n_columns, int column)
        : first(side_by_side ? column * W::inputs / 4 : column),
          apart(side_by_side ? 1 : n_columns) {}
    int first, apart;
};

inline void prepare_super_blocks(const float *values, int64_t n_inputs, int32_t *tile,
                                 int n_columns, int column, bool for_tiles = false) {
    using W = SuperBlockWords;
    const CodesOfColumn<W> codes(for_tiles, n_columns, column);
    int32_t *block = tile + column, *code = tile + codes.first;
    for (int64_t i = 0; i < n_inputs; i += 256) {
        const float largest = largest_magnitude(values + i, 256);
        const float factor = largest > 0 ? 127.0f / largest : 0.0f;
        int sums[16];
        for (int j = 0; j < 8; j++) {
            put_codes(values + i + 32 * j, factor, code + 8 * j * codes.apart, codes.apart,
                      sums + 2 * j);
        }
        for (int j = 0; j < 8; j++) {
            block[(W::sums_of_16 + j) * n_columns] = pair_word(sums[2 * j], sums[2 * j + 1]);
        }
        for (int j = 0; j < 4; j++) {
            block[(W::sums_of_32 + j) * n_columns] =
                pair_word(sums[4 * j] + sums[4 * j + 1], sums[4 * j + 2] + sums[4 * j + 3]);
        }
        block[W::scale * n_columns] = float_word(largest / 127.0f);
        block += W::count * n_columns;
        code += W::count * n_columns;
    }
}

inline void prepare_blocks(const float *values, int64_t n_inputs, int32_t *tile, int n_columns,
                           int column, bool for_tiles = false) {
    using W = BlockWords;
    const CodesOfColumn<W> codes(for_tiles, n_columns, column);
    int32_t *block = tile + column, *code = tile + codes.first;
    for (int64_t i = 0; i < n_inputs; i += 32) {
        const float largest = largest_magnitude(values + i, 32);
        const float factor = largest > 0 ? 127.0f / largest : 0.0f;
        int sums[2];
        put_codes(values + i, factor, code, codes.apart, sums);
        const int sum = sums[0] + sums[1];
        block[W::scale * n_columns] = float_word(largest / 127.0f);
        block[W::minus_8_sums * n_columns] = -8 * sum;
        block[W::minus_16_sums * n_columns] = -16 * sum;
        block[W::minus_128_sums * n_columns] = -128 * sum;
        block[W::scaled_sum * n_columns] =
            float_word(static_cast<float>(sum) * (largest / 127.0f));
        block += W::count * n_columns;
        code += W::count * n_columns;
    }
}

inline void prepare_floats(const float *values, int64_t n_inputs, int32_t *tile, int n_columns,
                           int column) {
    for (int64_t i = 0; i < n_inputs; i++) {
        tile[i * n_columns + column] = float_word(values[i]);
    }
}

}  // namespace
