// What the parts of attention share: the cells of the cache as floats, a task, and exp.
#pragma once

#include "attention_job.h"

namespace {

// Cells are worked on in blocks of this many: 64 sums of 2^18 * 2^13 fit into 32 bits (see
// attention_weights.h), and the float keys of a block, 32 KB for a head of 128, stay in the cache.
constexpr int cells_per_block = 64;
constexpr int pairs_per_block = cells_per_block / 2;
// Rows that a tile of registers takes: 6 x 4 accumulators of 32 (AVX-512), 6 x 2 of 16 (AVX2).
constexpr int rows_per_tile = 6;

// Some query rows of all heads that share the keys and values of one head. Its "rows" are the
// n_rows * group pairs of a query row and a head: row m is query row m / group, head m % group.
struct AttentionTask {
    int64_t stream, kv_head, first_row, n_rows, group;

    int64_t rows() const { return n_rows * group; }
    int64_t query_row(int64_t m) const { return first_row + m / group; }
    int64_t head(int64_t m) const { return kv_head * group + m % group; }
};

// Memory of a task: written by the threads that work on it together.
struct TaskMemory {
    float *scores;          // [row][block seen by the task][cell]; becomes weights, see below
    uint32_t *heavy_pairs;  // [row][block]: a bit for each pair of cells with a heavy weight
    double *scales;         // [row]: what a sum of weights times values is multiplied by
    float *factors;         // [cell]: value = integer * factor
    int16_t *values;        // [block][pair of cells][value_size, padded][2]
};

// Memory of a thread.
struct ThreadMemory {
    float *rows;       // some cells as floats
    float *keys;       // keys of a block, transposed: [tile][key_size][cell of the tile]
    uint32_t *blocks;  // [task]: how many blocks of cells the task sees, and which
};

constexpr int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

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

// A key or value as floats, followed by zeros up to a multiple of the lanes.
template <class V, CacheType type>
void cell_to_floats(const char *cell, int64_t size, float *floats) {
    const int64_t whole = type == CacheType::q8_0 ? size : size / V::lanes * V::lanes;
    for (int64_t i = 0; i < whole; i += V::lanes) {
        V::store(floats + i, load_cell<V, type>(cell, i));
    }
    if (whole == size) return;
    constexpr int64_t bytes = type == CacheType::f32 ? 4 : 2;
    char rest[V::lanes * 4] = {};
    std::memcpy(rest, cell + whole * bytes, (size - whole) * bytes);
    V::store(floats + whole, load_cell<V, type>(rest, 0));
}

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
