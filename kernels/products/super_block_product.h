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
//
// The sums over sub-blocks are sums of integers. They are exact, so the order of additions does not
// matter (amx_product.h has another order).
template <class V, class F, int n_columns>
struct SuperBlockProduct {
    using Layout = PackedLayout<F, V::lanes>;
    using Words = SuperBlockWords;
    using Ints = typename V::Ints;
    using Floats = typename V::Floats;
    // Words of a sub-block.
    static constexpr int sub_words = Layout::words / 2;

    // sums[n] += sub_scale * (sum of codes * column codes), for the two sub-blocks of a step.
    static void add_step(const uint8_t *block, const int32_t *words, int step,
                         Ints (&sums)[n_columns]) {
        const uint8_t *codes = block + Layout::codes_at + step * Layout::step_bytes;
        const int32_t *step_words = words + step * Layout::words * n_columns;
        const Ints scales = SuperBlockScales<V, F>::sub_scales(block, step);
        Codes<V, F>::template multiply_scaled<0, sub_words, n_columns>(
            codes, step_words, V::first_of_pairs(scales), sums);
        Codes<V, F>::template multiply_scaled<sub_words, sub_words, n_columns>(
            codes, step_words, V::second_of_pairs(scales), sums);
    }

    // --- the same, if the totals of sub-blocks fit into 16 bits ---
    //
    // A multiplication with a sub-scale takes as long as one of four codes. So two of them are one
    // instruction: the totals of both sub-blocks of a step share a lane. 12 columns of Q4_K take
    // 0.96 of the time, those of Q2_K 0.95. (With few columns, additions would wait for each other:
    // one column of Q4_K would take 1.2 of the time.)

    static constexpr bool may_be_short =
        V::adds_pairs && F::values == Values::codes && n_columns >= 8;

    // Whether all totals of a block fit, whatever its codes are.
    static bool are_short(const int32_t *words) {
        constexpr int most = 32767 / F::largest_code / (F::sub / 16);
        bool fit = true;
        for (int n = 0; n < n_columns; n++) {
            fit &= words[Words::largest_sum * n_columns + n] <= most;
        }
        return fit;
    }

    static void add_short_step(const uint8_t *block, const int32_t *words, int step,
                               Ints (&sums)[n_columns]) {
        const uint8_t *codes = block + Layout::codes_at + step * Layout::step_bytes;
        const int32_t *step_words = words + step * Layout::words * n_columns;
        const Ints bias = V::all_ints(0x8000);
        Ints totals[n_columns];
        // The totals of the second sub-block become the high halves. A bias keeps those of the
        // first one, which are added to them, from being negative.
#pragma GCC unroll 16
        for (int n = 0; n < n_columns; n++) totals[n] = V::zero_ints();
        Codes<V, F>::template multiply<sub_words, sub_words, n_columns>(codes, step_words, totals);
#pragma GCC unroll 16
        for (int n = 0; n < n_columns; n++) {
            totals[n] = V::add(V::template shift_ints_left<16>(totals[n]), bias);
        }
        Codes<V, F>::template multiply<0, sub_words, n_columns>(codes, step_words, totals);
        const Ints scales = SuperBlockScales<V, F>::sub_scales(block, step);
#pragma GCC unroll 16
        for (int n = 0; n < n_columns; n++) {
            sums[n] = V::dot_shorts(sums[n], V::bit_xor(totals[n], bias), scales);
        }
    }

    // --- blocks ---

    // The sums over all sub-blocks of a block.
    static void add_block(const uint8_t *block, const int32_t *words,
                          Floats (&results)[n_columns]) {
        Ints sums[n_columns];
#pragma GCC unroll 16
        for (int n = 0; n < n_columns; n++) sums[n] = V::zero_ints();
        bool is_short = false;
        if constexpr (may_be_short) is_short = are_short(words);
        for (int step = 0; step < Layout::n_steps; step++) {
            if constexpr (may_be_short) {
                if (is_short) {
                    add_short_step(block, words, step, sums);
                    continue;
                }
            }
            add_step(block, words, step, sums);
        }
#pragma GCC unroll 16
        for (int n = 0; n < n_columns; n++) results[n] = V::to_floats(sums[n]);
    }

    static void run(const uint8_t *block, const int32_t *words, int64_t n_inputs,
                    Floats (&outputs)[n_columns]) {
#pragma GCC unroll 16
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
