// A product and a softmax of tensors that are not packed, as plain values.
#pragma once

#include "attention/job.h"

// outputs[column][row] = the sum over n_inputs of rows[row][i] * columns[column][i].
struct PlainProduct {
    CacheType type;  // of the rows: f32, f16 or bf16
    const char *rows;
    size_t row_bytes;
    int64_t n_rows;
    const float *const *columns;
    float *const *outputs;
    int64_t n_columns, n_inputs;
    bool over_cells;  // the inputs are cells of a cache, the columns weights with the sum 1
};

// outputs = softmax(scores * scale + mask * slope); they may lie where the scores do.
struct PlainSoftmax {
    const float *scores;
    float *outputs;
    int64_t n;
    const char *mask;  // float16 or float32
    bool mask_is_half;
    float scale, slope;
    const float *sink;  // a score that takes part and has no output; may be null
};
