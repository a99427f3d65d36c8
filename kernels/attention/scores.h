// The first pass of attention: the scores of all cells. (The factors of values are found on the way.)
//
// The score of a cell is one chain of float32 multiply-adds over the key, in the order of its
// dimensions, whatever the number of rows is and wherever the cell lies.
#pragma once

#include "attention/cells.h"
#include "attention/integer_values.h"

namespace {

constexpr int16_t hidden = static_cast<int16_t>(0xfc00);  // -inf as float16: a cell not seen

inline const char *mask_of(const AttentionJob &job, const AttentionTask &task, int64_t row,
                           int64_t head) {
    return job.mask + row * job.mask_row_stride + head % job.n_mask_heads * job.mask_head_stride +
           task.stream % job.n_mask_streams * job.mask_stream_stride;
}

// The mask of a block's cells in `space`, hidden beyond the last cell.
inline const char *copy_mask(const char *mask, int64_t n, int16_t (&space)[cells_per_block]) {
    for (int i = 0; i < cells_per_block; i++) space[i] = i < n ? 0 : hidden;
    if (mask && n > 0) std::memcpy(space, mask, n * sizeof(int16_t));
    return reinterpret_cast<const char *>(space);
}

template <class V>
struct AttentionScores {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    // A tile of registers: so many rows, and 2 vectors of cells. So the float keys of a tile's
    // cells, 16 KB for 128 dimensions on AVX-512, stay in the first level of the cache.
    static constexpr int most_rows = V::accumulators / 2;
    static constexpr int vectors = 2, tile_cells = vectors * V::lanes;

    // --- which blocks ---

    static bool sees(const char *mask, int64_t n) {
        int16_t space[cells_per_block];
        const char *halves = n < cells_per_block ? copy_mask(mask, n, space) : mask;
        for (int i = 0; i < cells_per_block; i += 2 * V::lanes) {
            if (!V::shorts_equal(halves + 2 * i, hidden)) return true;
        }
        return false;
    }

    // List the blocks of cells that any row of the task sees.
    static void list_blocks(const AttentionJob &job, const AttentionTask &task, uint32_t *blocks) {
        uint32_t n = 0;
        for (int64_t first = 0; first < job.n_cells; first += cells_per_block) {
            const int64_t n_cells = smaller(cells_per_block, job.n_cells - first);
            bool seen = !job.mask;
            const int64_t n_heads = job.n_mask_heads == 1 ? 1 : task.group;
            for (int64_t row = 0; !seen && row < task.n_rows; row++) {
                for (int64_t i = 0; !seen && i < n_heads; i++) {
                    const int64_t head = task.kv_head * task.group + i;
                    const char *mask = mask_of(job, task, task.first_row + row, head);
                    seen = sees(mask + 2 * first, n_cells);
                }
            }
            if (seen) blocks[++n] = static_cast<uint32_t>(first / cells_per_block);
        }
        blocks[0] = n;
    }

    // --- keys ---

    // The keys of a tile as floats, transposed, so that a vector holds one dimension of many cells.
    // (Cells behind the last one repeat it: they are hidden.) In registers it takes 260 ns for 16
    // cells of 128 dimensions; by way of memory, in pieces of 4 dimensions, it took 400.
    template <CacheType type>
    static void transpose_keys(const AttentionJob &job, const AttentionTask &task,
                               int64_t first_cell, const ThreadMemory &memory) {
        const int64_t size = rounded_up(job.key_size, V::lanes);
        const char *keys = keys_of(job, task);
        for (int first = 0; first < tile_cells; first += V::lanes) {
            const char *cells[V::lanes];
            for (int i = 0; i < V::lanes; i++) {
                const int64_t cell = smaller(first_cell + first + i, job.n_cells - 1);
                cells[i] = keys + cell * job.key_cell_stride;
            }
            for (int64_t d = 0; d < size; d += V::lanes) {
                Floats v[V::lanes];
#pragma GCC unroll 16
                for (int i = 0; i < V::lanes; i++) {
                    v[i] = load_padded<V, type>(cells[i], d, job.key_size);
                }
                V::transpose(v);
                float *to = memory.keys + d * tile_cells + first;
#pragma GCC unroll 16
                for (int i = 0; i < V::lanes; i++) V::store(to + i * tile_cells, v[i]);
            }
        }
    }

    // --- scores ---

    // Dot products of `rows` queries with the cells of a tile. (GCC keeps the sums in registers
    // only if the loops over rows are unrolled, in a function of their own: a third of the time.)
    template <int rows>
    [[gnu::noinline]] static void multiply_tile(const float *const *queries, const float *keys,
                                                int64_t key_size, Lines ahead, float *dots) {
        Floats sums[rows][vectors];
#pragma GCC unroll 16
        for (auto &row : sums) {
            for (auto &sum : row) sum = V::zero();
        }
        for (int64_t d = 0; d < key_size; d++) {
            ahead.prefetch();
            Floats key[vectors];
            for (int v = 0; v < vectors; v++) {
                key[v] = V::load_floats(keys + d * tile_cells + v * V::lanes);
            }
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                const Floats query = V::all(queries[row][d]);
                for (int v = 0; v < vectors; v++) {
                    sums[row][v] = V::multiply_add(query, key[v], sums[row][v]);
                }
            }
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            for (int v = 0; v < vectors; v++) {
                V::store(dots + row * tile_cells + v * V::lanes, sums[row][v]);
            }
        }
    }

    template <int rows = most_rows>
    static void multiply(int n_rows, const float *const *queries, const float *keys,
                         int64_t key_size, const Lines &ahead, float *dots) {
        if constexpr (rows > 1) {
            if (n_rows < rows) {
                return multiply<rows - 1>(n_rows, queries, keys, key_size, ahead, dots);
            }
        }
        multiply_tile<rows>(queries, keys, key_size, ahead, dots);
    }

    // softcap * tanh(x): tanh(x) = 1 - 2 / (e^2x + 1), which is 1 in float32 above 10.
    static Floats cap(Floats x, float softcap) {
        const Floats high = V::larger(V::all(-10.0f), V::subtract(V::zero(), x));
        const Floats bounded = V::larger(V::all(-10.0f), V::subtract(V::zero(), high));
        const Floats power = exponential<V>(V::add(bounded, bounded), 0);
        const Floats tanh = V::subtract(
            V::all(1.0f), V::divide(V::all(2.0f), V::add(power, V::all(1.0f))));
        return V::multiply(V::all(softcap), tanh);
    }

    // scores = cap(dots * scale) + slope * mask
    static void finish(const AttentionJob &job, const char *mask, float slope, const float *dots,
                       float *scores) {
        const float scale = job.softcap > 0 ? job.scale / job.softcap : job.scale;
        const bool is_plain = V::shorts_equal(mask, 0) && job.softcap <= 0;
        for (int i = 0; i < tile_cells; i += V::lanes) {
            Floats score = V::multiply(V::load_floats(dots + i), V::all(scale));
            if (!is_plain) {
                if (job.softcap > 0) score = cap(score, job.softcap);
                const Floats bias = V::multiply(V::load_halves(mask + 2 * i), V::all(slope));
                // A cell not seen may hold anything: -inf + NaN would be seen.
                const typename V::Mask seen = V::differ(bias, V::all(-INFINITY));
                score = V::add(V::only(seen, score), bias);
            }
            V::store(scores + i, score);
        }
    }

    // The scores of one tile of cells for `n` rows.
    static void score_tile(const AttentionJob &job, const TaskRow *rows, int n, const Lines &ahead,
                           int64_t first_cell, const float *keys, float *scores, int64_t scores_of_row) {
        float dots[most_rows * tile_cells];
        const float *queries[most_rows];
        for (int i = 0; i < n; i++) queries[i] = rows[i].query;
        multiply(n, queries, keys, job.key_size, ahead, dots);
        const int64_t n_cells = smaller(tile_cells, job.n_cells - first_cell);
        for (int i = 0; i < n; i++) {
            int16_t space[cells_per_block];
            const char *mask = rows[i].mask ? rows[i].mask + 2 * first_cell : nullptr;
            // Rows' masks and scores lie far apart: those of the next tiles are asked for here.
            if (mask) __builtin_prefetch(mask + 4 * tile_cells);
            prefetch_to_write(scores + i * scores_of_row + tile_cells, tile_cells * sizeof(float));
            if (!mask || n_cells < tile_cells) mask = copy_mask(mask, n_cells, space);
            finish(job, mask, rows[i].slope, dots + i * tile_cells, scores + i * scores_of_row);
        }
    }

    // The scores of one block for all rows of the task; it is the task's block number `position`.
    static void score_block(const AttentionJob &job, const AttentionTask &task, int64_t block,
                            int64_t position, int64_t n_positions, const ThreadMemory &own,
                            const TaskMemory &memory) {
        const RowTiles tiles(task.rows(), most_rows);
        const char *keys = keys_of(job, task), *values = values_of(job, task);
        const int64_t key_bytes = bytes_of_cell(job.key_type, job.key_size);
        const int64_t value_bytes = bytes_of_cell(job.value_type, job.value_size);
        for (int first = 0; first < cells_per_block; first += tile_cells) {
            const int64_t first_cell = block * cells_per_block + first, next_cell = first_cell + tile_cells;
            // While rows are multiplied, what is needed next is on its way: with the first ones the keys
            // of the next tile, with the second ones the values of this tile, for their factors.
            const Lines ahead[] = {
                {keys + next_cell * job.key_cell_stride, job.key_cell_stride, key_bytes,
                 smaller(tile_cells, job.n_cells - next_cell)},
                {values + first_cell * job.value_cell_stride, job.value_cell_stride, value_bytes,
                 smaller(tile_cells, job.n_cells - first_cell)},
                {nullptr, 0, 0, 0},
            };
            with_type(job.key_type, [&](auto type) {
                transpose_keys<type()>(job, task, first_cell, own);
            });
            float *scores = memory.scores + position * cells_per_block + first;
            for (int64_t i = 0; i < tiles.n; i++) {
                const int64_t m = tiles.first(i), n_scores = n_positions * cells_per_block;
                score_tile(job, own.rows + m, tiles.rows(i), ahead[smaller(i, 2)], first_cell, own.keys,
                           scores + m * n_scores, n_scores);
            }
        }
    }

    // Blocks `part`, `part` + n_parts, ... of those that the task sees.
    static void run(const AttentionJob &job, const AttentionTask &task, int part, int n_parts,
                    const uint32_t *blocks, const ThreadMemory &own, const TaskMemory &memory) {
        for (int64_t m = 0; m < task.rows(); m++) {
            const int64_t row = task.query_row(m), head = task.head(m);
            const char *query = job.queries + row * job.query_row_stride +
                                head * job.query_head_stride + task.stream * job.query_stream_stride;
            own.rows[m] = {reinterpret_cast<const float *>(query),
                           job.mask ? mask_of(job, task, row, head) : nullptr,
                           alibi_slope(job.max_bias, job.n_heads, head)};
        }
        for (int64_t position = part; position < blocks[0]; position += n_parts) {
            const int64_t block = blocks[1 + position];
            score_block(job, task, block, position, blocks[0], own, memory);
            // With more than one tile of rows, the values were prefetched while the second was multiplied.
            AttentionIntegers<V>::find_factors(job, task, block, task.rows() > most_rows,
                                               memory.factors + position * cells_per_block);
        }
    }
};

}  // namespace
