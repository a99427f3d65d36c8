// The types of ggml's tensors, as the kernels name them.
#pragma once

#include "ggml/ggml_internals.h"
#include "products/weight_type.h"
#include "vectors/stored_numbers.h"

// Look up the numbers of ggml's types by their names. Called once.
void learn_types();

// The type of weights; `none` if they have no packed form.
WeightType weight_type(const ggml_tensor *weights);

// The type of keys, values or other rows of numbers; `unsupported` if the kernels do not load it.
NumberType number_type(const ggml_tensor *tensor);

// Whether the rows of a tensor are floats without gaps.
inline bool has_float_rows(const ggml_tensor *tensor) {
    return number_type(tensor) == NumberType::f32 && tensor->nb[0] == sizeof(float);
}
