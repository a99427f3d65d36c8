// Weights in packed form: the buffer type that llama.cpp loads them into.
#pragma once

#include "ggml/ggml_internals.h"
#include "instruction_sets/instruction_set.h"

// The kernels in use. Set once, before the buffer type is offered to ggml.
extern const InstructionSet *kernels;

// The buffer type, "specgen" by name; `operators` is what the CPU backend asks about operators.
ggml_backend_buffer_type *packed_buffer_type(ggml_backend_device *cpu,
                                             ggml::cpu::extra_buffer_type *operators);

// Whether a tensor lies in a buffer of this type, or would do so if it were loaded.
bool is_packed(const ggml_tensor *tensor);

// Whether this matrix (or stack of one matrix for each expert) has a packed form.
bool can_pack(const ggml_tensor *weights);

// The type of weights, and ggml's number of a type of keys and values.
WeightType weight_type(const ggml_tensor *weights);
CacheType cache_type(const ggml_tensor *tensor);

// Look up the numbers of ggml's types by their names.
void learn_types();

// Write the packed form of weights, whose rows are as in the model's file.
void pack(const ggml_tensor *weights, const char *rows, char *packed);

// Bytes of the packed matrix of one expert.
size_t matrix_bytes(const ggml_tensor *weights);

// Bytes of packed weights that are alive.
uint64_t packed_bytes();
