// The second pass of attention: the scores of a row become integer weights.
//
// A sum of floats depends on the order of its terms, and the cells of a sequence are in any order
// in the cache. So all sums over cells are sums of integers, which do not. For the cells that a
// row sees, with scores s, values v = integer * factor, |integer| <= 2^13, and m = max s:
//
//     output = sum of exp(s - m) * factor * integer / (sum of exp(s - m) + exp(sink - m))
//
//  - The denominator adds exp(s - m) * 2^28, rounded to integers: an error of 2^-29 per cell, where
//    the denominator is at least 1.
//  - A weight is exp(s - m) * factor * (a power of two), rounded to an integer W. The power is
//    chosen such that the mean W is 2^10 to 2^11 (more for fewer than 128 cells) and the largest
//    at most 2^23. Both the sum and the largest of the unrounded weights are exact, so the power
//    depends only on the set of cells. Rounding equal weights is a random error of 2e-4 of one of
//    them; if a few cells have most of the weight, it is a far smaller part of the output.
//  - The integers of values have 13 bits and a sign (float16 has 11 bits): rounding values below a
//    quarter of the largest of their cell is an error of at most 2^-13 of the largest.
//
// The sum of products W * integer is exact. Most weights are "light", below 2^14: one product of
// 16-bit integers suffices. W of the others is split into heavy * 2^12 + light, and pairs of cells
// with a heavy part are added once more. How a weight is split has no effect on the sum, so each
// block may do it as it suits. (Splitting all weights, with a power of two that depends on the
// largest one alone, doubles the time of the third pass.)
//
// Nothing overflows 32 bits for up to 2^20 cells:
//  - light parts of a block: the sum of |light| is kept below 2^18, times 2^13 for the values. The
//    sum over blocks is in two words, the low 16 bits and the others: 2^14 blocks * 2^16.
//  - heavy parts of all cells: heavy <= W / 2^11, and the sum of W is at most 2^28 (and n / 2 for
//    rounding), so it is at most 2^17 * 2^13 (plus 2^8 * 2^13).
//  - the sums of 8 numbers <= 2^28 are unsigned; they too are added up in two words.
#pragma once

#include "attention/halved_products.h"
#include "attention/task.h"
#include "vectors/arithmetic.h"

namespace {

template <class V>
struct SoftmaxWeights {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    using Mask = typename V::Mask;

    // e^0 becomes 2^28 as an integer.
    static constexpr int exponential_bits = 28;
    static constexpr int heavy_shift = 12;
    // Weights from this one on have a heavy part.
    static constexpr int lightest_heavy = 1 << 14;
    static constexpr int largest_block_sum = (1 << 18) - 1;

    // A row of the task.
    struct Row {
        // The scores of the cells of its blocks.
        float *scores;
        // The factors of these cells' values.
        const float *factors;
        // How many cells there are.
        int64_t n;
        // [block]: see `TaskMemory`.
        uint32_t *heavy_pairs;
        int32_t *own_products;
    };

    // An exact sum of integers in each lane: of numbers up to 8 * 2^28, up to 2^16 times.
    struct Total {
        Ints low = V::zero_ints();
        Ints high = V::zero_ints();

        void add(Ints sum) {
            low = V::add(low, V::bit_and(sum, V::all_ints(0xffff)));
            high = V::add(high, V::template shift_ints_right_unsigned<16>(sum));
        }
        double sum() const {
            uint32_t lows[V::lanes], highs[V::lanes];
            V::store(lows, low);
            V::store(highs, high);
            uint64_t sum = 0;
            for (int i = 0; i < V::lanes; i++) sum += (uint64_t{highs[i]} << 16) + lows[i];
            return static_cast<double>(sum);
        }
    };

    // --- the row's largest score, and its sums ---

    // The largest score and factor of the cells that a row sees.
    struct Largest {
        float score;
        float factor;
    };

    // Those of row m of a task, from what each of the threads that worked on it found.
    static Largest find_largest(const AttentionTask &task, int64_t m, int n_threads,
                                const float *lanes) {
        Floats score = V::all(-INFINITY);
        Floats factor = V::zero();
        for (int thread = 0; thread < n_threads; thread++) {
            const float *at = lanes + (thread * task.rows() + m) * largest_floats<V>;
            score = V::larger(V::load_floats(at), score);
            factor = V::larger(V::load_floats(at + V::lanes), factor);
        }
        return {V::largest_lane(score), V::largest_lane(factor)};
    }

    // Sums over the cells of a row, all times 2^28.
    struct Sums {
        double exponentials;
        double weights;
        float largest_weight;
        // Whether all weights are finite.
        bool finite;
        // How many cells the row sees.
        int64_t n_seen;
    };

    // The largest of the floats that have these bits, none of which is below 0. Infinity is larger
    // than all numbers, and NaN larger still.
    static float largest_of_bits(Ints bits) {
        uint32_t lanes[V::lanes];
        V::store(lanes, bits);
        uint32_t largest = 0;
        for (const uint32_t lane : lanes) largest = lane > largest ? lane : largest;
        float number;
        std::memcpy(&number, &largest, sizeof number);
        return number;
    }

    // scores <- weights: exp(score - largest) * factor / largest factor * 2^28
    static Sums exponentials(const Row &row, float largest_score, float largest_factor) {
        const Floats m = V::all(largest_score);
        const Floats inverse = V::all(1 / largest_factor);
        Total denominator, numerator;
        // The bits of a weight: as integers they are in the order of the weights, and those of
        // infinity and of NaN are the largest.
        Ints largest_bits = V::zero_ints();
        int64_t n_seen = 0;
        constexpr int cells = smaller(cells_per_block, 8 * V::lanes);  // 8 numbers in each lane
        for (int64_t first = 0; first < row.n; first += cells) {
            Ints exponential_sum = V::zero_ints();
            Ints weight_sum = V::zero_ints();
            for (int64_t i = first; i < first + cells; i += V::lanes) {
                const Floats scores = V::load_floats(row.scores + i);
                const Mask seen = V::not_equal(scores, V::all(-INFINITY));
                n_seen += V::count_lanes(seen);
                const Floats e = exponential<V>(V::subtract(scores, m), exponential_bits);
                const Floats ratio = V::multiply(V::load_floats(row.factors + i), inverse);
                const Floats weight = V::keep_where(seen, V::multiply(e, ratio));
                exponential_sum = V::add(exponential_sum, V::round_to_ints(e));  // 0 if not seen
                weight_sum = V::add(weight_sum, V::round_to_ints(weight));
                largest_bits = V::larger_unsigned(V::float_bits(weight), largest_bits);
                V::store(row.scores + i, weight);
            }
            denominator.add(exponential_sum);
            numerator.add(weight_sum);
        }
        const float largest = largest_of_bits(largest_bits);
        const bool finite = largest - largest == 0;  // for infinity and NaN, this is NaN
        return {denominator.sum(), numerator.sum(), largest, finite, n_seen};
    }

    // --- the power of two that makes integers of a row's weights ---

    // The largest power of two that is not above x.
    static double power_below(double x) {
        uint64_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        bits &= uint64_t{0x7ff} << 52;
        std::memcpy(&x, &bits, sizeof bits);
        return x;
    }

    static double weight_scale(const Sums &sums) {
        // The sum to aim at: 2^11 per cell, from 2^18 to 2^28.
        double target = 2048.0 * sums.n_seen;
        if (target < 1 << 18) target = 1 << 18;
        if (target > 1 << 28) target = 1 << 28;
        const double largest = sums.largest_weight;
        if (!(largest > 1e-30)) return 1;  // all values are 0, or nothing compared to the scores
        const double sum = sums.weights > largest ? sums.weights : largest;
        const double by_sum = power_below(target / sum);
        const double by_largest = power_below((1 << 23) / largest);
        return by_sum < by_largest ? by_sum : by_largest;
    }

    // --- rounding, and splitting into light and heavy parts ---

    // Round the weights of a block and split them: 64 floats become 64 light and 64 heavy 16-bit
    // integers. Returns a bit for each pair of cells that has a heavy part.
    static uint32_t split_block(float *weights, float scale) {
        constexpr int vectors = cells_per_block / V::lanes;
        Ints weight[vectors], light[vectors], heavy[vectors];
        for (int v = 0; v < vectors; v++) {
            const Floats floats = V::load_floats(weights + v * V::lanes);
            weight[v] = V::round_to_ints(V::multiply(floats, V::all(scale)));
        }
        bool any_heavy = split(weight, lightest_heavy, light, heavy);
        Ints light_sum = V::zero_ints();
        for (const Ints &part : light) light_sum = V::add(light_sum, V::absolute(part));
        // In a block with too much weight, light parts are up to 2^11 only: 64 * 2^11 = 2^17.
        if (V::sum_of_lanes(light_sum) > largest_block_sum) {
            any_heavy = split(weight, 1 << (heavy_shift - 1), light, heavy);
        }

        int16_t *lights = reinterpret_cast<int16_t *>(weights);
        int16_t *heavies = lights + cells_per_block;
        for (int v = 0; v < vectors; v++) V::store_shorts(lights + v * V::lanes, light[v]);
        if (!any_heavy) return 0;
        for (int v = 0; v < vectors; v++) V::store_shorts(heavies + v * V::lanes, heavy[v]);
        uint32_t pairs = 0;
        for (int i = 0; i < pairs_per_block; i += V::lanes) {
            const Ints two_shorts_each = V::load(heavies + 2 * i);
            pairs |= static_cast<uint32_t>(V::nonzero_lane_bits(two_shorts_each)) << i;
        }
        return pairs;
    }

    // weight = heavy * 2^12 + light, where weights below `lightest` have no heavy part. Returns
    // whether any has one.
    template <int vectors>
    static bool split(const Ints (&weight)[vectors], int lightest, Ints (&light)[vectors],
                      Ints (&heavy)[vectors]) {
        Ints any = V::zero_ints();
        for (int v = 0; v < vectors; v++) {
            const Ints rounded = V::add(weight[v], V::all_ints(1 << (heavy_shift - 1)));
            heavy[v] = V::keep_where(V::at_least(weight[v], V::all_ints(lightest)),
                                     V::template shift_ints_right<heavy_shift>(rounded));
            light[v] = V::subtract(weight[v], V::template shift_ints_left<heavy_shift>(heavy[v]));
            any = V::bit_or(any, heavy[v]);
        }
        return V::nonzero_lane_bits(any) != 0;
    }

    // --- a row, and a task ---

    // Set all weights of a row to 0: it sees nothing, or something that is not finite.
    static double clear(const Row &row, double scale) {
        std::memset(row.scores, 0, row.n * sizeof(float));
        std::memset(row.heavy_pairs, 0, row.n / cells_per_block * sizeof(uint32_t));
        std::memset(row.own_products, 0, row.n / cells_per_block * sizeof(int32_t));
        return scale;
    }

    // scores <- light and heavy weights of a row. Returns the factor for its sums of products.
    template <bool halved>
    static double weigh(const Row &row, const Largest &largest, const float *sink) {
        const float m = sink && !(*sink <= largest.score) ? *sink : largest.score;
        const Sums sums = exponentials(row, m, largest.factor);
        if (sums.n_seen == 0) return clear(row, 0);
        double denominator = sums.exponentials;
        if (sink) {
            denominator += V::first_lane(exponential<V>(V::all(*sink - m), exponential_bits));
        }
        if (!sums.finite || denominator != denominator) {
            return clear(row, __builtin_nan(""));
        }
        const double scale = weight_scale(sums);
        for (int64_t block = 0; block < row.n / cells_per_block; block++) {
            float *const weights = row.scores + block * cells_per_block;
            row.heavy_pairs[block] = split_block(weights, static_cast<float>(scale));
            if constexpr (halved) {
                const int16_t *const lights = reinterpret_cast<const int16_t *>(weights);
                row.own_products[block] = own_products<V>(lights, pairs_per_block);
            }
        }
        return largest.factor / (scale * denominator);
    }

    // A share of the task's rows. `halved`: whether the sums of products will be computed with half
    // of the multiplications.
    template <bool halved>
    static void run(const AttentionJob &job, const AttentionTask &task, Share share,
                    int64_t n_blocks, const TaskMemory &memory) {
        for (int64_t m = share.index; m < task.rows(); m += share.n) {
            const Row row = {memory.scores + m * row_distance(n_blocks), memory.factors,
                             n_blocks * cells_per_block, memory.heavy_pairs + m * n_blocks,
                             memory.own_products + m * n_blocks};
            const float *sink = job.sinks ? job.sinks + task.head(m) : nullptr;
            const Largest largest = find_largest(task, m, share.n, memory.largest);
            memory.scales[m] = weigh<halved>(row, largest, sink);
        }
    }
};

}  // namespace
