// The likeliest tokens of a row of logits, and the sum that makes probabilities of them.
#pragma once

#include <cmath>
#include <cstring>

#include "attention/cells.h"

namespace {

template <class V>
struct Likeliest {
    using Floats = typename V::Floats;
    static constexpr int64_t most_blocks = 256;
    // Blocks whose largest logit is so far below the row's do not change the sum as a float.
    static constexpr float far = 40.0f;

    // A vector of the row; -inf beyond `end`.
    static Floats at(const float *row, int64_t i, int64_t end) {
        if (i + V::lanes <= end) return V::load_floats(row + i);
        float rest[V::lanes];
        for (int lane = 0; lane < V::lanes; lane++) rest[lane] = -INFINITY;
        std::memcpy(rest, row + i, (end - i) * sizeof(float));
        return V::load_floats(rest);
    }

    static float largest(const float *row, int64_t start, int64_t end) {
        Floats found = V::all(-INFINITY);
        for (int64_t i = start; i < end; i += V::lanes) found = V::larger(at(row, i, end), found);
        return V::largest_lane(found);
    }

    static bool has_nan(const float *row, int64_t start, int64_t end) {
        typename V::Ints bits = V::zero_ints();
        for (int64_t i = start; i < end; i += V::lanes) {
            const auto magnitude = V::bits(V::bits_of(at(row, i, end)), V::all_ints(0x7fffffff));
            bits = V::larger(bits, magnitude);
        }
        return V::largest_lane(bits) > 0x7f800000;  // above infinity
    }

    // See `InstructionSet::likeliest`.
    static double run(float *row, int64_t n, int n_best, int32_t *tokens, float *scores) {
        const int64_t size = rounded_up((n + most_blocks - 1) / most_blocks, V::lanes);
        const int64_t n_blocks = (n + size - 1) / size;
        const auto end_of = [&](int64_t block) { return smaller(n, (block + 1) * size); };
        float maxima[most_blocks], top = -INFINITY;
        for (int64_t block = 0; block < n_blocks; block++) {
            if (has_nan(row, block * size, end_of(block))) return NAN;
            maxima[block] = largest(row, block * size, end_of(block));
            top = maxima[block] > top ? maxima[block] : top;
        }
        double total = 0;
        for (int64_t block = 0; block < n_blocks; block++) {
            if (!(maxima[block] > top - far)) continue;
            Floats sum = V::zero();
            for (int64_t i = block * size; i < end_of(block); i += V::lanes) {
                const Floats below = V::subtract(at(row, i, end_of(block)), V::all(top));
                sum = V::add(sum, exponential<V>(below, 0));
            }
            total += V::sum(V::to_doubles(sum));
        }
        int found = 0;
        for (; found < n_best; found++) {
            int64_t block = 0;
            for (int64_t i = 1; i < n_blocks; i++) block = maxima[i] > maxima[block] ? i : block;
            scores[found] = maxima[block];
            if (scores[found] == -INFINITY) break;
            int64_t place = block * size;
            while (row[place] != maxima[block]) place++;
            tokens[found] = static_cast<int32_t>(place);
            row[place] = -INFINITY;
            maxima[block] = largest(row, block * size, end_of(block));
        }
        for (int i = found; i < n_best; i++) tokens[i] = -1;
        while (found-- > 0) row[tokens[found]] = scores[found];
        return total;
    }
};

}  // namespace
