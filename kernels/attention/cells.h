// What the parts of attention share: the cells of the cache as floats, a task, and exp.
#pragma once

#include "attention/job.h"

namespace {

// Cells are worked on in blocks of this many: 64 products of weights and values, whose sum is kept
// below 2^18 * 2^13, fit into 32 bits (see attention_weights.h).
constexpr int cells_per_block = 64;
constexpr int pairs_per_block = cells_per_block / 2;
// Some query rows of all heads that share the keys and values of one head. Its "rows" are the
// n_rows * group pairs of a query row and a head: row m is query row m / group, head m % group.
struct AttentionTask {
    int64_t stream, kv_head, first_row, n_rows, group;

    int64_t rows() const { return n_rows * group; }
    int64_t query_row(int64_t m) const { return first_row + m / group; }
    int64_t head(int64_t m) const { return kv_head * group + m % group; }
};

// The first key and the first value that a task's rows see.
inline const char *keys_of(const AttentionJob &job, const AttentionTask &task) {
    return job.keys + task.kv_head * job.key_head_stride + task.stream * job.key_stream_stride;
}
inline const char *values_of(const AttentionJob &job, const AttentionTask &task) {
    return job.values + task.kv_head * job.value_head_stride + task.stream * job.value_stream_stride;
}

// Rows cut into the fewest tiles of at most `most` rows, of about the same size: one row by itself
// would use a fraction of the arithmetic units.
struct RowTiles {
    int64_t n_rows, n;

    RowTiles(int64_t n_rows, int most) : n_rows(n_rows), n((n_rows + most - 1) / most) {}
    int64_t first(int64_t tile) const { return n_rows * tile / n; }
    int rows(int64_t tile) const { return static_cast<int>(first(tile + 1) - first(tile)); }
};

// Memory of a task: written by the threads that work on it together.
struct TaskMemory {
    float *scores;          // [row][block seen by the task][cell]; becomes weights, see below
    uint32_t *heavy_pairs;  // [row][block]: a bit for each pair of cells with a heavy weight
    double *scales;         // [row]: what a sum of weights times values is multiplied by
    float *factors;         // [cell]: value = integer * factor
};

// What a row of a task has for all of its cells.
struct TaskRow {
    const float *query;
    const char *mask;  // float16 for each cell, or null
    float slope;
};

// Memory of a thread.
struct ThreadMemory {
    TaskRow *rows;     // of the task whose scores are computed
    float *keys;       // keys of a tile of cells, transposed: [key_size][cell]
    int16_t *values;   // values of some blocks as integers: [block][pair of cells][value_size][2]
    char *sums;        // [tile of rows]: sums of weights times values
    uint32_t *blocks;  // [task]: how many blocks of cells the task sees, and which
};

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Call a function with a type of cells, known to the compiler as `type()`.
template <CacheType type>
struct TypeOfCells {
    constexpr CacheType operator()() const { return type; }
};
template <class Function>
void with_type(CacheType type, const Function &function) {
    switch (type) {
        case CacheType::f32: return function(TypeOfCells<CacheType::f32>());
        case CacheType::f16: return function(TypeOfCells<CacheType::f16>());
        case CacheType::bf16: return function(TypeOfCells<CacheType::bf16>());
        default: return function(TypeOfCells<CacheType::q8_0>());
    }
}

// Numbers i, i + 1, ... of a key or value; i is a multiple of the lanes.
template <class V, CacheType type>
typename V::Floats load_cell(const char *cell, int64_t i) {
    if constexpr (type == CacheType::f32) {
        return V::load_floats(reinterpret_cast<const float *>(cell) + i);
    } else if constexpr (type == CacheType::f16) {
        return V::load_halves(cell + 2 * i);
    } else if constexpr (type == CacheType::bf16) {
        return V::load_bfloats(cell + 2 * i);
    } else {
        // Blocks of a float16 scale and 32 bytes.
        const char *block = cell + i / 32 * 34;
        return V::multiply(V::all(V::half(block)), V::load_signed_bytes(block + 2 + i % 32));
    }
}

// The last numbers of a key or value of `size`, from i on, and zeros.
template <class V, CacheType type>
[[gnu::noinline]] typename V::Floats load_rest(const char *cell, int64_t i, int64_t size) {
    constexpr int64_t bytes = type == CacheType::f32 ? 4 : 2;
    char rest[V::lanes * 4] = {};
    std::memcpy(rest, cell + i * bytes, (size - i) * bytes);
    return load_cell<V, type>(rest, 0);
}

// Numbers i, i + 1, ... of a key or value of `size`, followed by zeros. (Blocks of q8_0 are whole.)
template <class V, CacheType type>
typename V::Floats load_padded(const char *cell, int64_t i, int64_t size) {
    if (type == CacheType::q8_0 || i + V::lanes <= size) return load_cell<V, type>(cell, i);
    return load_rest<V, type>(cell, i, size);
}

constexpr int64_t bytes_of_cell(CacheType type, int64_t size) {
    return type == CacheType::q8_0 ? size / 32 * 34 : (type == CacheType::f32 ? 4 : 2) * size;
}

inline void prefetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}
inline void prefetch_to_write(const void *to, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char *>(to) + i, 1);
}

// The lines of cells that are needed soon, asked for one by one between other work: a head's cells lie
// apart, so the processor does not foresee them, and it waits where many are asked for at once. (One row
// over 14 thousand cells takes 0.9 of the time with it.)
class Lines {
    const char *cell;
    size_t stride;
    int64_t bytes, n_cells, offset = 0;

public:
    Lines(const char *cell, size_t stride, int64_t bytes, int64_t n_cells)
        : cell(cell), stride(stride), bytes(bytes), n_cells(n_cells) {}

    void prefetch() {
        if (n_cells <= 0) return;
        __builtin_prefetch(cell + offset);
        offset += 64;
        if (offset < bytes) return;
        offset = 0;
        cell += stride;
        n_cells--;
    }
};

// e^x * 2^power, within 1.5 units in the last place, for x up to 60; smaller than -87 is -87.
// It is the polynomial of Cephes' expf on [-ln 2 / 2, ln 2 / 2]. A NaN stays one.
template <class V>
typename V::Floats exponential(typename V::Floats x, float power) {
    using Floats = typename V::Floats;
    const Floats bounded = V::larger(V::all(-87.0f), x);
    const Floats n = V::round(V::multiply(bounded, V::all(1.44269504f)));
    // ln 2 in two parts, so that n times the first one is exact.
    const Floats most = V::subtract_product(n, V::all(0.693359375f), bounded);
    const Floats r = V::subtract_product(n, V::all(-2.12194440e-4f), most);
    constexpr float coefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                      1.6666665459e-1f, 5.0000001201e-1f};
    Floats p = V::all(1.9875691500e-4f);
    for (const float c : coefficients) p = V::multiply_add(p, r, V::all(c));
    p = V::multiply_add(p, V::multiply(r, r), V::add(r, V::all(1.0f)));
    return V::times_power(p, V::add(n, V::all(power)));
}

}  // namespace
