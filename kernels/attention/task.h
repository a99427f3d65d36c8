// How attention is cut into tasks, and the memory that a task and a thread work in.
#pragma once

#include "attention/job.h"
#include "vectors/arithmetic.h"

namespace {

// Cells are processed in blocks of this many: 64 products of weights and values, whose sum is below
// 2^18 * 2^13, fit into 32 bits (see softmax_weights.h).
constexpr int cells_per_block = 64;
constexpr int pairs_per_block = cells_per_block / 2;

// How many floats the scores of neighbouring rows are apart. The extra ones keep this from being a
// power of two: many rows would then compete for the same few sets of the processor's caches.
constexpr int64_t row_distance(int64_t n_blocks) { return n_blocks * cells_per_block + 32; }

// Some query rows of all heads that share the keys and values of one head.
//
// The "rows" of a task are the n_rows * group pairs of a query row and a head: row m is query row
// m / group, head m % group.
struct AttentionTask {
    int64_t stream;
    // The head of the keys and values.
    int64_t kv_head;
    // The first query row, and how many there are.
    int64_t first_row;
    int64_t n_rows;
    // How many heads of queries share the keys and values.
    int64_t group;

    int64_t rows() const { return n_rows * group; }
    int64_t query_row(int64_t m) const { return first_row + m / group; }
    int64_t head(int64_t m) const { return kv_head * group + m % group; }
};

// The first key and the first value of a task.
inline const char *keys_of(const AttentionJob &job, const AttentionTask &task) {
    return job.keys + task.kv_head * job.key_head_stride + task.stream * job.key_stream_stride;
}
inline const char *values_of(const AttentionJob &job, const AttentionTask &task) {
    return job.values + task.kv_head * job.value_head_stride +
           task.stream * job.value_stream_stride;
}

// The part of the work that one thread does: items index, index + n, index + 2 n, ...
struct Share {
    int index;
    int n;
};

// The blocks of cells that a task sees. All passes work on these, by their position in the list.
// The list is in the thread's memory, and begins with its length.
struct BlockList {
    uint32_t *memory;

    int64_t n() const { return memory[0]; }
    int64_t operator[](int64_t position) const { return memory[1 + position]; }
};

// Rows cut into the fewest tiles of at most `most` rows, of about the same size: a tile of a single
// row would use a fraction of the arithmetic units.
struct RowTiles {
    int64_t n_rows;
    // How many tiles there are.
    int64_t n;

    RowTiles(int64_t n_rows, int most) : n_rows(n_rows), n((n_rows + most - 1) / most) {}
    int64_t first(int64_t tile) const { return n_rows * tile / n; }
    int rows(int64_t tile) const { return static_cast<int>(first(tile + 1) - first(tile)); }
};

// How many floats `TaskMemory::largest` has for a row: a vector of scores and one of factors.
template <class V>
constexpr int largest_floats = 2 * V::lanes;

// Memory of a task, written by the threads that work on it together.
struct TaskMemory {
    // [row][position of a block][cell], where rows are `row_distance` apart. The second pass turns
    // the scores into weights.
    float *scores;
    // [row][position of a block]: a bit for each pair of cells that has a heavy weight.
    uint32_t *heavy_pairs;
    // [row][position of a block]: the light weights' products with each other, if products are
    // halved (halved_products.h).
    int32_t *own_products;
    // [row]: the factor of a row's sums of weights times integer values.
    double *scales;
    // [position of a block][cell]: value = integer * factor.
    float *factors;
    // [thread that works on the task][row][2][lane]: the largest score and the largest factor of
    // the cells that a row sees, of those in a lane of the thread's vectors.
    float *largest;
};

// What a row of a task has for all of its cells.
struct TaskRow {
    // [word of two dimensions]: the query as integers.
    const int32_t *query;
    // [part of 32 dimensions]: query * scale = integer * factor.
    const float *query_factors;
    // [part of 32 dimensions]: the query's products with itself, if products are halved.
    const int32_t *own_products;
    // float16 for each cell, or null.
    const char *mask;
    float slope;
};

// Memory of a thread.
struct ThreadMemory {
    // The rows of the task whose scores are being computed.
    TaskRow *rows;
    // [row][word of two dimensions] and [row][part of 32 dimensions]: see `TaskRow`.
    int32_t *queries;
    float *query_factors;
    int32_t *own_products;
    // The keys of a tile of cells: see `IntegerKeys::Tile`.
    int32_t *keys;
    float *key_factors;
    int32_t *key_starts;
    // [part of 32 dimensions][row of a tile][cell of a tile]: sums of products of integers.
    int32_t *dots;
    // The values of some blocks as integers: [block][pair of cells][dimension][2].
    int16_t *values;
    // [block][dimension]: what sums start from, if products are halved.
    int32_t *value_starts;
    // [tile of rows]: sums of weights times values.
    char *sums;
    // [task]: a `BlockList`. (Only a thread that shares its tasks has more than one.)
    uint32_t *blocks;
};

}  // namespace
