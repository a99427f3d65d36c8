// Packed weights in memory: the buffer type that llama.cpp loads them into.
#pragma once

#include "ggml/ggml_internals.h"

// The buffer type, whose name is "specgen". `operators` is what the CPU backend asks about
// operators.
ggml_backend_buffer_type *packed_buffer_type(ggml_backend_device *cpu,
                                             ggml::cpu::extra_buffer_type *operators);

// Whether a tensor is in a buffer of this type, or would be if it were loaded.
bool is_packed(const ggml_tensor *tensor);

// Whether this matrix, or stack of one matrix for each expert, has a packed form.
bool can_pack(const ggml_tensor *weights);

// Write the packed form of weights whose rows are as in the model's file.
void pack(const ggml_tensor *weights, const char *rows, char *packed);

// Bytes of the packed form of all matrices of a tensor.
size_t packed_size(const ggml_tensor *weights);

// Bytes of all packed weights in memory.
uint64_t packed_bytes();
