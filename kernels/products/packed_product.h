// Products of packed weights with a tile of columns: what makes a row of a verify batch cheap.
//
// One call computes rows_per_group outputs for each column of a tile. It reads each packed weight
// once, unpacks it into a register and multiplies it with every column of the tile, so that more
// columns cost arithmetic, which mostly hides behind the reading of the weights, and no reading.
//
// A column's result is the same bits whatever the other columns are: each column has accumulators
// of its own, and the order of operations on them does not depend on how many columns there are.
// (All float operations are explicit intrinsics; the compiler is told not to contract others.)
#pragma once

#include "products/activations.h"
#include "instruction_sets/instruction_set.h"
#include "products/packed_formats.h"

namespace {

// Weights are read this far ahead. The hardware prefetcher alone reaches three quarters of the
// memory's speed. One column reaches all of it 4 KB ahead (36 -> 27 ms a token on a 1.1 GB model), but
// the arithmetic of eight does not hide behind the reading until 8 KB (12 % less). Further ahead,
// weights push each other out of the first-level cache (of 32 or 48 KB).
constexpr int prefetch_bytes = 8192;

inline void prefetch(const uint8_t *p) {
    __builtin_prefetch(p + prefetch_bytes);
}

// The tables of value formats, with the offset that makes them unsigned where there is one.
template <Values values, int offset>
struct ValueTable {
    int8_t entries[16];
    constexpr ValueTable() : entries() {
        for (int i = 0; i < 16; i++) {
            const int value = values == Values::iq4 ? iq4_values[i] : mxfp4_values[i];
            entries[i] = static_cast<int8_t>(value + offset);
        }
    }
};

// Codes of a step of format F, unpacked for the multiplication.
template <class V, class F>
struct Codes {
    using L = Layout<F, V::lanes>;
    using Ints = typename V::Ints;
    // Signed weights: of formats with 8 bits. VNNI multiplies unsigned bytes with signed ones, so
    // there 128 is added to them. (AVX2 and NEON take signed ones.)
    static constexpr bool is_signed =
        F::offset == Offset::signed_byte || F::values == Values::iq4;
    static constexpr int signed_offset = V::needs_unsigned_codes ? 128 : 0;
    // How often products may be added before the sums have to be widened (see vector_avx2.h).
    static constexpr int run = V::has_dot_product ? L::words
                               : is_signed        ? 1
                                                  : 32767 / (2 * 127 * F::largest_code);

    // The vector of a plane that has word `word`; its first word asks for a later vector. (One
    // request at a time: in bursts they wait for each other, and the arithmetic with them.)
    template <int bits>
    static Ints load_plane(const uint8_t *vectors, int word) {
        const uint8_t *vector = vectors + word / (8 / bits) * L::vector_bytes;
        if (word % (8 / bits) == 0) prefetch(vector);
        return V::load(vector);
    }

    template <int bits>
    static Ints plane(const uint8_t *vectors, int word) {
        const Ints packed = load_plane<bits>(vectors, word);
        if constexpr (bits == 8) return packed;
        const Ints mask = V::all_bytes((1 << bits) - 1);
        switch (word % (8 / bits) * bits) {
            case 0: return V::bits(packed, mask);
            case 1: return V::bits(V::template shift_right<1>(packed), mask);
            case 2: return V::bits(V::template shift_right<2>(packed), mask);
            case 3: return V::bits(V::template shift_right<3>(packed), mask);
            case 4: return V::bits(V::template shift_right<4>(packed), mask);
            case 5: return V::bits(V::template shift_right<5>(packed), mask);
            case 6: return V::bits(V::template shift_right<6>(packed), mask);
            default: return V::bits(V::template shift_right<7>(packed), mask);
        }
    }

    // The bits of the second plane, shifted to stand above those of the first.
    static Ints high_plane(const uint8_t *vectors, int word) {
        constexpr int bits = F::high_bits, to = F::low_bits;
        const Ints packed = load_plane<bits>(vectors, word);
        const Ints mask = V::all_bytes(((1 << bits) - 1) << to);
        switch (word % (8 / bits) * bits - to) {
            case -4: return V::bits(V::template shift_left<4>(packed), mask);
            case -3: return V::bits(V::template shift_left<3>(packed), mask);
            case -2: return V::bits(V::template shift_left<2>(packed), mask);
            case -1: return V::bits(V::template shift_left<1>(packed), mask);
            case 0: return V::bits(packed, mask);
            case 1: return V::bits(V::template shift_right<1>(packed), mask);
            case 2: return V::bits(V::template shift_right<2>(packed), mask);
            case 3: return V::bits(V::template shift_right<3>(packed), mask);
            case 4: return V::bits(V::template shift_right<4>(packed), mask);
            default: return V::bits(V::template shift_right<5>(packed), mask);
        }
    }

    // Word `word` of a step, for all rows.
    static Ints unpack(const uint8_t *step, int word) {
        Ints codes = plane<F::low_bits>(step, word);
        if constexpr (F::high_bits > 0) {
            codes = V::either(codes, high_plane(step + L::low_vectors * L::vector_bytes, word));
        }
        if constexpr (F::values != Values::codes) {
            static constexpr ValueTable<F::values,
                                        F::values == Values::iq4 ? signed_offset : 16> table;
            codes = V::look_up(table.entries, codes);
        }
        return codes;
    }

    // totals[n] += the products of words [first, first + count) with column n.
    template <int first, int count, int n_columns>
    static void multiply(const uint8_t *step, const int32_t *words, Ints (&totals)[n_columns]) {
        typename V::Sums sums[n_columns];
#pragma GCC unroll 16
        for (int w = first; w < first + count; w++) {
            if ((w - first) % run == 0) {
                for (int n = 0; n < n_columns; n++) sums[n] = V::no_sums();
            }
            const Ints codes = unpack(step, w);
#pragma GCC unroll 16
            for (int n = 0; n < n_columns; n++) {
                const int i = w * n_columns + n;
                sums[n] = is_signed ? V::add_signed_products(sums[n], codes, words, i)
                                    : V::add_products(sums[n], codes, words, i);
            }
            if ((w - first) % run == run - 1 || w == first + count - 1) {
#pragma GCC unroll 16
                for (int n = 0; n < n_columns; n++) totals[n] = V::widen(sums[n], totals[n]);
            }
        }
    }
};

template <class V, class F>
typename V::Floats load_scale(const uint8_t *block) {
    if constexpr (F::scale == Scale::half) return V::load_halves(block);
    return V::multiply(V::load_exponents(block), V::all(0.5f));
}

inline const float *as_float(const int32_t *word) { return reinterpret_cast<const float *>(word); }

// Formats with one scale for 32 weights:
//     output = sum over blocks of scale * column_scale * (sum of codes * column codes - offset)
//              + min * column_sum
template <class V, class F>
struct BlockScales {
    using L = Layout<F, V::lanes>;
    using W = BlockWords;
    using Floats = typename V::Floats;
    static constexpr int offset_word = F::offset == Offset::eight     ? W::minus_8_sums
                                       : F::offset == Offset::sixteen ? W::minus_16_sums
                                                                      : W::minus_128_sums;
    static constexpr bool has_offset =
        F::offset != Offset::none &&
        (F::offset != Offset::signed_byte || Codes<V, F>::signed_offset != 0);

    Floats scale, min;

    BlockScales() = default;
    explicit BlockScales(const uint8_t *block)
        : scale(load_scale<V, F>(block)),
          min(F::has_min ? V::load_halves(block + L::min_at) : V::zero()) {}

    // What the sum of products of column n starts with.
    static typename V::Ints offset(const int32_t *words, int n_columns, int n) {
        return has_offset ? V::all_words(words + offset_word * n_columns + n) : V::zero_ints();
    }
    // output + what a block adds to it.
    Floats add(typename V::Ints total, const int32_t *words, int n_columns, int n,
               Floats output) const {
        const Floats column_scale = V::all(*as_float(words + W::scale * n_columns + n));
        output = V::multiply_add(V::to_floats(total), V::multiply(scale, column_scale), output);
        if constexpr (!F::has_min) return output;
        return V::multiply_add(
            min, V::all(*as_float(words + W::scaled_sum * n_columns + n)), output);
    }
};

template <class V, class F, int N>
struct BlockProduct {
    using L = Layout<F, V::lanes>;
    using W = BlockWords;

    static void run(const uint8_t *block, const int32_t *words, int64_t n_inputs,
                    typename V::Floats (&outputs)[N]) {
        for (int n = 0; n < N; n++) outputs[n] = V::zero();
        for (int64_t i = 0; i < n_inputs; i += 32, block += L::bytes, words += W::count * N) {
            for (int at = 0; at < L::codes_at; at += 64) prefetch(block + at);
            typename V::Ints totals[N];
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) totals[n] = BlockScales<V, F>::offset(words, N, n);
            Codes<V, F>::template multiply<0, 8, N>(block + L::codes_at, words, totals);
            const BlockScales<V, F> scales(block);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) outputs[n] = scales.add(totals[n], words, N, n, outputs[n]);
        }
    }
};

// Sums of sub_scale * total over sub-blocks. They are exact, so that the order of additions does not
// matter (that of tile_product.h is another one). Floats are exact up to 2^24: enough for half a
// block of most formats; the others are summed as integers (8 columns of Q6_K take 12 % longer).
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

// Formats with 256 weights to a block, whose sub-blocks have scales of their own:
//     output = sum over blocks of column_scale * (scale * sum over subs of
//              sub_scale * (sum of codes * column codes) - min * sum of sub_min * column sum)
// Offsets of codes are minima too: code - 32 with a scale is a min of 32 times the scale.
template <class V, class F>
struct SuperBlockScales {
    using L = Layout<F, V::lanes>;
    using W = SuperBlockWords;
    using Ints = typename V::Ints;
    using Floats = typename V::Floats;
    static constexpr int scales_offset =
        F::values == Values::iq4 ? Codes<V, F>::signed_offset : F::offset_of_scales;
    static constexpr bool has_min = L::own_min || scales_offset != 0;
    static constexpr int sum_words = F::sub == 16 ? W::sums_of_16 : W::sums_of_32;

    // The sub-scales of step `step`: two in each lane.
    static Ints sub_scales(const uint8_t *block, int step) {
        const uint8_t *pairs = block + L::sub_scales_at + step * 2 * V::lanes;
        if constexpr (F::sub_scales == SubScales::signed_with_offset) {
            return V::load_signed_pairs(pairs);
        }
        const Ints loaded = V::load_byte_pairs(pairs);
        if constexpr (F::sub_scales == SubScales::with_nibble_mins) {
            return V::bits(loaded, V::all_bytes(15));
        }
        return loaded;
    }
    static Ints sub_mins(const uint8_t *block, int step) {
        if constexpr (F::sub_scales == SubScales::with_mins) {
            return V::load_byte_pairs(block + L::sub_mins_at + step * 2 * V::lanes);
        } else if constexpr (F::sub_scales == SubScales::with_nibble_mins) {
            const uint8_t *pairs = block + L::sub_scales_at + step * 2 * V::lanes;
            return V::template shift_right<4>(V::load_byte_pairs(pairs));
        }
        return sub_scales(block, step);
    }

    Floats scale, min;
    Ints mins[L::n_steps];

    explicit SuperBlockScales(const uint8_t *block)
        : scale(load_scale<V, F>(block)),
          min(L::own_min ? V::load_halves(block + L::min_at)
                         : V::multiply(scale, V::all(scales_offset))) {
#pragma GCC unroll 8
        for (int step = 0; step < L::n_steps; step++) {
            mins[step] = has_min ? sub_mins(block, step) : V::zero_ints();
        }
    }

    // output + what a block adds to it; `sum` is that of sub_scale * (sum of products).
    Floats add(Floats sum, const int32_t *words, int n_columns, int n, Floats output) const {
        const Floats column_scale = V::all(*as_float(words + W::scale * n_columns + n));
        output = V::multiply_add(sum, V::multiply(scale, column_scale), output);
        if constexpr (!has_min) return output;
        Ints total = V::zero_ints();
#pragma GCC unroll 8
        for (int step = 0; step < L::n_steps; step++) {
            total = V::add_pair_products(total, mins[step],
                                         words + (sum_words + step) * n_columns + n);
        }
        return V::subtract_product(V::to_floats(total), V::multiply(min, column_scale), output);
    }
};

template <class V, class F, int N>
struct SuperBlockProduct {
    using L = Layout<F, V::lanes>;
    using W = SuperBlockWords;
    using Ints = typename V::Ints;
    using Floats = typename V::Floats;
    // Of half of the sub-blocks.
    static constexpr int64_t largest_sum = int64_t{L::n_subs / 2} * F::sub * 127 *
                                           F::largest_code * F::largest_sub_scale;
    using Exact = ExactSums<V, largest_sum <= 1 << 24>;
    using Sum = typename Exact::Sum;

    // sums[n] += sub_scale * (sum of codes * column codes), for the two sub-blocks of a step.
    static void add_step(const uint8_t *block, const int32_t *words, int step, Sum (&sums)[N]) {
        constexpr int half = L::words / 2;
        const uint8_t *codes = block + L::codes_at + step * L::step_bytes;
        const Ints scales = SuperBlockScales<V, F>::sub_scales(block, step);
        words += step * L::words * N;
        Ints totals[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) totals[n] = V::zero_ints();
        Codes<V, F>::template multiply<0, half, N>(codes, words, totals);
        const Ints first = V::first_of_pairs(scales);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            sums[n] = Exact::add(totals[n], first, sums[n]);
            totals[n] = V::zero_ints();
        }
        Codes<V, F>::template multiply<half, half, N>(codes, words, totals);
        const Ints second = V::second_of_pairs(scales);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) sums[n] = Exact::add(totals[n], second, sums[n]);
    }

    // The sums of a block, rounded once.
    static void add_block(const uint8_t *block, const int32_t *words, Floats (&results)[N]) {
        Sum halves[2][N];
        for (int half = 0; half < 2; half++) {
            Sum sums[N];
            for (int n = 0; n < N; n++) sums[n] = Exact::zero();
            for (int step = 0; step < L::n_steps / 2; step++) {
                add_step(block, words, half * (L::n_steps / 2) + step, sums);
            }
            for (int n = 0; n < N; n++) halves[half][n] = sums[n];
        }
        for (int n = 0; n < N; n++) results[n] = Exact::rounded(V::add(halves[0][n], halves[1][n]));
    }

    static void run(const uint8_t *block, const int32_t *words, int64_t n_inputs,
                    Floats (&outputs)[N]) {
        for (int n = 0; n < N; n++) outputs[n] = V::zero();
        for (int64_t i = 0; i < n_inputs; i += 256, block += L::bytes, words += W::count * N) {
            Floats sums[N];
            for (int at = 0; at < L::codes_at; at += 64) prefetch(block + at);
            add_block(block, words, sums);
            const SuperBlockScales<V, F> scales(block);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) outputs[n] = scales.add(sums[n], words, N, n, outputs[n]);
        }
    }
};

// Float weights: one vector of weights (an input of every row) times each column. Even and odd
// inputs have accumulators of their own, so that a single column waits less for its additions.
struct F16 {
    static constexpr int bytes = 2;
    template <class V> static typename V::Floats load(const uint8_t *p) { return V::load_halves(p); }
};
struct BF16 {
    static constexpr int bytes = 2;
    template <class V> static typename V::Floats load(const uint8_t *p) {
        return V::load_bfloats(p);
    }
};
struct F32 {
    static constexpr int bytes = 4;
    template <class V> static typename V::Floats load(const uint8_t *p) {
        return V::load_floats(reinterpret_cast<const float *>(p));
    }
};

template <class V, class F, int N>
struct FloatProduct {
    using Floats = typename V::Floats;
    static constexpr int bytes = F::bytes * V::lanes;
    // Inputs whose products are summed by themselves: rounding errors then grow with the number of
    // runs and not with that of the inputs (for 1536 inputs to a third).
    static constexpr int run_inputs = 64;

    // More columns than these are multiplied in two halves, as their sums do not fit into registers.
    static constexpr int most_columns = V::accumulators / 2;
    static constexpr int first_columns = N <= most_columns ? N : N / 2;

    // outputs += the products of n_inputs <= run_inputs, for `columns` columns from column `start` on.
    template <int start, int columns>
    static void add_run(const uint8_t *weights, const int32_t *words, int n_inputs,
                        Floats (&outputs)[N]) {
        Floats even[columns], odd[columns];
        for (int n = 0; n < columns; n++) even[n] = odd[n] = V::zero();
        words += start;
        for (int i = 0; i + 1 < n_inputs; i += 2, weights += 2 * bytes, words += 2 * N) {
            for (int at = 0; at < 2 * bytes; at += 64) prefetch(weights + at);
            const Floats first = F::template load<V>(weights);
            const Floats second = F::template load<V>(weights + bytes);
#pragma GCC unroll 16
            for (int n = 0; n < columns; n++) {
                even[n] = V::multiply_add(first, V::all(*as_float(words + n)), even[n]);
                odd[n] = V::multiply_add(second, V::all(*as_float(words + N + n)), odd[n]);
            }
        }
        if (n_inputs % 2) {
            const Floats last = F::template load<V>(weights);
            for (int n = 0; n < columns; n++) {
                even[n] = V::multiply_add(last, V::all(*as_float(words + n)), even[n]);
            }
        }
        for (int n = 0; n < columns; n++) {
            outputs[start + n] = V::add(outputs[start + n], V::add(even[n], odd[n]));
        }
    }

    static void run(const uint8_t *weights, const int32_t *words, int64_t n_inputs,
                    Floats (&outputs)[N]) {
        for (int n = 0; n < N; n++) outputs[n] = V::zero();
        for (int64_t i = 0; i < n_inputs; i += run_inputs) {
            const int64_t left = n_inputs - i;
            const int n = static_cast<int>(left < run_inputs ? left : run_inputs);
            add_run<0, first_columns>(weights + i * bytes, words + i * N, n, outputs);
            if constexpr (first_columns < N) {
                add_run<first_columns, N - first_columns>(weights + i * bytes, words + i * N, n, outputs);
            }
        }
    }
};

}  // namespace
