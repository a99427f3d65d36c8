// The products of one instruction set, by weight type: what an InstructionSet offers of them.
#pragma once

#include "products/packed_product.h"

namespace {

// Everything about a format of quantised weights.
template <class V, class F>
struct Quantized {
    using Format = F;
    using L = Layout<F, V::lanes>;
    static constexpr bool is_quantized = true;
    static constexpr bool is_super = F::weights == 256;
    static constexpr int inputs_per_block = F::weights;

    static size_t group_bytes(int64_t n_inputs) { return n_inputs / F::weights * L::bytes; }
    static size_t column_bytes(int64_t n_inputs) {
        return n_inputs / F::weights * (is_super ? SuperBlockWords::count : BlockWords::count) * 4;
    }
    static void prepare(const float *values, int64_t n_inputs, int32_t *tile, int n_columns,
                        int column, bool for_tiles = false) {
        (is_super ? prepare_super_blocks : prepare_blocks)(values, n_inputs, tile, n_columns, column,
                                                           for_tiles);
    }
    static void pack(const uint8_t *rows, size_t row_bytes, int n_rows, int64_t n_inputs,
                     uint8_t *group) {
        PlainBlock plain;
        for (int64_t b = 0; b < n_inputs / F::weights; b++, group += L::bytes) {
            if (n_rows < V::lanes) std::memset(group, 0, L::bytes);
            for (int r = 0; r < n_rows; r++) {
                F::read(rows + r * row_bytes + b * F::gguf_bytes, plain);
                pack_block<F, V::lanes>(plain, r, group, Codes<V, F>::signed_offset);
            }
        }
    }
    template <int N>
    static void multiply(const uint8_t *group, const int32_t *tile, int64_t n_inputs,
                         typename V::Floats (&outputs)[N]) {
        if constexpr (is_super) {
            SuperBlockProduct<V, F, N>::run(group, tile, n_inputs, outputs);
        } else {
            BlockProduct<V, F, N>::run(group, tile, n_inputs, outputs);
        }
    }
};

// Everything about a type of float weights.
template <class V, class F>
struct Plain {
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
    template <int N>
    static void multiply(const uint8_t *group, const int32_t *tile, int64_t n_inputs,
                         typename V::Floats (&outputs)[N]) {
        FloatProduct<V, F, N>::run(group, tile, n_inputs, outputs);
    }
};

template <class V, class Kernel, int N>
void multiply_tile(const uint8_t *group, const int32_t *tile, int64_t n_inputs, int n_rows,
                   float *outputs, size_t output_stride) {
    typename V::Floats results[N];
    Kernel::template multiply<N>(group, tile, n_inputs, results);
    for (int n = 0; n < N; n++) {
        if (n_rows == V::lanes) {
            V::store(outputs + n * output_stride, results[n]);
        } else {
            V::store_first(outputs + n * output_stride, results[n], n_rows);
        }
    }
}

// Call `visit` with the kernel of a weight type.
template <class V, class Visit>
auto with_kernel(WeightType type, Visit visit) {
    switch (type) {
        case WeightType::q4_0: return visit(Quantized<V, Q4_0>());
        case WeightType::q4_1: return visit(Quantized<V, Q4_1>());
        case WeightType::q5_0: return visit(Quantized<V, Q5_0>());
        case WeightType::q5_1: return visit(Quantized<V, Q5_1>());
        case WeightType::q8_0: return visit(Quantized<V, Q8_0>());
        case WeightType::q2_k: return visit(Quantized<V, Q2_K>());
        case WeightType::q3_k: return visit(Quantized<V, Q3_K>());
        case WeightType::q4_k: return visit(Quantized<V, Q4_K>());
        case WeightType::q5_k: return visit(Quantized<V, Q5_K>());
        case WeightType::q6_k: return visit(Quantized<V, Q6_K>());
        case WeightType::iq4_nl: return visit(Quantized<V, IQ4_NL>());
        case WeightType::iq4_xs: return visit(Quantized<V, IQ4_XS>());
        case WeightType::mxfp4: return visit(Quantized<V, MXFP4>());
        case WeightType::f16: return visit(Plain<V, F16>());
        case WeightType::bf16: return visit(Plain<V, BF16>());
        default: return visit(Plain<V, F32>());
    }
}

// 0, 1, ..., count - 1 as template arguments.
template <int... N> struct Numbers {};
template <int count, int... N>
constexpr auto first_numbers() {
    if constexpr (count == 0) {
        return Numbers<N...>();
    } else {
        return first_numbers<count - 1, count - 1, N...>();
    }
}

// The functions of an InstructionSet. `columns` is the most columns of a tile.
template <class V, int columns>
struct Products {
    using Multiply = void (*)(const uint8_t *, const int32_t *, int64_t, int, float *, size_t);

    template <class Kernel, int... N>
    static Multiply choose(int n_columns, Numbers<N...>) {
        static constexpr Multiply by_columns[] = {multiply_tile<V, Kernel, N + 1>...};
        return by_columns[n_columns - 1];
    }

    static size_t group_bytes(WeightType type, int64_t n_inputs) {
        return with_kernel<V>(type, [=](auto kernel) { return kernel.group_bytes(n_inputs); });
    }
    static size_t column_bytes(WeightType type, int64_t n_inputs) {
        return with_kernel<V>(type, [=](auto kernel) { return kernel.column_bytes(n_inputs); });
    }
    static int inputs_per_block(WeightType type) {
        return with_kernel<V>(type, [](auto kernel) { return int{kernel.inputs_per_block}; });
    }
    static void pack(WeightType type, const void *rows, size_t row_bytes, int n_rows,
                     int64_t n_inputs, void *group) {
        with_kernel<V>(type, [=](auto kernel) {
            kernel.pack(static_cast<const uint8_t *>(rows), row_bytes, n_rows, n_inputs,
                        static_cast<uint8_t *>(group));
        });
    }
    static void prepare(WeightType type, const float *values, int64_t n_inputs, void *tile,
                        int n_columns, int column) {
        with_kernel<V>(type, [=](auto kernel) {
            kernel.prepare(values, n_inputs, static_cast<int32_t *>(tile), n_columns, column);
        });
    }
    static void multiply(WeightType type, const void *group, const void *tile, int64_t n_inputs,
                         int n_columns, int n_rows, float *outputs, size_t output_stride) {
        with_kernel<V>(type, [=](auto kernel) {
            choose<decltype(kernel)>(n_columns, first_numbers<columns>())(
                static_cast<const uint8_t *>(group), static_cast<const int32_t *>(tile), n_inputs,
                n_rows, outputs, output_stride);
        });
    }
};

}  // namespace
