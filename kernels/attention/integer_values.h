// The values of the cache as integers, so that sums of them are exact.
#pragma once

#include "attention/cells.h"

namespace {

template <class V>
struct AttentionIntegers {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;

    // A cell's factor: the power of two that makes its largest |value| an integer between 2^12 and
    // 2^13; so float16 values of the two top binades are exact integers. From the exponent of the
    // largest |value|. Where it is that of infinity or NaN, the factor is NaN, which gets into the
    // weights of just the rows that see the cell. Where all values are all but 0 it is 2^-109, to
    // have an inverse.
    static float factor(int exponent) {
        if (exponent == 128) return __builtin_nanf("");
        const int n = exponent < -97 ? -109 : exponent - 12;
        return float_of((n + 127) << 23);
    }
    // Of a NaN it is any number: what comes of it is not seen, or multiplied by a weight of 0.
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

    // The exponent of the largest of `size` |values|: 128 where one is not finite.
    template <CacheType type>
    static int largest_exponent(const char *cell, int64_t size) {
        Ints largest = V::zero_ints();
        if constexpr (type == CacheType::f16) {
            // 2 for each lane, without converting them; the last vector may overlap.
            constexpr int64_t step = 2 * V::lanes;
            if (size >= step) {
                for (int64_t i = 0; i < size; i += step) {
                    const char *halves = cell + 2 * smaller(i, size - step);
                    largest = V::larger_halves(V::load(halves), largest);
                }
                const int exponent = V::largest_short(largest) >> 10;
                return exponent == 31 ? 128 : exponent - 15;
            }
        }
        for (int64_t i = 0; i < size; i += V::lanes) {
            const Floats values = load_padded<V, type>(cell, i, size);
            largest = V::larger(largest, V::bits(V::bits_of(values), V::all_ints(0x7fffffff)));
        }
        return (V::largest_lane(largest) >> 23) - 127;
    }

    // The cells of a block of values, and those behind the last cell, which repeat it.
    struct Cells {
        const char *values;
        int64_t first, last;
        size_t stride;

        Cells(const AttentionJob &job, const AttentionTask &task, int64_t block)
            : values(values_of(job, task)), first(block * cells_per_block), last(job.n_cells - 1),
              stride(job.value_cell_stride) {}
        const char *operator[](int i) const { return values + smaller(first + i, last) * stride; }
    };

    // The factors of a block. Unless its values were prefetched, it prefetches those of the next block.
    static void find_factors(const AttentionJob &job, const AttentionTask &task, int64_t block,
                             bool prefetched, float *factors) {
        with_type(job.value_type, [&](auto type) {
            const Cells cells(job, task, block);
            const int64_t bytes = bytes_of_cell(job.value_type, job.value_size);
            for (int i = 0; i < cells_per_block; i++) {
                if (!prefetched) prefetch(cells[i + cells_per_block], bytes);
                factors[i] = factor(largest_exponent<type()>(cells[i], job.value_size));
            }
        });
    }

    // The integers of a block, of `n` numbers from `first` on, a multiple of the lanes. Those of two
    // cells lie side by side: the dot product of pairs adds both at once.
    static void convert(const AttentionJob &job, const AttentionTask &task, int64_t block,
                        const float *factors, int64_t first, int64_t n, int16_t *pairs) {
        with_type(job.value_type, [&](auto type) {
            // The last bits of 1.5 * 2^23 + x are those of the integer nearest to x, also a negative
            // one: this saves the conversion to an integer.
            const Floats magic = V::all(12582912.0f);
            const Cells cells(job, task, block);
            const int64_t start = bytes_of_cell(job.value_type, first);
            const int64_t bytes = bytes_of_cell(job.value_type, smaller(n, job.value_size - first));
            const int64_t whole = smaller(first + n, job.value_size - job.value_size % V::lanes);
            for (int i = 0; i < cells_per_block; i += 2) {
                prefetch(cells[i + cells_per_block] + start, bytes);
                prefetch(cells[i + 1 + cells_per_block] + start, bytes);
                const Floats to_first = V::all(inverse(factors[i]));
                const Floats to_second = V::all(inverse(factors[i + 1]));
                const auto store_pairs = [&](Floats a, Floats b) {
                    const Ints x = V::bits_of(V::multiply_add(a, to_first, magic));
                    const Ints y = V::bits_of(V::multiply_add(b, to_second, magic));
                    V::store(pairs, V::pair(x, y));
                    pairs += 2 * V::lanes;
                };
                const char *const a = cells[i], *const b = cells[i + 1];
                int64_t d = first;
                for (; d < whole; d += V::lanes) {
                    store_pairs(load_cell<V, type()>(a, d), load_cell<V, type()>(b, d));
                }
                for (; d < first + n; d += V::lanes) {
                    store_pairs(load_padded<V, type()>(a, d, job.value_size),
                                load_padded<V, type()>(b, d, job.value_size));
                }
            }
        });
    }
};

}  // namespace
