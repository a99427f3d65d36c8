// One attention operator of a graph (GGML_OP_FLASH_ATTN_EXT), as plain values.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

enum class CacheType { f32, f16, bf16, q8_0, unsupported };

struct AttentionJob {
    // Queries: float32[n_streams][n_heads][n_rows][key_size], strides in bytes.
    const char *queries;
    size_t query_row_stride, query_head_stride, query_stream_stride;

    // Keys and values: [n_streams][n_kv_heads][n_cells][key_size or value_size], strides in bytes.
    const char *keys;
    size_t key_cell_stride, key_head_stride, key_stream_stride;
    CacheType key_type;
    const char *values;
    size_t value_cell_stride, value_head_stride, value_stream_stride;
    CacheType value_type;

    // float16, added to the scores of a row (times the head's slope): -inf hides a cell. May be
    // null: every row sees every cell. Heads and streams beyond those of the mask begin anew.
    const char *mask;
    size_t mask_row_stride, mask_head_stride, mask_stream_stride;
    int64_t n_mask_heads, n_mask_streams;

    // float32[n_heads]: a score that takes part in the softmax and has no value. May be null.
    const float *sinks;

    // float32[n_streams][n_rows][n_heads][value_size], without gaps.
    float *outputs;

    int64_t n_rows, n_cells, n_heads, n_kv_heads, n_streams, key_size, value_size;
    float scale;
    float max_bias;  // ALiBi: > 0 gives each head a slope of its own
    float softcap;   // > 0: scores become softcap * tanh(scores / softcap)
};

// ALiBi: the mask of head `head` is multiplied by this.
static inline float alibi_slope(float max_bias, int64_t n_heads, int64_t head) {
    if (max_bias <= 0) return 1.0f;
    int64_t n = 1;  // the largest power of two among the heads
    while (2 * n <= n_heads) n *= 2;
    const float step = head < n ? max_bias : max_bias / 2;
    const float base = powf(2.0f, -step / n);
    return powf(base, head < n ? head + 1 : 2 * (head - n) + 1);
}
