// The softmax of attention without flash attention:
//
//     e[cell] = exp(scores[cell] * scale + mask[cell] * slope - the largest of these)
//     outputs[cell] = e[cell] / (sum of e + exp(sink - the largest))
//
// The sum over cells is exact, as in softmax_weights.h, so that the order of cells does not matter.
#pragma once

#include "attention/softmax_weights.h"
#include "vectors/arithmetic.h"
#include "vectors/stored_numbers.h"

namespace {

template <class V>
struct Softmax {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    static constexpr int lanes = V::lanes;
    // 2^28, the largest e as an integer, fits into an unsigned lane 8 times.
    static constexpr int exponential_bits = SoftmaxWeights<V>::exponential_bits;
    static constexpr int sums_together = 8;

    static void run(const SoftmaxJob &job) {
        const float largest = largest_score(job);
        // outputs <- e * 2^28, and their sum as integers
        typename SoftmaxWeights<V>::Total total;
        Ints together = V::zero_ints();
        for (int64_t i = 0; i < job.n; i += lanes) {
            const Floats scores = scaled_scores(job, i);
            const Floats e =
                exponential<V>(V::subtract(scores, V::all(largest)), exponential_bits);
            const Floats seen = V::keep_where(V::not_equal(scores, V::all(-INFINITY)), e);
            together = V::add(together, V::round_to_ints(seen));
            store_outputs(job, i, seen);
            if (i / lanes % sums_together == sums_together - 1) {
                total.add(together);
                together = V::zero_ints();
            }
        }
        total.add(together);
        double sum = total.sum();
        if (job.sink) {
            sum += V::first_lane(exponential<V>(V::all(*job.sink - largest), exponential_bits));
        }
        // outputs <- outputs / sum
        const Floats inverse = V::all(sum > 0 ? static_cast<float>(1 / sum) : 0.0f);
        for (int64_t i = 0; i < job.n; i += lanes) {
            const char *outputs = reinterpret_cast<const char *>(job.outputs);
            const Floats e = load_padded<V, NumberType::f32>(outputs, i, job.n);
            store_outputs(job, i, V::multiply(e, inverse));
        }
    }

    static float largest_score(const SoftmaxJob &job) {
        Floats largest = V::all(-INFINITY);
        for (int64_t i = 0; i < job.n; i += lanes) {
            largest = V::larger(scaled_scores(job, i), largest);
        }
        const float score = V::largest_lane(largest);
        if (job.sink && !(*job.sink <= score)) return *job.sink;
        return score;
    }

    // scores * scale + mask * slope, for one vector of cells; -inf after the last one.
    static Floats scaled_scores(const SoftmaxJob &job, int64_t i) {
        const int64_t left = job.n - i;
        const int64_t mask_bytes = job.mask_is_half ? 2 : 4;
        float score_copy[lanes], mask_copy[lanes];
        char half_mask_copy[2 * lanes] = {};
        const float *scores = job.scores + i;
        const char *mask = job.mask + i * mask_bytes;
        if (left < lanes) {
            for (int lane = 0; lane < lanes; lane++) {
                score_copy[lane] = -INFINITY;
                mask_copy[lane] = 0;
            }
            char *const any_mask_copy =
                job.mask_is_half ? half_mask_copy : reinterpret_cast<char *>(mask_copy);
            std::memcpy(score_copy, scores, left * sizeof(float));
            std::memcpy(any_mask_copy, mask, left * mask_bytes);
            scores = score_copy;
            mask = any_mask_copy;
        }
        const Floats added = job.mask_is_half
                                 ? V::load_halves(mask)
                                 : V::load_floats(reinterpret_cast<const float *>(mask));
        const Floats scaled = V::multiply(V::load_floats(scores), V::all(job.scale));
        return V::multiply_add(added, V::all(job.slope), scaled);
    }

    static void store_outputs(const SoftmaxJob &job, int64_t i, Floats values) {
        if (i + lanes <= job.n) {
            V::store(job.outputs + i, values);
        } else {
            V::store_first(job.outputs + i, values, static_cast<int>(job.n - i));
        }
    }
};

}  // namespace
