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
    // For two sub-blocks of 32 at a time, what brings their sums of products with codes of 4 bits
    // into the range of an int16: see `shift_word`.
    static constexpr int shifts_of_32 = 77;
    static constexpr int count = 81;
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

// A shift that makes sums of products of 32 signed bytes fit into an int16, whatever the other
// factors are: codes of 4 bits. It is 0 unless the bytes of one sign are very large; then it is -8
// times the sum of the bytes, as if the codes were -8 to 7.
inline int short_shift(int sum, int sum_of_magnitudes) {
    const int sum_of_one_sign = (sum_of_magnitudes + (sum < 0 ? -sum : sum)) / 2;
    return 15 * sum_of_one_sign <= 32767 ? 0 : -8 * sum;
}

// The shifts of two sums as a word to add to (second sum << 16) + first sum. Its low half is too
// large by `short_bias`, so that the low half of the result is never negative.
constexpr int short_bias = 0x8000;
inline int32_t shift_word(int first, int second) {
    return pair_word(first + short_bias, second);
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
        int shifts[8];
        for (int j = 0; j < 8; j++) {
            const int magnitudes = put_codes(values + i + 32 * j, factor,
                                             code + 8 * j * codes.stride, codes.stride,
                                             sums + 2 * j);
            shifts[j] = short_shift(sums[2 * j] + sums[2 * j + 1], magnitudes);
        }
        for (int j = 0; j < 8; j++) {
            block[(Words::sums_of_16 + j) * n_columns] = pair_word(sums[2 * j], sums[2 * j + 1]);
        }
        for (int j = 0; j < 4; j++) {
            block[(Words::sums_of_32 + j) * n_columns] =
                pair_word(sums[4 * j] + sums[4 * j + 1], sums[4 * j + 2] + sums[4 * j + 3]);
            block[(Words::shifts_of_32 + j) * n_columns] =
                shift_word(shifts[2 * j], shifts[2 * j + 1]);
        }
        block[Words::scale * n_columns] = float_word(largest / 127.0f);
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
        int sums[2];
        put_codes(values + i, factor, code, codes.stride, sums);
        const int sum = sums[0] + sums[1];
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
