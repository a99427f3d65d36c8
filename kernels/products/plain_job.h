// A product of tensors that are not packed, as plain values.
#pragma once

#include "vectors/stored_numbers.h"

// outputs[column][row] = sum over inputs i of rows[row][i] * columns[column][i]
struct PlainProductJob {
    // The type of the rows: f32, f16 or bf16.
    NumberType type;
    const char *rows;
    // Bytes from one row to the next.
    size_t row_bytes;
    int64_t n_rows;
    // float32[n_columns][n_inputs]
    const float *const *columns;
    // float32[n_columns][n_rows]
    float *const *outputs;
    int64_t n_columns;
    int64_t n_inputs;
    // Whether the inputs are cells of a cache, and each column is their weights, whose sum is 1.
    // Then the result must not depend on the order of the inputs.
    bool over_cells;
};
