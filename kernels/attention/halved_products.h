// Sums of products with half of the multiplications.
//
//     row0 * cell0 + row1 * cell1 = (row0 + cell1) * (row1 + cell0) - row0 * row1 - cell0 * cell1
//
// (S. Winograd, "A New Algorithm for Inner Product", IEEE Transactions on Computers C-17, 1968.) In
// a product of matrices, row0 * row1 is needed once for each row, and cell0 * cell1 once for each
// cell. What remains is one multiplication and two additions for two products. All numbers are
// integers, and sums are exact modulo 2^32, so results have the same bits as without it.
//
// This pays off for many rows (`V::least_halved_rows`), on CPUs that start more additions than
// multiplications. For vectors of 512 bits, AMD's Zen 4 starts two additions per cycle, or one and
// a multiplication. Intel's server CPUs start two of either kind.
//
// Here, a "word" is two 16-bit integers, and a product of words is their dot product. Words 2 i and
// 2 i + 1 are multiplied crosswise.
#pragma once

#include "vectors/arithmetic.h"

namespace {

// The sum of the products of neighbouring words in a row of `n_words`: row0 * row1 + row2 * row3 +
// ..., modulo 2^32. `n_words` is a multiple of the lanes.
template <class V>
int32_t own_products(const int16_t *row, int n_words) {
    typename V::Ints sum = V::zero_ints();
    for (int i = 0; i < n_words; i += V::lanes) {
        const typename V::Ints words = V::load(row + 2 * i);
        sum = V::dot_shorts(sum, words, V::odd_lanes_moved_down(words));
    }
    return V::sum_of_lanes(sum);
}

// What sums start from, for the cells in a vector: -(cell0 * cell1 + cell2 * cell3 + ...), modulo
// 2^32. Vectors of words are `distance` shorts apart.
template <class V>
typename V::Ints start_of_sums(const int16_t *cells, int n_words, int64_t distance) {
    typename V::Ints sum = V::zero_ints();
    for (int i = 0; i < n_words; i += 2) {
        const int16_t *const words = cells + i * distance;
        sum = V::dot_shorts(sum, V::load(words), V::load(words + distance));
    }
    return V::subtract(V::zero_ints(), sum);
}

}  // namespace
