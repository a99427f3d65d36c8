// Queries and keys as integers, so that a score is a few exact sums of integer products.
//
// The dimensions of a head are cut into parts of 32. Each part of a query or a key has a factor of
// its own, so that a few large dimensions (in some models, 300 where others are 1) cost the others
// no precision:
//
//     query = integer * factor      sum of |integers| < 2^17, |integer| < 2^14
//     key   = integer * factor      |integer| <= 2^14
//
// So the sum of 32 products is below 2^31, and exact, and a query plus a key fits into 16 bits.
//
// With the queries and keys of a 1.5B model, errors of scores are a quarter of those that rounding
// queries to float16 causes. Errors of outputs are a hundredth of those of llama.cpp's sums in
// float16, and a third in the layer where both are largest. (Compared with sums of floats, scores
// take half the time; all of attention takes 0.8 of it for 512 rows over 4,000 cells, and 0.9 to
// 1.0 for one row.)
#pragma once

#include "attention/halved_products.h"
#include "attention/prefetch.h"
#include "attention/task.h"
#include "vectors/arithmetic.h"
#include "vectors/stored_numbers.h"

namespace {

// How many dimensions share a factor, and how many words of two 16-bit integers they are.
constexpr int part_dimensions = 32;
constexpr int part_words = part_dimensions / 2;

// How many parts the dimensions of a key are cut into. The last part is padded with zeros.
constexpr int64_t parts_of(int64_t key_size) {
    return (key_size + part_dimensions - 1) / part_dimensions;
}

// The queries of a task's rows as integers.
template <class V>
struct IntegerQueries {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    // The largest integer, and the largest sum of |integers|. (Rounding adds up to 16 to it.)
    static constexpr float most = (1 << 14) - 1;
    static constexpr float most_in_all = (1 << 17) - 32;
    // Smaller queries lose digits, so that the inverse of a factor is finite.
    static constexpr float least_factor = 1e-38f;

    // 32 numbers from `first` on. After the last one come zeros.
    static void load_part(const float *query, int64_t first, int64_t size,
                          float (&numbers)[part_dimensions]) {
        for (int i = 0; i < part_dimensions; i++) {
            numbers[i] = first + i < size ? query[first + i] : 0.0f;
        }
    }

    // The factor of 32 numbers: a NaN if one of them is not finite.
    static float factor(const float (&numbers)[part_dimensions]) {
        float sum = 0;
        float largest = 0;
        for (int i = 0; i < part_dimensions; i++) {
            const float magnitude = __builtin_fabsf(numbers[i]);
            sum += magnitude;
            if (magnitude > largest) largest = magnitude;
        }
        if (!(sum < __builtin_inff())) return __builtin_nanf("");
        const float by_sum = sum / most_in_all;
        const float by_largest = largest / most;
        const float factor = by_sum > by_largest ? by_sum : by_largest;
        return factor > least_factor ? factor : least_factor;
    }

    // Convert 32 numbers. Returns their factor.
    static float convert_part(const float (&numbers)[part_dimensions],
                              int16_t (&integers)[part_dimensions]) {
        const float common = factor(numbers);
        const Floats inverse = V::all(1 / common);
        for (int i = 0; i < part_dimensions; i += V::lanes) {
            const Floats scaled = V::multiply(V::load_floats(numbers + i), inverse);
            V::store_shorts(integers + i, V::round_to_ints(scaled));
        }
        return common;
    }

    // A query as integers, for each part of 32 dimensions. Those of the queries of a tile are
    // interleaved: they are `distance` apart.
    struct Query {
        int32_t *words;
        float *factors;
        int32_t *own_products;
        int distance;
    };

    // Convert a query. The factors are multiplied with `scale`.
    template <bool halved>
    static void convert(const float *query, int64_t size, float scale, const Query &to) {
        for (int64_t part = 0; part < parts_of(size); part++) {
            float numbers[part_dimensions];
            load_part(query, part * part_dimensions, size, numbers);
            int16_t integers[part_dimensions];
            to.factors[part * to.distance] = scale * convert_part(numbers, integers);
            if constexpr (halved) {
                to.own_products[part * to.distance] = own_products<V>(integers, part_words);
            }
            for (int word = 0; word < part_words; word++) {
                std::memcpy(to.words + (part * part_words + word) * to.distance,
                            integers + 2 * word, sizeof(int32_t));
            }
        }
    }
};

// The keys of some cells as integers: a vector holds two dimensions of a cell in each lane.
template <class V>
struct IntegerKeys {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;

    // The keys of a tile of cells, transposed.
    struct Tile {
        // [word of two dimensions][cell]
        int32_t *words;
        // [part of 32 dimensions][cell]
        float *factors;
        // [part of 32 dimensions][cell]: what sums start from, if products are halved.
        int32_t *starts;
        // How many cells there are.
        int n_cells;

        void find_starts(int64_t n_parts) const {
            for (int64_t part = 0; part < n_parts; part++) {
                for (int cell = 0; cell < n_cells; cell += V::lanes) {
                    const int32_t *const first = words + part * part_words * n_cells + cell;
                    V::store(starts + part * n_cells + cell,
                             start_of_sums<V>(reinterpret_cast<const int16_t *>(first),
                                              part_words, 2 * n_cells));
                }
            }
        }
    };

    // `lanes` cells of a tile: where their keys are, and where a part of them goes.
    struct Cells {
        const char *keys[V::lanes];
        // As many cells of the next tile. They are prefetched while these are converted: otherwise
        // one row over 14 thousand cells takes 1.15 times as long.
        const char *next;
        size_t next_stride;
        int64_t key_size;
        int32_t *words;
        float *factors;
        // How far apart the words of two dimensions are, which is the number of cells of the tile.
        int distance;

        // Prefetch the bytes of the next cell i from `offset` on.
        void prefetch_next(int i, int64_t offset) const {
            __builtin_prefetch(next + i * next_stride + offset, 0, 2);
        }
    };

    // How the keys of a part become integers, for each cell.
    struct Scales {
        // What keys are multiplied with.
        Floats inverse;
        // A number so large that its sum with a scaled key is rounded to an integer. The last 16
        // bits of the sum are this integer, even if it is negative.
        Floats magic;
        // key = integer * factor; a NaN if the key is not finite.
        Floats factor;
    };

    // --- scales ---

    static Floats powers_of_two(Ints biased_exponents) {
        return V::floats_of_bits(V::template shift_ints_left<23>(biased_exponents));
    }
    // Powers of two, or NaN where the mask holds.
    static Floats powers_of_two_or_nan(Ints biased_exponents, typename V::Mask is_nan) {
        const Ints bits = V::template shift_ints_left<23>(biased_exponents);
        const Ints nan = V::keep_where(is_nan, V::all_ints(0x7fc00000));
        return V::floats_of_bits(V::bit_or(bits, nan));
    }

    // The scales of a part from the biased exponents of its largest numbers, which become integers
    // from 2^13 to 2^14.
    template <NumberType type>
    static Scales scales(Ints exponents) {
        if constexpr (type == NumberType::f16) {
            // The numbers are too small by 2^112 (see `upper_floats`). The inverse makes up for
            // 2^82 of that, and the magic number for the rest.
            const typename V::Mask is_nan = V::at_least(exponents, V::all_ints(31));
            return {powers_of_two(V::subtract(V::all_ints(237), exponents)), V::all(0x1.8p-7f),
                    powers_of_two_or_nan(V::add(exponents, V::all_ints(99)), is_nan)};
        }
        // Keys below 2^-112 lose digits, so that the inverse is finite.
        const Ints bounded = V::larger(exponents, V::all_ints(15));
        const typename V::Mask is_nan = V::at_least(exponents, V::all_ints(255));
        return {powers_of_two(V::subtract(V::all_ints(267), bounded)), V::all(0x1.8p23f),
                powers_of_two_or_nan(V::subtract(bounded, V::all_ints(13)), is_nan)};
    }

    // Two numbers of each cell as integers, side by side.
    static Ints round_pairs(Floats low, Floats high, const Scales &scales) {
        const Floats low_sum = V::multiply_add(low, scales.inverse, scales.magic);
        const Floats high_sum = V::multiply_add(high, scales.inverse, scales.magic);
        return V::pair_shorts(V::float_bits(low_sum), V::float_bits(high_sum));
    }

    // --- types of 16 bits: two dimensions in each lane from the beginning ---

    // The words of two numbers from `first` on, for each lane. After the last number come zeros.
    static Ints load_words(const char *key, int64_t first, int64_t size) {
        if (first + 2 * V::lanes <= size) return V::load(key + 2 * first);
        char copy[4 * V::lanes] = {};
        if (first < size) std::memcpy(copy, key + 2 * first, 2 * (size - first));
        return V::load(copy);
    }

    // The upper number of each word as a float. A float16 becomes too small by 2^112: its bits are
    // moved to where a float has them. (This is right for numbers below 2^-14, too.)
    template <NumberType type>
    static Floats upper_floats(Ints words) {
        if constexpr (type == NumberType::bf16) {
            return V::floats_of_bits(V::bit_and(words, V::all_ints(static_cast<int>(0xffff0000))));
        }
        const Ints moved = V::template shift_ints_right<3>(words);
        return V::floats_of_bits(V::bit_and(moved, V::all_ints(static_cast<int>(0x8fffe000))));
    }

    // Transpose the words of a part. Returns the bits of the largest magnitude of each cell.
    static Ints transpose_words(const Cells &cells, int64_t first) {
        Ints largest = V::zero_ints();
        for (int word = 0; word < part_words; word += V::lanes) {
            const bool begins_line = word * sizeof(int32_t) % cache_line_bytes == 0;
            const int64_t dimension = first + 2 * word;
            Floats square[V::lanes];
#pragma GCC unroll 16
            for (int i = 0; i < V::lanes; i++) {
                if (begins_line) cells.prefetch_next(i, 2 * dimension);
                const Ints words = load_words(cells.keys[i], dimension, cells.key_size);
                square[i] = V::floats_of_bits(words);
            }
            V::transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < V::lanes; i++) {
                const Ints words = V::float_bits(square[i]);
                largest = V::larger_half_magnitudes(words, largest);
                V::store(cells.words + (word + i) * cells.distance, words);
            }
        }
        const Ints lower = V::bit_and(largest, V::all_ints(0xffff));
        return V::larger(lower, V::template shift_ints_right_unsigned<16>(largest));
    }

    template <NumberType type>
    static void convert_words(const Cells &cells, int64_t first) {
        constexpr int mantissa_bits = type == NumberType::f16 ? 10 : 7;
        const Ints largest = transpose_words(cells, first);
        const Scales to =
            scales<type>(V::template shift_ints_right_unsigned<mantissa_bits>(largest));
        V::store(cells.factors, to.factor);
        for (int word = 0; word < part_words; word++) {
            int32_t *const words = cells.words + word * cells.distance;
            const Ints numbers = V::load(words);
            const Floats low = upper_floats<type>(V::template shift_ints_left<16>(numbers));
            V::store(words, round_pairs(low, upper_floats<type>(numbers), to));
        }
    }

    // --- Q8_0: a part is a block, whose codes and scale are integers and factor already ---

    static void convert_blocks(const Cells &cells, int64_t first) {
        const int64_t offset = bytes_of_numbers(NumberType::q8_0, first);
        float scales[V::lanes];
        for (int i = 0; i < V::lanes; i++) {
            cells.prefetch_next(i, offset);
            scales[i] = V::load_half(cells.keys[i] + offset);
        }
        V::store(cells.factors, V::load_floats(scales));
        for (int word = 0; word < part_words; word += V::lanes) {
            const int64_t codes = offset + 2 + 2 * word;
            Floats square[V::lanes];
#pragma GCC unroll 16
            for (int i = 0; i < V::lanes; i++) {
                square[i] = V::floats_of_bits(V::load_signed_pairs(cells.keys[i] + codes));
            }
            V::transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < V::lanes; i++) {
                V::store(cells.words + (word + i) * cells.distance, V::float_bits(square[i]));
            }
        }
    }

    // --- F32 ---

    static void convert_floats(const Cells &cells, int64_t first) {
        float numbers[part_dimensions][V::lanes];
        Ints largest = V::zero_ints();
        for (int d = 0; d < part_dimensions; d += V::lanes) {
            const bool begins_line = d * sizeof(float) % cache_line_bytes == 0;
            const int64_t dimension = first + d;
            Floats square[V::lanes];
            for (int i = 0; i < V::lanes; i++) {
                if (begins_line) cells.prefetch_next(i, sizeof(float) * dimension);
                square[i] = V::zero();
                if (dimension >= cells.key_size) continue;
                square[i] =
                    load_padded<V, NumberType::f32>(cells.keys[i], dimension, cells.key_size);
            }
            V::transpose(square);
            for (int i = 0; i < V::lanes; i++) {
                const Ints bits = V::float_bits(square[i]);
                largest = V::larger(largest, V::bit_and(bits, V::all_ints(0x7fffffff)));
                V::store(numbers[d + i], square[i]);
            }
        }
        const Scales to =
            scales<NumberType::f32>(V::template shift_ints_right_unsigned<23>(largest));
        V::store(cells.factors, to.factor);
        for (int word = 0; word < part_words; word++) {
            const Floats low = V::load_floats(numbers[2 * word]);
            const Floats high = V::load_floats(numbers[2 * word + 1]);
            V::store(cells.words + word * cells.distance, round_pairs(low, high, to));
        }
    }

    // --- a tile ---

    // Convert a part of the keys of `lanes` cells, from dimension `first` on.
    template <NumberType type>
    static void convert_part(const Cells &cells, int64_t first) {
        if constexpr (type == NumberType::f32) {
            convert_floats(cells, first);
        } else if constexpr (type == NumberType::q8_0) {
            convert_blocks(cells, first);
        } else {
            convert_words<type>(cells, first);
        }
    }

    // Convert the keys of a tile from `first_cell` on. (Cells after the last one repeat it; they
    // are hidden.) On the way, prefetch the cells that come next.
    template <NumberType type>
    static void convert(const AttentionJob &job, const AttentionTask &task, int64_t first_cell,
                        const NextCells &next, const Tile &tile) {
        const char *begin = keys_of(job, task);
        Cells cells;
        cells.key_size = job.key_size;
        cells.distance = tile.n_cells;
        cells.next_stride = next.stride;
        for (int first = 0; first < tile.n_cells; first += V::lanes) {
            for (int i = 0; i < V::lanes; i++) {
                const int64_t cell = smaller(first_cell + first + i, job.n_cells - 1);
                cells.keys[i] = begin + cell * job.key_cell_stride;
            }
            cells.next = next.cells + first * next.stride;
            for (int64_t part = 0; part < parts_of(job.key_size); part++) {
                cells.words = tile.words + part * part_words * tile.n_cells + first;
                cells.factors = tile.factors + part * tile.n_cells + first;
                convert_part<type>(cells, part * part_dimensions);
            }
        }
    }
};

}  // namespace
