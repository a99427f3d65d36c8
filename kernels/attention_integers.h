// The values of the cache as integers, so that sums of them are exact.
#pragma once

#include "attention_cells.h"

namespace {

template <class V>
struct AttentionIntegers {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;

    // A cell's factor: the power of two that makes its largest |value| an integer between 2^12 and
    // 2^13; so float16 values of the two top binades are exact integers.
    struct Factor {
        float power, inverse;

        // From the exponent of the largest |value|. Where it is that of infinity or NaN, the factor
        // is NaN, which gets into the weights of just the rows that see the cell. Where all values
        // are all but 0 it is 2^-109, to have an inverse.
        explicit Factor(int exponent) {
            const int n = exponent < -97 ? -109 : exponent - 12;
            power = exponent == 128 ? __builtin_nanf("") : power_of_two(n);
            inverse = exponent == 128 ? 0 : power_of_two(-n);
        }
        static float power_of_two(int n) {
            const int32_t bits = (n + 127) << 23;
            float power;
            std::memcpy(&power, &bits, sizeof power);
            return power;
        }
    };

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
            const Ints absolute =
                V::bits(V::bits_of(load_cell<V, type>(cell, i)), V::all_ints(0x7fffffff));
            largest = V::larger(largest, absolute);
        }
        return (V::largest_lane(largest) >> 23) - 127;
    }

    // The integers of two cells, side by side: the dot product of pairs adds both at once.
    template <CacheType type>
    static void store_pair(const char *first, const char *second, int64_t size, float *factors,
                           int16_t *pairs) {
        const Factor a(largest_exponent<type>(first, size));
        const Factor b(largest_exponent<type>(second, size));
        factors[0] = a.power;
        factors[1] = b.power;
        // The last bits of 1.5 * 2^23 + x are those of the integer nearest to x, also a negative
        // one: this saves the conversion to an integer.
        const Floats magic = V::all(12582912.0f);
        const Floats to_first = V::all(a.inverse), to_second = V::all(b.inverse);
        for (int64_t i = 0; i < size; i += V::lanes) {
            const Floats x = V::multiply_add(load_cell<V, type>(first, i), to_first, magic);
            const Floats y = V::multiply_add(load_cell<V, type>(second, i), to_second, magic);
            V::store(pairs + 2 * i, V::pair(V::bits_of(x), V::bits_of(y)));
        }
    }

    template <CacheType type>
    static void convert_type(const AttentionJob &job, const AttentionTask &task, int64_t block,
                             int64_t position, float *space, const TaskMemory &memory) {
        const int64_t size = rounded_up(job.value_size, V::lanes);
        const char *values = job.values + task.kv_head * job.value_head_stride +
                             task.stream * job.value_stream_stride;
        for (int pair = 0; pair < pairs_per_block; pair++) {
            const char *cells[2];
            for (int i = 0; i < 2; i++) {
                const int64_t cell =
                    smaller(block * cells_per_block + 2 * pair + i, job.n_cells - 1);
                cells[i] = values + cell * job.value_cell_stride;
                const int64_t later = smaller(cell + cells_ahead, job.n_cells - 1);
                prefetch_cell<type>(values + later * job.value_cell_stride, job.value_size);
            }
            float *factors = memory.factors + position * cells_per_block + 2 * pair;
            int16_t *pairs = memory.values + (position * pairs_per_block + pair) * 2 * size;
            if (size == job.value_size) {
                store_pair<type>(cells[0], cells[1], size, factors, pairs);
                continue;
            }
            for (int64_t i = 0; i < size; i += V::lanes) {
                V::store(space + i, load_padded<V, type>(cells[0], i, job.value_size));
                V::store(space + size + i, load_padded<V, type>(cells[1], i, job.value_size));
            }
            store_pair<CacheType::f32>(reinterpret_cast<const char *>(space),
                                       reinterpret_cast<const char *>(space + size), size, factors,
                                       pairs);
        }
    }

    // The values of a block, which is the task's number `position`; `space` is for two of them.
    static void convert(const AttentionJob &job, const AttentionTask &task, int64_t block,
                        int64_t position, float *space, const TaskMemory &memory) {
        switch (job.value_type) {
            case CacheType::f32:
                return convert_type<CacheType::f32>(job, task, block, position, space, memory);
            case CacheType::f16:
                return convert_type<CacheType::f16>(job, task, block, position, space, memory);
            case CacheType::bf16:
                return convert_type<CacheType::bf16>(job, task, block, position, space, memory);
            default:
                return convert_type<CacheType::q8_0>(job, task, block, position, space, memory);
        }
    }
};

}  // namespace
