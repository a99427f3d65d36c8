// Products of float weights: one vector of weights (an input of every row) times each column.
//
//     output = sum over runs of 64 inputs of (sum over even inputs + sum over odd inputs)
#pragma once

#include "products/packed_codes.h"

namespace {

struct F16 {
    static constexpr int bytes = 2;
    template <class V> static typename V::Floats load(const uint8_t *p) {
        return V::load_halves(p);
    }
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

// The product of a group of rows of weights of type F with a tile of n_columns columns.
template <class V, class F, int n_columns>
struct FloatProduct {
    using Floats = typename V::Floats;
    static constexpr int vector_bytes = F::bytes * V::lanes;
    // How many inputs are summed by themselves. Rounding errors then grow with the number of runs
    // instead of the number of inputs (for 1,536 inputs they are a third as large).
    static constexpr int run_inputs = 64;

    // More columns than these are multiplied in two halves, because their sums do not fit into the
    // registers.
    static constexpr int most_columns = V::accumulators / 2;
    static constexpr int first_columns = n_columns <= most_columns ? n_columns : n_columns / 2;

    // outputs += the products of n_inputs <= run_inputs, for `columns` columns from column
    // `start` on. Even and odd inputs have sums of their own, so that a single column waits less
    // for its additions.
    template <int start, int columns>
    static void add_run(const uint8_t *weights, const int32_t *words, int n_inputs,
                        Floats (&outputs)[n_columns]) {
        Floats even[columns], odd[columns];
        for (int n = 0; n < columns; n++) even[n] = odd[n] = V::zero();
        words += start;
        for (int i = 0; i + 1 < n_inputs; i += 2) {
            for (int at = 0; at < 2 * vector_bytes; at += 64) prefetch_weights(weights + at);
            const Floats first = F::template load<V>(weights);
            const Floats second = F::template load<V>(weights + vector_bytes);
#pragma GCC unroll 16
            for (int n = 0; n < columns; n++) {
                const Floats first_input = V::all(*as_float(words + n));
                const Floats second_input = V::all(*as_float(words + n_columns + n));
                even[n] = V::multiply_add(first, first_input, even[n]);
                odd[n] = V::multiply_add(second, second_input, odd[n]);
            }
            weights += 2 * vector_bytes;
            words += 2 * n_columns;
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
                    Floats (&outputs)[n_columns]) {
        for (int n = 0; n < n_columns; n++) outputs[n] = V::zero();
        for (int64_t i = 0; i < n_inputs; i += run_inputs) {
            const int64_t left = n_inputs - i;
            const int n = static_cast<int>(left < run_inputs ? left : run_inputs);
            const uint8_t *run_weights = weights + i * vector_bytes;
            const int32_t *run_words = words + i * n_columns;
            add_run<0, first_columns>(run_weights, run_words, n, outputs);
            if constexpr (first_columns < n_columns) {
                add_run<first_columns, n_columns - first_columns>(run_weights, run_words, n,
                                                                  outputs);
            }
        }
    }
};

}  // namespace
