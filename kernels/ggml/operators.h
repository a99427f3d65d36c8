// Which operators of a graph the library computes, and when.
#pragma once

#include "ggml/ggml_internals.h"

// What the CPU backend asks about each operator.
ggml::cpu::extra_buffer_type *operators();

// Set whether weights that are loaded from now on are packed, and whether the library computes
// attention and operators on tensors that are not packed (plain_operators.cpp).
void enable_operators(bool products, bool attention);

// While a limit is set, products with a matrix of `n_rows` rows compute only some groups of rows:
// those with at least one of `rows`, which are in increasing order. Their other outputs are
// -infinity. A limit applies to graphs that the calling thread computes, until it sets another
// limit, or null.
struct RowLimit;
RowLimit *new_row_limit(int64_t n_rows, const int32_t *rows, int64_t n);
void delete_row_limit(RowLimit *limit);
void set_row_limit(RowLimit *limit);

// How many operators were computed.
struct OperatorCounts {
    uint64_t products;
    uint64_t attentions;
    // Attentions that were left to llama.cpp.
    uint64_t other_attentions;
};
OperatorCounts operator_counts();
