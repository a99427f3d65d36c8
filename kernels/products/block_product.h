// Products of formats with one scale for 32 weights:
//
//     output = sum over blocks of scale * column_scale * (sum of codes * column codes - offset)
//              + min * column_sum
//
// where the offset of a block is the amount by which its codes are too large, times the sum of the
// column's codes.
#pragma once

#include "products/packed_codes.h"

namespace {

// The scales and mins of a block's rows.
template <class V, class F>
struct BlockScales {
    using Layout = PackedLayout<F, V::lanes>;
    using Words = BlockWords;
    using Ints = typename V::Ints;
    using Floats = typename V::Floats;
    static constexpr int offset_word = F::offset == Offset::eight     ? Words::minus_8_sums
                                       : F::offset == Offset::sixteen ? Words::minus_16_sums
                                                                      : Words::minus_128_sums;
    static constexpr bool has_offset =
        F::offset != Offset::none &&
        (F::offset != Offset::signed_byte || Codes<V, F>::signed_offset != 0);

    Floats scale;
    Floats min;

    BlockScales() = default;
    explicit BlockScales(const uint8_t *block)
        : scale(load_scale<V, F>(block)),
          min(F::has_min ? V::load_halves(block + Layout::min_at) : V::zero()) {}

    // What the sum of products of column n starts with: minus the offset.
    static Ints start(const int32_t *words, int n_columns, int n) {
        if (!has_offset) return V::zero_ints();
        return V::broadcast_word(words + offset_word * n_columns + n);
    }

    // output + what the block adds to it; `total` is the sum of products of column n.
    Floats add(Ints total, const int32_t *words, int n_columns, int n, Floats output) const {
        const Floats column_scale = V::all(*as_float(words + Words::scale * n_columns + n));
        output = V::multiply_add(V::to_floats(total), V::multiply(scale, column_scale), output);
        if constexpr (!F::has_min) return output;
        const Floats column_sum = V::all(*as_float(words + Words::scaled_sum * n_columns + n));
        return V::multiply_add(min, column_sum, output);
    }
};

// The product of a group of rows with a tile of n_columns columns.
//
// (All loops over columns are unrolled. If one is not, GCC keeps the outputs in memory, too: 12
// columns of Q8_0 then take 1.06 times as long.)
template <class V, class F, int n_columns>
struct BlockProduct {
    using Layout = PackedLayout<F, V::lanes>;
    using Words = BlockWords;

    static void run(const uint8_t *block, const int32_t *words, int64_t n_inputs,
                    typename V::Floats (&outputs)[n_columns]) {
#pragma GCC unroll 16
        for (int n = 0; n < n_columns; n++) outputs[n] = V::zero();
        for (int64_t i = 0; i < n_inputs; i += 32) {
            for (int at = 0; at < Layout::codes_at; at += 64) prefetch_weights(block + at);
            typename V::Ints totals[n_columns];
#pragma GCC unroll 16
            for (int n = 0; n < n_columns; n++) {
                totals[n] = BlockScales<V, F>::start(words, n_columns, n);
            }
            Codes<V, F>::template multiply<0, 8, n_columns>(block + Layout::codes_at, words,
                                                            totals);
            const BlockScales<V, F> scales(block);
#pragma GCC unroll 16
            for (int n = 0; n < n_columns; n++) {
                outputs[n] = scales.add(totals[n], words, n_columns, n, outputs[n]);
            }
            block += Layout::bytes;
            words += Words::count * n_columns;
        }
    }
};

}  // namespace
