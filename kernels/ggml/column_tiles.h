// Columns of activations as the kernels take them: what all products share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "instruction_sets/instruction_set.h"
#include "packed/packed_weights.h"
#include "packed/worker_weights.h"

inline char *aligned(void *p) {
    return reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(p) + 63) & ~uintptr_t{63});
}

inline bool has_float_rows(const ggml_tensor *tensor) {
    return cache_type(tensor) == CacheType::f32 && tensor->nb[0] == sizeof(float);
}

// n columns as tiles of nearly equal size, none larger than the kernels take.
struct Tiles {
    Tiles(WeightType type, int64_t n_columns)
        : most(kernels->max_columns(type, n_columns)), count((n_columns + most - 1) / most),
          smaller(count ? n_columns / count : 0),
          n_larger(count ? n_columns % count : 0) {}
    int64_t first(int64_t tile) const { return tile * smaller + std::min(tile, n_larger); }
    int size(int64_t tile) const { return static_cast<int>(smaller + (tile < n_larger)); }

    int64_t most, count, smaller, n_larger;
};

// Prepare a part of a column: block `first_block` and the next ones.
inline void prepare_blocks(WeightType type, const float *values, int64_t first_block,
                           int64_t n_blocks, char *tile, int n_columns, int column) {
    const int64_t inputs = kernels->inputs_per_block(type);
    kernels->prepare(type, values + first_block * inputs, n_blocks * inputs,
                     tile + kernels->column_bytes(type, inputs) * first_block * n_columns,
                     n_columns, column);
}

// Weights in packed form; null if they have none.
inline const char *packed(const ggml_tensor *weights) {
    if (is_packed(weights)) return static_cast<const char *>(weights->data);
    return packed_for_worker(weights);
}
