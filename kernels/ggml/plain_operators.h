// The operators on tensors that are not packed which llama.cpp would round differently in a batch.
#pragma once

#include "ggml/ggml_internals.h"

// What computes a GGML_OP_MUL_MAT whose weights are not packed, or a GGML_OP_SOFT_MAX, so that a row
// has the same bits in any batch; null where llama.cpp's own code does, or where we cannot.
ggml::cpu::tensor_traits *plain_operator(const ggml_tensor *op);
