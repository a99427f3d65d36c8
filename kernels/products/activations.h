// Columns of activations, prepared for the products.
//
// The columns of a tile are interleaved word by word: word w of column n is tile[w * n_columns +
// n]. For quantised weights, activations are rounded to signed bytes, with one scale for 256 of
// them (K types) or for 32, as llama.cpp does. The prepared block also contains the sums that the
// offsets and minima of weight formats are multiplied with. For float weights, activations stay
// float32.
//
// A NaN or an infinity among the activations makes the scale NaN, and therefore all outputs of that
// column, but of no other column.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __aarch64__
#include "products/activation_codes_neon.h"
#else
#include "products/activation_codes_avx2.h"
#endif

namespace {

// Where the words of a prepared block of 256 activations are.
struct SuperBlockWords {
    static constexpr int inputs = 256;
    // 64 words of 4 signed bytes.
    static constexpr int codes = 0;
    // The sums of 16 codes each, as pairs of int16.
    static constexpr int sums_of_16 = 64;
    // The sums of 32 codes each, as pairs of int16.
    static constexpr int sums_of_32 = 72;
    // float32: activation = code * scale.
    static constexpr int scale = 76;
    // int32: each 16 codes have a sum of their positive codes and one of their negative codes. This
    // is the largest magnitude of all these sums.
    static constexpr int largest_sum = 77;
    static constexpr int count = 78;
};

// Where the words of a prepared block of 32 activations are.
struct BlockWords {
    static constexpr int inputs = 32;
    // 8 words of 4 signed bytes.
    static constexpr int codes = 0;
    // float32: activation = code * scale.
    static constexpr int scale = 8;
    // int32: the sum of the codes, times -8, -16 or -128. A sum of products starts with it if codes
    // of weights have that offset.
    static constexpr int minus_8_sums = 9;
    static constexpr int minus_16_sums = 10;
    static constexpr int minus_128_sums = 11;
    // float32: the sum of the codes times the scale.
    static constexpr int scaled_sum = 12;
    static constexpr int count = 13;
};

inline int32_t float_word(float value) {
    int32_t word;
    std::memcpy(&word, &value, 4);
    return word;
}

inline int32_t pair_word(int first, int second) {
    return static_cast<int32_t>((static_cast<uint32_t>(first) & 0xffffU) |
                                (static_cast<uint32_t>(second) << 16));
}

// Where the words of codes of one column are in a block of a tile. AMX (amx_tiles.h) needs the
// codes of a column side by side; all other words stay interleaved.
template <class Words>
struct CodePlaces {
    // The first word, and the distance to the next one.
    int first;
    int stride;

    CodePlaces(bool side_by_side, int n_columns, int column)
        : first(side_by_side ? column * Words::inputs / 4 : column),
          stride(side_by_side ? 1 : n_columns) {}
};

// Prepare one column for K types.
inline void prepare_super_blocks(const float *values, int64_t n_inputs, int32_t *tile,
                                 int n_columns, int column, bool for_amx = false) {
    using Words = SuperBlockWords;
    const CodePlaces<Words> codes(for_amx, n_columns, column);
    int32_t *block = tile + column;
    int32_t *code = tile + codes.first;
    for (int64_t i = 0; i < n_inputs; i += 256) {
        const float largest = largest_magnitude(values + i, 256);
        const float factor = largest > 0 ? 127.0f / largest : 0.0f;
        int sums[16];
        int32_t largest_sum = 0;
        for (int j = 0; j < 8; j++) {
            const CodeSums of_16 = put_codes(values + i + 32 * j, factor,
                                                code + 8 * j * codes.stride, codes.stride);
            for (int half = 0; half < 2; half++) {
                sums[2 * j + half] = of_16.positive[half] - of_16.negative[half];
                if (of_16.positive[half] > largest_sum) largest_sum = of_16.positive[half];
                if (of_16.negative[half] > largest_sum) largest_sum = of_16.negative[half];
            }
        }
        for (int j = 0; j < 8; j++) {
            block[(Words::sums_of_16 + j) * n_columns] = pair_word(sums[2 * j], sums[2 * j + 1]);
        }
        for (int j = 0; j < 4; j++) {
            block[(Words::sums_of_32 + j) * n_columns] =
                pair_word(sums[4 * j] + sums[4 * j + 1], sums[4 * j + 2] + sums[4 * j + 3]);
        }
        block[Words::scale * n_columns] = float_word(largest / 127.0f);
        block[Words::largest_sum * n_columns] = largest_sum;
        block += Words::count * n_columns;
        code += Words::count * n_columns;
    }
}

// Prepare one column for types with blocks of 32 weights.
inline void prepare_blocks(const float *values, int64_t n_inputs, int32_t *tile, int n_columns,
                           int column, bool for_amx = false) {
    using Words = BlockWords;
    const CodePlaces<Words> codes(for_amx, n_columns, column);
    int32_t *block = tile + column;
    int32_t *code = tile + codes.first;
    for (int64_t i = 0; i < n_inputs; i += 32) {
        const float largest = largest_magnitude(values + i, 32);
        const float factor = largest > 0 ? 127.0f / largest : 0.0f;
        const CodeSums of_16 = put_codes(values + i, factor, code, codes.stride);
        const int sum = of_16.positive[0] + of_16.positive[1] - of_16.negative[0] -
                        of_16.negative[1];
        block[Words::scale * n_columns] = float_word(largest / 127.0f);
        block[Words::minus_8_sums * n_columns] = -8 * sum;
        block[Words::minus_16_sums * n_columns] = -16 * sum;
        block[Words::minus_128_sums * n_columns] = -128 * sum;
        block[Words::scaled_sum * n_columns] =
            float_word(static_cast<float>(sum) * (largest / 127.0f));
        block += Words::count * n_columns;
        code += Words::count * n_columns;
    }
}

// Prepare one column for float weights: only interleave it.
inline void prepare_floats(const float *values, int64_t n_inputs, int32_t *tile, int n_columns,
                           int column) {
    for (int64_t i = 0; i < n_inputs; i++) {
        tile[i * n_columns + column] = float_word(values[i]);
    }
}

}  // namespace
