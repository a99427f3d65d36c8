// Products of formats with 256 weights to a block, whose sub-blocks have their own scales:
//
//     output = sum over blocks of column_scale * (
//         scale * sum over sub-blocks of sub_scale * (sum of codes * column codes)
//         - min * sum over sub-blocks of sub_min * column_sum)
//
// Offsets of codes are treated as mins: code - 32 with a scale is a min of 32 times the scale.
#pragma once

#include "products/packed_codes.h"

namespace {

// Sums of sub_scale * total over sub-blocks. They are exact, so that the order of additions does
// not matter (that of amx_product.h is another one). Floats are exact up to 2^24, which is enough
// for half a block of most formats; the others are summed as integers (8 columns of Q6_K take 12%
// longer).
template <class V, bool in_floats> struct ExactSums {
    using Sum = typename V::Floats;
    static Sum zero() { return V::zero(); }
    static Sum add(typename V::Ints total, typename V::Ints sub_scale, Sum sum) {
        return V::multiply_add(V::to_floats(total), V::to_floats(sub_scale), sum);
    }
    static typename V::Floats rounded(Sum sum) { return sum; }
};
template <class V> struct ExactSums<V, false> {
    using Sum = typename V::Ints;
    static Sum zero() { return V::zero_ints(); }
    static Sum add(typename V::Ints total, typename V::Ints sub_scale, Sum sum) {
        return V::add(sum, V::multiply(total, sub_scale));
    }
    static typename V::Floats rounded(Sum sum) { return V::to_floats(sum); }
};

// The scales and mins of a block's rows.
template <class V, class F>
struct SuperBlockScales {
    using Layout = PackedLayout<F, V::lanes>;
    using Words = SuperBlockWords;
    using Ints = typename V::Ints;
    using Floats = typename V::Floats;
    static constexpr int scales_offset =
        F::values == Values::iq4 ? Codes<V, F>::signed_offset : F::offset_of_scales;
    static constexpr bool has_min = Layout::own_min || scales_offset != 0;
    static constexpr int sum_words = F::sub == 16 ? Words::sums_of_16 : Words::sums_of_32;

    // The sub-scales of a step: those of its two sub-blocks are a pair in each lane.
    static Ints sub_scales(const uint8_t *block, int step) {
        const uint8_t *pairs = block + Layout::sub_scales_at + step * 2 * V::lanes;
        if constexpr (F::sub_scales == SubScales::signed_with_offset) {
            return V::load_signed_pairs(pairs);
        }
        const Ints loaded = V::load_byte_pairs(pairs);
        if constexpr (F::sub_scales == SubScales::with_nibble_mins) {
            return V::bit_and(loaded, V::all_bytes(15));
        }
        return loaded;
    }
    // The sub-mins of a step, in the same way.
    static Ints sub_mins(const uint8_t *block, int step) {
        if constexpr (F::sub_scales == SubScales::with_mins) {
            return V::load_byte_pairs(block + Layout::sub_mins_at + step * 2 * V::lanes);
        } else if constexpr (F::sub_scales == SubScales::with_nibble_mins) {
            const uint8_t *pairs = block + Layout::sub_scales_at + step * 2 * V::lanes;
            return V::template shift_shorts_right<4>(V::load_byte_pairs(pairs));
        }
        return sub_scales(block, step);
    }

    Floats scale;
    Floats min;
    // The sub-mins of all steps.
    Ints mins[Layout::n_steps];

    explicit SuperBlockScales(const uint8_t *block)
        : scale(load_scale<V, F>(block)),
          min(Layout::own_min ? V::load_halves(block + Layout::min_at)
                              : V::multiply(scale, V::all(scales_offset))) {
#pragma GCC unroll 8
        for (int step = 0; step < Layout::n_steps; step++) {
            mins[step] = has_min ? sub_mins(block, step) : V::zero_ints();
        }
    }

    // output + what the block adds to it; `sum` is that of sub_scale * (sum of products) of
    // column n.
    Floats add(Floats sum, const int32_t *words, int n_columns, int n, Floats output) const {
        const Floats column_scale = V::all(*as_float(words + Words::scale * n_columns + n));
        output = V::multiply_add(sum, V::multiply(scale, column_scale), output);
        if constexpr (!has_min) return output;
        Ints total = V::zero_ints();
#pragma GCC unroll 8
        for (int step = 0; step < Layout::n_steps; step++) {
            const int32_t *column_sums = words + (sum_words + step) * n_columns + n;
            total = V::add_pair_products(total, mins[step], column_sums);
        }
        return V::subtract_product(V::to_floats(total), V::multiply(min, column_scale), output);
    }
};

// The product of a group of rows with a tile of n_columns columns.
template <class V, class F, int n_columns>
struct SuperBlockProduct {
    using Layout = PackedLayout<F, V::lanes>;
    using Words = SuperBlockWords;
    using Ints = typename V::Ints;
    using Floats = typename V::Floats;
    // The largest sum over half of the sub-blocks.
    static constexpr int64_t largest_sum = int64_t{Layout::n_subs / 2} * F::sub * 127 *
                                           F::largest_code * F::largest_sub_scale;
    using Exact = ExactSums<V, largest_sum <= 1 << 24>;
    using Sum = typename Exact::Sum;

    // sums[n] += sub_scale * (sum of codes * column codes), for the two sub-blocks of a step.
    static void add_step(const uint8_t *block, const int32_t *words, int step,
                         Sum (&sums)[n_columns]) {
        constexpr int half = Layout::words / 2;
        const uint8_t *codes = block + Layout::codes_at + step * Layout::step_bytes;
        const Ints scales = SuperBlockScales<V, F>::sub_scales(block, step);
        words += step * Layout::words * n_columns;
        Ints totals[n_columns];
#pragma GCC unroll 16
        for (int n = 0; n < n_columns; n++) totals[n] = V::zero_ints();
        Codes<V, F>::template multiply<0, half, n_columns>(codes, words, totals);
        const Ints first_scale = V::first_of_pairs(scales);
#pragma GCC unroll 16
        for (int n = 0; n < n_columns; n++) {
            sums[n] = Exact::add(totals[n], first_scale, sums[n]);
            totals[n] = V::zero_ints();
        }
        Codes<V, F>::template multiply<half, half, n_columns>(codes, words, totals);
        const Ints second_scale = V::second_of_pairs(scales);
#pragma GCC unroll 16
        for (int n = 0; n < n_columns; n++) {
            sums[n] = Exact::add(totals[n], second_scale, sums[n]);
        }
    }

    // The sums over all sub-blocks of a block: exact in each half of them, then rounded once.
    static void add_block(const uint8_t *block, const int32_t *words,
                          Floats (&results)[n_columns]) {
        Sum halves[2][n_columns];
        for (int half = 0; half < 2; half++) {
            Sum sums[n_columns];
            for (int n = 0; n < n_columns; n++) sums[n] = Exact::zero();
            for (int step = 0; step < Layout::n_steps / 2; step++) {
                add_step(block, words, half * (Layout::n_steps / 2) + step, sums);
            }
            for (int n = 0; n < n_columns; n++) halves[half][n] = sums[n];
        }
        for (int n = 0; n < n_columns; n++) {
            results[n] = Exact::rounded(V::add(halves[0][n], halves[1][n]));
        }
    }

    static void run(const uint8_t *block, const int32_t *words, int64_t n_inputs,
                    Floats (&outputs)[n_columns]) {
        for (int n = 0; n < n_columns; n++) outputs[n] = V::zero();
        for (int64_t i = 0; i < n_inputs; i += 256) {
            Floats sums[n_columns];
            for (int at = 0; at < Layout::codes_at; at += 64) prefetch_weights(block + at);
            add_block(block, words, sums);
            const SuperBlockScales<V, F> scales(block);
#pragma GCC unroll 16
            for (int n = 0; n < n_columns; n++) {
                outputs[n] = scales.add(sums[n], words, n_columns, n, outputs[n]);
            }
            block += Layout::bytes;
            words += Words::count * n_columns;
        }
    }
};

}  // namespace
