// The operators of a graph that the library computes, and when.
#pragma once

#include "ggml/ggml_internals.h"

// What the CPU backend is given to ask about operators.
ggml::cpu::extra_buffer_type *operators();

// Whether weights that are loaded from now on are packed by us; whether we compute attention, and
// operators on tensors that are not packed (plain_operators.h), from now on.
void enable_operators(bool products, bool attention);

// Products with a matrix of `n_rows` rows compute only some groups of rows while a limit is set: those with
// at least one of `rows`, which increase. Their other outputs are -infinity. A limit applies to graphs
// that the calling thread computes, until it sets another, or null.
struct RowLimit;
RowLimit *new_row_limit(int64_t n_rows, const int32_t *rows, int64_t n);
void delete_row_limit(RowLimit *limit);
void set_row_limit(RowLimit *limit);

struct OperatorCounts {
    uint64_t products, attentions, other_attentions;
};
OperatorCounts operator_counts();
