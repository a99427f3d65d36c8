// The likeliest tokens by a row of logits, and the sum that turns logits into probabilities:
//
//     probability[token] = exp(logit[token] - largest logit) / sum of exp(logits - largest logit)
//
// The row is cut into up to 256 blocks, whose largest logits are found once. After that, finding
// each further token means reading these and one block.
#pragma once

#include <cmath>
#include <cstring>

#include "vectors/arithmetic.h"

namespace {

template <class V>
struct LikeliestTokens {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    static constexpr int64_t most_blocks = 256;
    // A block whose largest logit is this much below the row's largest does not change the sum as a
    // float.
    static constexpr float negligible = 40.0f;

    // The blocks of a row.
    struct Blocks {
        float *row;
        // How many logits there are, how many per block, and how many blocks.
        int64_t n;
        int64_t size;
        int64_t n_blocks;
        float largest[most_blocks];

        Blocks(float *row, int64_t n)
            : row(row), n(n), size(rounded_up((n + most_blocks - 1) / most_blocks, V::lanes)),
              n_blocks((n + size - 1) / size) {}
        int64_t start(int64_t block) const { return block * size; }
        int64_t end(int64_t block) const { return smaller(n, (block + 1) * size); }
        void find_largest(int64_t block) {
            largest[block] = largest_logit(row, start(block), end(block));
        }
    };

    // A vector of the row; -inf from `end` on.
    static Floats load_logits(const float *row, int64_t i, int64_t end) {
        if (i + V::lanes <= end) return V::load_floats(row + i);
        float rest[V::lanes];
        for (int lane = 0; lane < V::lanes; lane++) rest[lane] = -INFINITY;
        std::memcpy(rest, row + i, (end - i) * sizeof(float));
        return V::load_floats(rest);
    }

    static float largest_logit(const float *row, int64_t start, int64_t end) {
        Floats largest = V::all(-INFINITY);
        for (int64_t i = start; i < end; i += V::lanes) {
            largest = V::larger(load_logits(row, i, end), largest);
        }
        return V::largest_lane(largest);
    }

    static bool has_nan(const float *row, int64_t start, int64_t end) {
        constexpr int infinity_bits = 0x7f800000;
        Ints largest = V::zero_ints();
        for (int64_t i = start; i < end; i += V::lanes) {
            const Ints bits = V::float_bits(load_logits(row, i, end));
            largest = V::larger(largest, V::bit_and(bits, V::all_ints(0x7fffffff)));
        }
        return V::largest_lane(largest) > infinity_bits;
    }

    // The sum of exp(logit - top).
    static double sum_of_exponentials(const Blocks &blocks, float top) {
        double total = 0;
        for (int64_t block = 0; block < blocks.n_blocks; block++) {
            if (!(blocks.largest[block] > top - negligible)) continue;
            const int64_t end = blocks.end(block);
            Floats sum = V::zero();
            for (int64_t i = blocks.start(block); i < end; i += V::lanes) {
                const Floats below = V::subtract(load_logits(blocks.row, i, end), V::all(top));
                sum = V::add(sum, exponential<V>(below, 0));
            }
            total += V::sum(V::to_doubles(sum));
        }
        return total;
    }

    // Find the largest logits one after the other. Each is set to -inf, so that the next one is
    // then the largest, and restored at the end.
    static void find_tokens(Blocks &blocks, int n_best, int32_t *tokens, float *scores) {
        int found = 0;
        for (; found < n_best; found++) {
            int64_t best = 0;
            for (int64_t block = 1; block < blocks.n_blocks; block++) {
                best = blocks.largest[block] > blocks.largest[best] ? block : best;
            }
            scores[found] = blocks.largest[best];
            if (scores[found] == -INFINITY) break;
            int64_t token = blocks.start(best);
            while (blocks.row[token] != blocks.largest[best]) token++;
            tokens[found] = static_cast<int32_t>(token);
            blocks.row[token] = -INFINITY;
            blocks.find_largest(best);
        }
        for (int i = found; i < n_best; i++) tokens[i] = -1;
        while (found-- > 0) blocks.row[tokens[found]] = scores[found];
    }

    // See `InstructionSet::likeliest_tokens`.
    static double run(float *row, int64_t n, int n_best, int32_t *tokens, float *scores) {
        Blocks blocks(row, n);
        float top = -INFINITY;
        for (int64_t block = 0; block < blocks.n_blocks; block++) {
            if (has_nan(row, blocks.start(block), blocks.end(block))) return NAN;
            blocks.find_largest(block);
            top = blocks.largest[block] > top ? blocks.largest[block] : top;
        }
        const double total = sum_of_exponentials(blocks, top);
        find_tokens(blocks, n_best, tokens, scores);
        return total;
    }
};

}  // namespace
