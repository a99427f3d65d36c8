// The first pass of attention: the scores of all cells.
//
//     scores[row][cell] = cap(query[row] * key[cell] * scale) + slope[row] * mask[row][cell]
//
// A score is one chain of float32 multiply-adds over the dimensions of the key, in their order,
// regardless of the number of rows and of where the cell is in the cache.
//
// On the way, this pass finds the factors of the cells' values, which the second pass needs.
#pragma once

#include "attention/integer_values.h"
#include "attention/prefetch.h"
#include "attention/task.h"
#include "vectors/arithmetic.h"
#include "vectors/stored_numbers.h"

namespace {

constexpr int16_t hidden = static_cast<int16_t>(0xfc00);  // -inf as float16: a cell not seen

// The mask of a query row and head: float16 for each cell.
inline const char *mask_of(const AttentionJob &job, const AttentionTask &task, int64_t row,
                           int64_t head) {
    return job.mask + row * job.mask_row_stride + head % job.n_mask_heads * job.mask_head_stride +
           task.stream % job.n_mask_streams * job.mask_stream_stride;
}

// Copy the mask of n cells (null: nothing is hidden) and hide the cells that follow.
inline const char *copy_mask(const char *mask, int64_t n, int16_t (&copy)[cells_per_block]) {
    for (int i = 0; i < cells_per_block; i++) copy[i] = i < n ? 0 : hidden;
    if (mask && n > 0) std::memcpy(copy, mask, n * sizeof(int16_t));
    return reinterpret_cast<const char *>(copy);
}

template <class V>
struct AttentionScores {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    // A tile is up to `most_rows` rows and 2 vectors of cells: their sums fit into the registers.
    // Its float keys (16 KB for 128 dimensions on AVX-512) stay in the first-level cache.
    static constexpr int vectors = 2;
    static constexpr int tile_cells = vectors * V::lanes;
    static constexpr int most_rows = V::accumulators / vectors;

    // --- which blocks are seen ---

    static bool sees(const char *mask, int64_t n_cells) {
        int16_t copy[cells_per_block];
        const char *halves = n_cells < cells_per_block ? copy_mask(mask, n_cells, copy) : mask;
        for (int i = 0; i < cells_per_block; i += 2 * V::lanes) {
            if (!V::all_shorts_equal(halves + 2 * i, hidden)) return true;
        }
        return false;
    }

    // List the blocks of cells that any row of the task sees.
    static void list_blocks(const AttentionJob &job, const AttentionTask &task, BlockList blocks) {
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
            if (seen) blocks.memory[++n] = static_cast<uint32_t>(first / cells_per_block);
        }
        blocks.memory[0] = n;
    }

    // --- keys ---

    // Convert the keys of a tile to floats and transpose them, so that a vector holds one
    // dimension of many cells. (Cells after the last one repeat it; they are hidden.) In
    // registers, this takes 260 ns for 16 cells of 128 dimensions; through memory, in pieces of 4
    // dimensions, it took 400.
    template <NumberType type>
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
                Floats square[V::lanes];
#pragma GCC unroll 16
                for (int i = 0; i < V::lanes; i++) {
                    square[i] = load_padded<V, type>(cells[i], d, job.key_size);
                }
                V::transpose(square);
                float *to = memory.keys + d * tile_cells + first;
#pragma GCC unroll 16
                for (int i = 0; i < V::lanes; i++) V::store(to + i * tile_cells, square[i]);
            }
        }
    }

    // --- dot products ---

    // dots[row][cell] = queries[row] * keys[cell], for the cells of a tile. (GCC keeps the sums in
    // registers only if the loops over rows are unrolled, in a function of their own: this takes a
    // third of the time.)
    template <int rows>
    [[gnu::noinline]] static void multiply_tile(const float *const *queries, const float *keys,
                                                int64_t key_size, CellPrefetcher next,
                                                float *dots) {
        Floats sums[rows][vectors];
#pragma GCC unroll 16
        for (auto &row : sums) {
            for (auto &sum : row) sum = V::zero();
        }
        for (int64_t d = 0; d < key_size; d++) {
            next.prefetch_line();
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

    // Call `multiply_tile` with the number of rows as a constant.
    template <int rows = most_rows>
    static void multiply(int n_rows, const float *const *queries, const float *keys,
                         int64_t key_size, const CellPrefetcher &next, float *dots) {
        if constexpr (rows > 1) {
            if (n_rows < rows) {
                return multiply<rows - 1>(n_rows, queries, keys, key_size, next, dots);
            }
        }
        multiply_tile<rows>(queries, keys, key_size, next, dots);
    }

    // --- scores ---

    // softcap * tanh(x), with tanh(x) = 1 - 2 / (e^2x + 1), which is 1 in float32 above 10.
    static Floats cap(Floats x, float softcap) {
        const Floats high = V::larger(V::all(-10.0f), V::subtract(V::zero(), x));
        const Floats bounded = V::larger(V::all(-10.0f), V::subtract(V::zero(), high));
        const Floats power = exponential<V>(V::add(bounded, bounded), 0);
        const Floats quotient = V::divide(V::all(2.0f), V::add(power, V::all(1.0f)));
        return V::multiply(V::all(softcap), V::subtract(V::all(1.0f), quotient));
    }

    // scores = cap(dots * scale) + slope * mask, for a row and the cells of a tile.
    static void finish(const AttentionJob &job, const char *mask, float slope, const float *dots,
                       float *scores) {
        const float scale = job.softcap > 0 ? job.scale / job.softcap : job.scale;
        const bool only_scaled = V::all_shorts_equal(mask, 0) && job.softcap <= 0;
        for (int i = 0; i < tile_cells; i += V::lanes) {
            Floats score = V::multiply(V::load_floats(dots + i), V::all(scale));
            if (!only_scaled) {
                if (job.softcap > 0) score = cap(score, job.softcap);
                const Floats bias = V::multiply(V::load_halves(mask + 2 * i), V::all(slope));
                // A hidden cell may contain anything, and -inf + NaN would not be hidden.
                const typename V::Mask seen = V::not_equal(bias, V::all(-INFINITY));
                score = V::add(V::keep_where(seen, score), bias);
            }
            V::store(scores + i, score);
        }
    }

    // The scores of a tile of cells for `n` rows, which are `row_scores` floats apart.
    static void score_tile(const AttentionJob &job, const TaskRow *rows, int n,
                           const CellPrefetcher &next, int64_t first_cell, const float *keys,
                           float *scores, int64_t row_scores) {
        float dots[most_rows * tile_cells];
        const float *queries[most_rows];
        for (int i = 0; i < n; i++) queries[i] = rows[i].query;
        multiply(n, queries, keys, job.key_size, next, dots);

        const int64_t n_cells = smaller(tile_cells, job.n_cells - first_cell);
        for (int i = 0; i < n; i++) {
            int16_t copy[cells_per_block];
            const char *mask = rows[i].mask ? rows[i].mask + 2 * first_cell : nullptr;
            // The masks and scores of rows are far apart: ask for those of the next tiles.
            if (mask) __builtin_prefetch(mask + 4 * tile_cells);
            prefetch_to_write(scores + i * row_scores + tile_cells, tile_cells * sizeof(float));
            if (!mask || n_cells < tile_cells) mask = copy_mask(mask, n_cells, copy);
            finish(job, mask, rows[i].slope, dots + i * tile_cells, scores + i * row_scores);
        }
    }

    // The scores of the block at a position of the list, for all rows of the task.
    static void score_block(const AttentionJob &job, const AttentionTask &task, BlockList blocks,
                            int64_t position, const ThreadMemory &thread_memory,
                            const TaskMemory &task_memory) {
        const RowTiles tiles(task.rows(), most_rows);
        const char *keys = keys_of(job, task);
        const char *values = values_of(job, task);
        const int64_t key_bytes = bytes_of_numbers(job.key_type, job.key_size);
        const int64_t value_bytes = bytes_of_numbers(job.value_type, job.value_size);
        for (int first = 0; first < cells_per_block; first += tile_cells) {
            const int64_t first_cell = blocks[position] * cells_per_block + first;
            const int64_t next_cell = first_cell + tile_cells;
            // While rows are multiplied, what is needed next is on its way: during the first tile
            // of rows the keys of the next cells, during the second one the values of these
            // cells, for their factors.
            const CellPrefetcher next[] = {
                {keys + next_cell * job.key_cell_stride, job.key_cell_stride, key_bytes,
                 smaller(tile_cells, job.n_cells - next_cell)},
                {values + first_cell * job.value_cell_stride, job.value_cell_stride, value_bytes,
                 smaller(tile_cells, job.n_cells - first_cell)},
                {nullptr, 0, 0, 0},
            };
            with_type(job.key_type, [&](auto type) {
                transpose_keys<type()>(job, task, first_cell, thread_memory);
            });
            float *scores = task_memory.scores + position * cells_per_block + first;
            for (int64_t i = 0; i < tiles.n; i++) {
                const int64_t m = tiles.first(i);
                const int64_t row_scores = blocks.n() * cells_per_block;
                score_tile(job, thread_memory.rows + m, tiles.rows(i), next[smaller(i, 2)],
                           first_cell, thread_memory.keys, scores + m * row_scores, row_scores);
            }
        }
    }

    // A share of the blocks that the task sees: their scores, and the factors of their values.
    static void run(const AttentionJob &job, const AttentionTask &task, Share share,
                    BlockList blocks, const ThreadMemory &thread_memory,
                    const TaskMemory &task_memory) {
        for (int64_t m = 0; m < task.rows(); m++) {
            const int64_t row = task.query_row(m);
            const int64_t head = task.head(m);
            const char *query = job.queries + row * job.query_row_stride +
                                head * job.query_head_stride +
                                task.stream * job.query_stream_stride;
            thread_memory.rows[m] = {reinterpret_cast<const float *>(query),
                                     job.mask ? mask_of(job, task, row, head) : nullptr,
                                     alibi_slope(job.max_bias, job.n_heads, head)};
        }
        // With more than one tile of rows, the second one has prefetched the values.
        const bool prefetched = task.rows() > most_rows;
        for (int64_t position = share.index; position < blocks.n(); position += share.n) {
            score_block(job, task, blocks, position, thread_memory, task_memory);
            IntegerValues<V>::find_factors(job, task, blocks[position], prefetched,
                                           task_memory.factors + position * cells_per_block);
        }
    }
};

}  // namespace
