// The operators of a graph that the library computes, and when.
#pragma once

#include "ggml_internals.h"

// What the CPU backend is given to ask about operators.
ggml::cpu::extra_buffer_type *operators();

// Whether weights that are loaded from now on are packed by us; whether we compute attention, and
// operators on tensors that are not packed (plain_operators.h), from now on.
void enable_operators(bool products, bool attention);

struct OperatorCounts {
    uint64_t products, attentions, other_attentions;
};
OperatorCounts operator_counts();
