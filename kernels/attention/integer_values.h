// The values of the cache as integers, so that sums of them are exact.
//
//     value = integer * factor        |integer| <= 2^13
//
// with one factor for each cell: the power of two that makes its largest |value| an integer from
// 2^12 to 2^13. So all float16 values of the two highest binades of a cell are exact.
#pragma once

#include "attention/prefetch.h"
#include "attention/task.h"
#include "vectors/stored_numbers.h"

namespace {

template <class V>
struct IntegerValues {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    // The exponent of a cell with an infinity or a NaN.
    static constexpr int not_finite = 128;

    // --- factors ---

    // The factor of a cell, from the exponent of its largest |value|. A cell that is not finite
    // has a factor of NaN, which reaches the weights of exactly those rows that see the cell. If
    // all values are nearly 0, the factor is 2^-109, which still has an inverse.
    static float factor(int exponent) {
        if (exponent == not_finite) return __builtin_nanf("");
        const int n = exponent < -97 ? -109 : exponent - 12;
        return float_of((n + 127) << 23);
    }
    // 1 / factor. For a NaN it is some number: what results is either not seen, or multiplied by a
    // weight of 0.
    static float inverse(float factor) {
        int32_t bits;
        std::memcpy(&bits, &factor, sizeof bits);
        return float_of((254 << 23) - bits);
    }
    static float float_of(int32_t bits) {
        float number;
        std::memcpy(&number, &bits, sizeof number);
        return number;
    }

    // The exponent of the largest of `size` |values|.
    template <NumberType type>
    static int largest_exponent(const char *cell, int64_t size) {
        Ints largest = V::zero_ints();
        if constexpr (type == NumberType::f16) {
            // Two for each lane, without converting them. The last vector may overlap its
            // neighbour.
            constexpr int64_t step = 2 * V::lanes;
            if (size >= step) {
                for (int64_t i = 0; i < size; i += step) {
                    const char *halves = cell + 2 * smaller(i, size - step);
                    largest = V::larger_half_magnitudes(V::load(halves), largest);
                }
                const int exponent = V::largest_short(largest) >> 10;
                return exponent == 31 ? not_finite : exponent - 15;
            }
        }
        for (int64_t i = 0; i < size; i += V::lanes) {
            const Floats values = load_padded<V, type>(cell, i, size);
            const Ints magnitudes = V::bit_and(V::float_bits(values), V::all_ints(0x7fffffff));
            largest = V::larger(largest, magnitudes);
        }
        return (V::largest_lane(largest) >> 23) - 127;
    }

    // Some cells of values. Indices after the last cell repeat it.
    struct Cells {
        const char *values;
        int64_t first;
        int64_t last;
        size_t stride;

        Cells(const AttentionJob &job, const AttentionTask &task, int64_t first)
            : values(values_of(job, task)), first(first), last(job.n_cells - 1),
              stride(job.value_cell_stride) {}
        const char *operator[](int i) const { return values + smaller(first + i, last) * stride; }
    };

    // Find the factors of n cells.
    static void find_factors(const AttentionJob &job, const AttentionTask &task, int64_t first_cell,
                             int n, float *factors) {
        with_type(job.value_type, [&](auto type) {
            const Cells cells(job, task, first_cell);
            for (int i = 0; i < n; i++) {
                factors[i] = factor(largest_exponent<type()>(cells[i], job.value_size));
            }
        });
    }

    // --- integers ---

    // Convert the values of a block: `n` numbers of each from `first` on, which is a multiple of
    // the lanes. The numbers of two cells are stored side by side, because the dot product of
    // pairs adds both at once.
    static void convert(const AttentionJob &job, const AttentionTask &task, int64_t block,
                        const float *factors, int64_t first, int64_t n, int16_t *pairs) {
        with_type(job.value_type, [&](auto type) {
            // The last bits of 1.5 * 2^23 + x are those of the integer nearest to x, even if it is
            // negative. This saves the conversion to an integer.
            const Floats magic = V::all(12582912.0f);
            const Cells cells(job, task, block * cells_per_block);
            const int64_t start = bytes_of_numbers(job.value_type, first);
            const int64_t bytes =
                bytes_of_numbers(job.value_type, smaller(n, job.value_size - first));
            // Where the last whole vector of a value ends.
            const int64_t whole = smaller(first + n, job.value_size - job.value_size % V::lanes);

            for (int i = 0; i < cells_per_block; i += 2) {
                prefetch(cells[i + cells_per_block] + start, bytes);
                prefetch(cells[i + 1 + cells_per_block] + start, bytes);
                const Floats inverse_a = V::all(inverse(factors[i]));
                const Floats inverse_b = V::all(inverse(factors[i + 1]));
                const auto store_pairs = [&](Floats a, Floats b) {
                    const Ints integers_a = V::float_bits(V::multiply_add(a, inverse_a, magic));
                    const Ints integers_b = V::float_bits(V::multiply_add(b, inverse_b, magic));
                    V::store(pairs, V::pair_shorts(integers_a, integers_b));
                    pairs += 2 * V::lanes;
                };
                const char *const a = cells[i];
                const char *const b = cells[i + 1];
                int64_t d = first;
                for (; d < whole; d += V::lanes) {
                    store_pairs(load_numbers<V, type()>(a, d), load_numbers<V, type()>(b, d));
                }
                for (; d < first + n; d += V::lanes) {
                    store_pairs(load_padded<V, type()>(a, d, job.value_size),
                                load_padded<V, type()>(b, d, job.value_size));
                }
            }
        });
    }

    // Set the integers of cells that are not finite to 0, in a block that was converted. As factors
    // of weights of 0 they could be any, but halved products add them to the weights of other
    // cells, and those sums must fit into 16 bits.
    static void clear_not_finite(const float *factors, int64_t n, int16_t *pairs) {
        for (int i = 0; i < cells_per_block; i++) {
            const bool is_nan = factors[i] != factors[i];
            if (!is_nan) continue;
            int16_t *const cell = pairs + i / 2 * 2 * n + i % 2;
            for (int64_t d = 0; d < n; d++) cell[2 * d] = 0;
        }
    }
};

}  // namespace
