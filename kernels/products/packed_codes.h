// Packed codes: unpacking them, and multiplying them with a tile of columns.
//
// This is the inner loop of all products of quantised weights. It unpacks each word of codes into a
// register once and multiplies it with every column of the tile. So more columns cost no reading,
// only arithmetic, most of which is hidden by the reading of weights.
//
// `V` is a vector type (vectors/avx2.h), `F` a format (packed_formats.h).
#pragma once

#include "products/activations.h"
#include "products/packed_formats.h"

namespace {

// Weights are requested this far ahead. The hardware prefetcher alone reaches three quarters of the
// memory's speed. For one column, 4 KB are enough to reach all of it (36 -> 27 ms per token with a
// 1.1 GB model), but only with 8 KB does the reading hide the arithmetic of eight columns (12% less
// time). Further ahead, weights push each other out of the first-level cache (32 or 48 KB).
constexpr int prefetch_bytes = 8192;

inline void prefetch_weights(const uint8_t *p) {
    __builtin_prefetch(p + prefetch_bytes);
}

// A table of values, with an offset that makes them unsigned if there is one.
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

// The codes of a step (see PackedLayout) of format F.
template <class V, class F>
struct Codes {
    using Layout = PackedLayout<F, V::lanes>;
    using Ints = typename V::Ints;
    using Sums = typename V::Sums;
    // Whether codes are signed: those of formats with 8 bits. VNNI multiplies unsigned bytes with
    // signed ones, so for VNNI 128 is added to them. (AVX2 and NEON take signed ones.)
    static constexpr bool is_signed =
        F::offset == Offset::signed_byte || F::values == Values::iq4;
    static constexpr int signed_offset = V::needs_unsigned_codes ? 128 : 0;
    // How many words may be multiplied before the sums must be widened (see vectors/avx2.h).
    static constexpr int run = V::has_dot_product ? Layout::words
                               : is_signed        ? 1
                                                  : 32767 / (2 * 127 * F::largest_code);

    // --- unpacking ---

    // Load the vector of a plane that contains word `word`. Its first word also requests a later
    // vector: one request at a time, because in bursts they wait for each other, and the arithmetic
    // waits with them.
    template <int bits>
    static Ints load_plane(const uint8_t *vectors, int word) {
        const uint8_t *vector = vectors + word / (8 / bits) * Layout::vector_bytes;
        if (word % (8 / bits) == 0) prefetch_weights(vector);
        return V::load(vector);
    }

    // Word `word` of the first plane.
    template <int bits>
    static Ints low_plane(const uint8_t *vectors, int word) {
        const Ints packed = load_plane<bits>(vectors, word);
        if constexpr (bits == 8) return packed;
        const Ints mask = V::all_bytes((1 << bits) - 1);
        // The compiler knows the distance once the loop is unrolled, but shifts need a constant.
        switch (word % (8 / bits) * bits) {
            case 0: return V::bit_and(packed, mask);
            case 1: return V::bit_and(V::template shift_shorts_right<1>(packed), mask);
            case 2: return V::bit_and(V::template shift_shorts_right<2>(packed), mask);
            case 3: return V::bit_and(V::template shift_shorts_right<3>(packed), mask);
            case 4: return V::bit_and(V::template shift_shorts_right<4>(packed), mask);
            case 5: return V::bit_and(V::template shift_shorts_right<5>(packed), mask);
            case 6: return V::bit_and(V::template shift_shorts_right<6>(packed), mask);
            default: return V::bit_and(V::template shift_shorts_right<7>(packed), mask);
        }
    }

    // Word `word` of the second plane, shifted to be above the bits of the first one.
    static Ints high_plane(const uint8_t *vectors, int word) {
        constexpr int bits = F::high_bits;
        constexpr int to = F::low_bits;
        const Ints packed = load_plane<bits>(vectors, word);
        const Ints mask = V::all_bytes(((1 << bits) - 1) << to);
        switch (word % (8 / bits) * bits - to) {
            case -4: return V::bit_and(V::template shift_shorts_left<4>(packed), mask);
            case -3: return V::bit_and(V::template shift_shorts_left<3>(packed), mask);
            case -2: return V::bit_and(V::template shift_shorts_left<2>(packed), mask);
            case -1: return V::bit_and(V::template shift_shorts_left<1>(packed), mask);
            case 0: return V::bit_and(packed, mask);
            case 1: return V::bit_and(V::template shift_shorts_right<1>(packed), mask);
            case 2: return V::bit_and(V::template shift_shorts_right<2>(packed), mask);
            case 3: return V::bit_and(V::template shift_shorts_right<3>(packed), mask);
            case 4: return V::bit_and(V::template shift_shorts_right<4>(packed), mask);
            default: return V::bit_and(V::template shift_shorts_right<5>(packed), mask);
        }
    }

    // Word `word` of a step: four codes of each row. (Where GCC does not inline it, the distances
    // of shifts are not constants: 2 columns of Q3_K then take 1.4 times as long.)
    [[gnu::always_inline]] static inline Ints unpack(const uint8_t *step, int word) {
        Ints codes = low_plane<F::low_bits>(step, word);
        if constexpr (F::high_bits > 0) {
            const uint8_t *second_plane = step + Layout::low_vectors * Layout::vector_bytes;
            codes = V::bit_or(codes, high_plane(second_plane, word));
        }
        if constexpr (F::values != Values::codes) {
            static constexpr ValueTable<F::values,
                                        F::values == Values::iq4 ? signed_offset : 16> table;
            codes = V::look_up(table.entries, codes);
        }
        return codes;
    }

    // --- products ---

    // totals[n] += sum over words w of [first, first + count) of codes[w] * words[w][n]
    //
    // for each column n of a tile.
    template <int first, int count, int n_columns>
    static void multiply(const uint8_t *step, const int32_t *words, Ints (&totals)[n_columns]) {
        multiply_runs<first, count, n_columns>(
            step, words, [&](int n) { return V::start_sums(totals[n]); },
            [&](int n, Sums sums) { totals[n] = V::new_total(sums, totals[n]); });
    }

    // The same, but scaled[n] += scale * sum.
    template <int first, int count, int n_columns>
    static void multiply_scaled(const uint8_t *step, const int32_t *words, Ints scale,
                                Ints (&scaled)[n_columns]) {
        multiply_runs<first, count, n_columns>(
            step, words, [](int) { return V::start_sums(V::zero_ints()); },
            [&](int n, Sums sums) { scaled[n] = V::add_scaled(sums, scale, scaled[n]); });
    }

    // Multiply run by run: `start` gives what the sums of column n start with, `end` takes them.
    template <int first, int count, int n_columns, class Start, class End>
    static void multiply_runs(const uint8_t *step, const int32_t *words, Start start, End end) {
        Sums sums[n_columns];
#pragma GCC unroll 16
        for (int w = first; w < first + count; w++) {
            const bool run_starts = (w - first) % run == 0;
            const bool run_ends = (w - first) % run == run - 1 || w == first + count - 1;
            if (run_starts) {
#pragma GCC unroll 16
                for (int n = 0; n < n_columns; n++) sums[n] = start(n);
            }
            const Ints codes = unpack(step, w);
#pragma GCC unroll 16
            for (int n = 0; n < n_columns; n++) {
                const int i = w * n_columns + n;
                sums[n] = is_signed ? V::add_signed_products(sums[n], codes, words, i)
                                    : V::add_products(sums[n], codes, words, i);
            }
            if (run_ends) {
#pragma GCC unroll 16
                for (int n = 0; n < n_columns; n++) end(n, sums[n]);
            }
        }
    }
};

// The scales of the rows of a block.
template <class V, class F>
typename V::Floats load_scale(const uint8_t *block) {
    if constexpr (F::scale == Scale::half) return V::load_halves(block);
    return V::multiply(V::load_powers_of_two(block), V::all(0.5f));
}

inline const float *as_float(const int32_t *word) { return reinterpret_cast<const float *>(word); }

}  // namespace
