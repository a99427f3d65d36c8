// The functions of an InstructionSet that pack and multiply weights, for each type of weights.
//
// One call of `multiply` computes rows_per_group outputs for each column of a tile. It reads each
// packed weight once for all columns, which is what makes a row of a verify batch cheap.
//
// A column's result has the same bits whatever the other columns are: each column has sums of its
// own, and the order of operations on them does not depend on how many columns there are. (All
// float operations are explicit intrinsics, and the compiler is told not to contract others.)
#pragma once

#include "products/block_product.h"
#include "products/float_product.h"
#include "products/super_block_product.h"
#include "products/weight_type.h"

namespace {

// --- the operations on a type of weights ---

// A format of quantised weights.
template <class V, class F>
struct QuantizedWeights {
    using Format = F;
    using Layout = PackedLayout<F, V::lanes>;
    static constexpr bool is_quantized = true;
    static constexpr bool is_super = F::weights == 256;
    static constexpr int inputs_per_block = F::weights;

    static size_t group_bytes(int64_t n_inputs) {
        return n_inputs / F::weights * Layout::bytes;
    }
    static size_t column_bytes(int64_t n_inputs) {
        const int words = is_super ? SuperBlockWords::count : BlockWords::count;
        return n_inputs / F::weights * words * 4;
    }
    static void prepare(const float *values, int64_t n_inputs, int32_t *tile, int n_columns,
                        int column, bool for_amx = false) {
        const auto prepare_column = is_super ? prepare_super_blocks : prepare_blocks;
        prepare_column(values, n_inputs, tile, n_columns, column, for_amx);
    }
    static void pack(const uint8_t *rows, size_t row_bytes, int n_rows, int64_t n_inputs,
                     uint8_t *group) {
        BlockNumbers numbers;
        for (int64_t b = 0; b < n_inputs / F::weights; b++, group += Layout::bytes) {
            if (n_rows < V::lanes) std::memset(group, 0, Layout::bytes);
            for (int r = 0; r < n_rows; r++) {
                F::read(rows + r * row_bytes + b * F::gguf_bytes, numbers);
                pack_scales<F, V::lanes>(numbers, r, group);
                pack_codes<F, V::lanes>(numbers, r, group, Codes<V, F>::signed_offset);
            }
        }
    }
    template <int n_columns>
    static void multiply(const uint8_t *group, const int32_t *tile, int64_t n_inputs,
                         typename V::Floats (&outputs)[n_columns]) {
        if constexpr (is_super) {
            SuperBlockProduct<V, F, n_columns>::run(group, tile, n_inputs, outputs);
        } else {
            BlockProduct<V, F, n_columns>::run(group, tile, n_inputs, outputs);
        }
    }
};

// A type of float weights. Packing interleaves the rows.
template <class V, class F>
struct FloatWeights {
    static constexpr bool is_quantized = false;
    static constexpr int inputs_per_block = 1;

    static size_t group_bytes(int64_t n_inputs) { return n_inputs * F::bytes * V::lanes; }
    static size_t column_bytes(int64_t n_inputs) { return n_inputs * sizeof(float); }
    static void prepare(const float *values, int64_t n_inputs, int32_t *tile, int n_columns,
                        int column) {
        prepare_floats(values, n_inputs, tile, n_columns, column);
    }
    static void pack(const uint8_t *rows, size_t row_bytes, int n_rows, int64_t n_inputs,
                     uint8_t *group) {
        for (int64_t i = 0; i < n_inputs; i++) {
            for (int r = 0; r < V::lanes; r++, group += F::bytes) {
                if (r < n_rows) {
                    std::memcpy(group, rows + r * row_bytes + i * F::bytes, F::bytes);
                } else {
                    std::memset(group, 0, F::bytes);
                }
            }
        }
    }
    template <int n_columns>
    static void multiply(const uint8_t *group, const int32_t *tile, int64_t n_inputs,
                         typename V::Floats (&outputs)[n_columns]) {
        FloatProduct<V, F, n_columns>::run(group, tile, n_inputs, outputs);
    }
};

// Call `visit` with the operations on a type of weights.
template <class V, class Visit>
auto with_weights(WeightType type, Visit visit) {
    switch (type) {
        case WeightType::q4_0: return visit(QuantizedWeights<V, Q4_0>());
        case WeightType::q4_1: return visit(QuantizedWeights<V, Q4_1>());
        case WeightType::q5_0: return visit(QuantizedWeights<V, Q5_0>());
        case WeightType::q5_1: return visit(QuantizedWeights<V, Q5_1>());
        case WeightType::q8_0: return visit(QuantizedWeights<V, Q8_0>());
        case WeightType::q2_k: return visit(QuantizedWeights<V, Q2_K>());
        case WeightType::q3_k: return visit(QuantizedWeights<V, Q3_K>());
        case WeightType::q4_k: return visit(QuantizedWeights<V, Q4_K>());
        case WeightType::q5_k: return visit(QuantizedWeights<V, Q5_K>());
        case WeightType::q6_k: return visit(QuantizedWeights<V, Q6_K>());
        case WeightType::iq4_nl: return visit(QuantizedWeights<V, IQ4_NL>());
        case WeightType::iq4_xs: return visit(QuantizedWeights<V, IQ4_XS>());
        case WeightType::mxfp4: return visit(QuantizedWeights<V, MXFP4>());
        case WeightType::f16: return visit(FloatWeights<V, F16>());
        case WeightType::bf16: return visit(FloatWeights<V, BF16>());
        default: return visit(FloatWeights<V, F32>());
    }
}

// --- by the number of columns ---

// Multiply one group of rows with one tile of columns, and store the outputs.
template <class V, class Weights, int n_columns>
void multiply_tile(const uint8_t *group, const int32_t *tile, int64_t n_inputs, int n_rows,
                   float *outputs, size_t output_stride) {
    typename V::Floats results[n_columns];
    Weights::template multiply<n_columns>(group, tile, n_inputs, results);
#pragma GCC unroll 16
    for (int n = 0; n < n_columns; n++) {
        if (n_rows == V::lanes) {
            V::store(outputs + n * output_stride, results[n]);
        } else {
            V::store_first(outputs + n * output_stride, results[n], n_rows);
        }
    }
}

// 0, 1, ..., count - 1 as template arguments. (In place of std::make_index_sequence: see
// instruction_sets/instruction_set.h.)
template <int... numbers> struct Numbers {};
template <int count, int... numbers>
constexpr auto first_numbers() {
    if constexpr (count == 0) {
        return Numbers<numbers...>();
    } else {
        return first_numbers<count - 1, count - 1, numbers...>();
    }
}

// --- the functions of an InstructionSet ---

// `most_columns` is the largest number of columns in a tile.
template <class V, int most_columns>
struct ProductTable {
    using Multiply = void (*)(const uint8_t *, const int32_t *, int64_t, int, float *, size_t);

    // The `multiply_tile` for a number of columns.
    template <class Weights, int... numbers>
    static Multiply choose(int n_columns, Numbers<numbers...>) {
        static constexpr Multiply by_columns[] = {multiply_tile<V, Weights, numbers + 1>...};
        return by_columns[n_columns - 1];
    }

    static size_t group_bytes(WeightType type, int64_t n_inputs) {
        return with_weights<V>(type, [=](auto weights) { return weights.group_bytes(n_inputs); });
    }
    static size_t column_bytes(WeightType type, int64_t n_inputs) {
        return with_weights<V>(type, [=](auto weights) { return weights.column_bytes(n_inputs); });
    }
    static int inputs_per_block(WeightType type) {
        return with_weights<V>(type, [](auto weights) { return int{weights.inputs_per_block}; });
    }
    static void pack(WeightType type, const void *rows, size_t row_bytes, int n_rows,
                     int64_t n_inputs, void *group) {
        with_weights<V>(type, [=](auto weights) {
            weights.pack(static_cast<const uint8_t *>(rows), row_bytes, n_rows, n_inputs,
                         static_cast<uint8_t *>(group));
        });
    }
    static void prepare(WeightType type, const float *values, int64_t n_inputs, void *tile,
                        int n_columns, int column) {
        with_weights<V>(type, [=](auto weights) {
            weights.prepare(values, n_inputs, static_cast<int32_t *>(tile), n_columns, column);
        });
    }
    static void multiply(WeightType type, const void *group, const void *tile, int64_t n_inputs,
                         int n_columns, int n_rows, float *outputs, size_t output_stride) {
        with_weights<V>(type, [=](auto weights) {
            choose<decltype(weights)>(n_columns, first_numbers<most_columns>())(
                static_cast<const uint8_t *>(group), static_cast<const int32_t *>(tile), n_inputs,
                n_rows, outputs, output_stride);
        });
    }
};

}  // namespace
