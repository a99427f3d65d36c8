// The operators of attention, as plain values.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "vectors/stored_numbers.h"

// The largest supported number of cells. Sums over more of them could overflow (softmax_weights.h).
constexpr int64_t most_cells = 1 << 20;

// One GGML_OP_FLASH_ATTN_EXT:
//
//     outputs[row] = sum over cells of softmax(scores[row])[cell] * values[cell]
//     scores[row][cell] = cap(queries[row] * keys[cell] * scale) + slope * mask[row][cell]
//
// for each stream (a sequence with separate cells) and each head. All strides are in bytes.
struct AttentionJob {
    // float32[n_streams][n_heads][n_rows][key_size]
    const char *queries;
    size_t query_row_stride;
    size_t query_head_stride;
    size_t query_stream_stride;

    // [n_streams][n_kv_heads][n_cells][key_size]
    const char *keys;
    size_t key_cell_stride;
    size_t key_head_stride;
    size_t key_stream_stride;
    NumberType key_type;

    // [n_streams][n_kv_heads][n_cells][value_size]
    const char *values;
    size_t value_cell_stride;
    size_t value_head_stride;
    size_t value_stream_stride;
    NumberType value_type;

    // float16[n_mask_streams][n_mask_heads][n_rows][n_cells], added to the scores (times the
    // head's slope): -inf hides a cell. Null: every row sees every cell. Head h uses mask h %
    // n_mask_heads; streams likewise.
    const char *mask;
    size_t mask_row_stride;
    size_t mask_head_stride;
    size_t mask_stream_stride;
    int64_t n_mask_heads;
    int64_t n_mask_streams;

    // float32[n_heads]: a score that takes part in the softmax and has no value. May be null.
    const float *sinks;

    // float32[n_streams][n_rows][n_heads][value_size], without gaps.
    float *outputs;

    int64_t n_rows;
    int64_t n_cells;
    int64_t n_heads;
    // Heads of keys and values. Each serves n_heads / n_kv_heads heads of queries.
    int64_t n_kv_heads;
    int64_t n_streams;
    // Numbers of one query or key of one head, and of one value.
    int64_t key_size;
    int64_t value_size;

    float scale;
    // ALiBi: if it is above 0, each head has its own slope.
    float max_bias;
    // If it is above 0, cap(x) is softcap * tanh(x / softcap); otherwise x.
    float softcap;
};

// One row of a GGML_OP_SOFT_MAX, which is attention without flash attention:
//
//     outputs = softmax(scores * scale + mask * slope)
struct SoftmaxJob {
    const float *scores;
    // May be the same memory as the scores.
    float *outputs;
    // How many scores there are.
    int64_t n;
    // float16 or float32 [n]
    const char *mask;
    bool mask_is_half;
    float scale;
    float slope;
    // A score that takes part and has no output. May be null.
    const float *sink;
};

// ALiBi: the factor of a head's mask (arXiv:2108.12409).
static inline float alibi_slope(float max_bias, int64_t n_heads, int64_t head) {
    if (max_bias <= 0) return 1.0f;
    int64_t n = 1;  // the largest power of two among the heads
    while (2 * n <= n_heads) n *= 2;
    const float step = head < n ? max_bias : max_bias / 2;
    const float base = powf(2.0f, -step / n);
    return powf(base, head < n ? head + 1 : 2 * (head - n) + 1);
}
