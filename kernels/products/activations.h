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

#include <cstdint>
#include <cstring>

#ifdef __aarch64__
#include "products/activation_codes_neon.h"
#else
#include "products/activation_codes_avx2.h"
#endif

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

inline int32_t float_word(float value) {
    int32_t word;
    std::memcpy(&word, &value, 4);
    return word;
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
