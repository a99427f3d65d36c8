// Packed weights and columns of activations, as the kernels take them: what all products share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ggml/tensor_types.h"
#include "instruction_sets/choose_kernels.h"
#include "packed/packed_weights.h"
#include "packed/worker_weights.h"

// Work memory begins at a multiple of this, and its parts are multiples of it.
constexpr size_t work_alignment = 64;

inline size_t aligned_bytes(size_t bytes) {
    return (bytes + work_alignment - 1) & ~(work_alignment - 1);
}
inline char *aligned(void *p) {
    return reinterpret_cast<char *>(aligned_bytes(reinterpret_cast<uintptr_t>(p)));
}

// n columns as tiles of nearly equal size, none larger than the kernels take. The first `n_larger`
// tiles have a column more than the others.
struct ColumnTiles {
    // The most columns of a tile, and how many tiles there are.
    int64_t most;
    int64_t count;
    int64_t smaller_size;
    int64_t n_larger;

    ColumnTiles(WeightType type, int64_t n_columns)
        : most(kernels->max_columns(type, n_columns)), count((n_columns + most - 1) / most),
          smaller_size(count ? n_columns / count : 0), n_larger(count ? n_columns % count : 0) {}
    int64_t first(int64_t tile) const { return tile * smaller_size + std::min(tile, n_larger); }
    int size(int64_t tile) const {
        return static_cast<int>(tile < n_larger ? smaller_size + 1 : smaller_size);
    }
};

// A packed matrix, or a stack of packed matrices of the same size. Its rows are in groups, which
// the kernels multiply one at a time.
struct PackedMatrix {
    // The packed form; null if there is none.
    const char *packed;
    WeightType type;
    int64_t n_inputs;
    // Rows and groups of one matrix.
    int64_t n_rows;
    int64_t n_groups;
    size_t group_bytes;
    // Bytes of a prepared column.
    size_t column_bytes;

    explicit PackedMatrix(const ggml_tensor *weights)
        : packed(is_packed(weights) ? static_cast<const char *>(weights->data)
                                    : packed_for_worker(weights)),
          type(weight_type(weights)), n_inputs(weights->ne[0]), n_rows(weights->ne[1]),
          n_groups((n_rows + kernels->rows_per_group - 1) / kernels->rows_per_group),
          group_bytes(kernels->group_bytes(type, n_inputs)),
          column_bytes(kernels->column_bytes(type, n_inputs)) {}

    const char *group(int64_t matrix, int64_t group) const {
        return packed + (matrix * n_groups + group) * group_bytes;
    }
    int64_t first_row(int64_t group) const { return group * kernels->rows_per_group; }
    int rows_of(int64_t group) const {
        const int64_t left = n_rows - first_row(group);
        return static_cast<int>(std::min<int64_t>(kernels->rows_per_group, left));
    }

    // Blocks of inputs, which are prepared together.
    int64_t n_blocks() const { return n_inputs / kernels->inputs_per_block(type); }

    // Prepare blocks `first_block` to `end_block` of column `column` of the `n_columns` of a tile.
    void prepare(const float *values, int64_t first_block, int64_t end_block, char *tile,
                 int n_columns, int column) const {
        const int64_t block_inputs = kernels->inputs_per_block(type);
        const size_t block_bytes = kernels->column_bytes(type, block_inputs);
        kernels->prepare(type, values + first_block * block_inputs,
                         (end_block - first_block) * block_inputs,
                         tile + block_bytes * first_block * n_columns, n_columns, column);
    }
};
