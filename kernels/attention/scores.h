// The first pass of attention: the scores of all cells.
//
//     scores[row][cell] = cap(query[row] * key[cell] * scale) + slope[row] * mask[row][cell]
//
// Queries and keys are integers with a factor for each 32 dimensions (integer_keys.h). The sums of
// products over 32 dimensions are exact, and they are added as floats in their order, regardless of
// the number of rows and of where the cell is in the cache.
//
// On the way, this pass finds the factors of the cells' values and the largest score of each row,
// which the second pass needs.
#pragma once

#include "attention/halved_products.h"
#include "attention/integer_keys.h"
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

// `halved`: whether sums are computed with half of the multiplications (halved_products.h).
template <class V, bool halved>
struct AttentionScores {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    using KeyTile = typename IntegerKeys<V>::Tile;
    // A tile is up to `most_rows` rows and 2 vectors of cells: their sums fit into the registers,
    // along with the operands, of which there are twice as many if products are halved. Its keys
    // (8 KB for 128 dimensions on AVX-512) stay in the first-level cache.
    static constexpr int vectors = 2;
    static constexpr int tile_cells = vectors * V::lanes;
    static constexpr int most_rows = halved ? 8 : V::pair_accumulators / vectors;

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

    // --- dot products ---

    // What a tile of rows multiplies.
    struct Operands {
        // [word of two dimensions][row of the tile]
        const int32_t *queries;
        // [part of 32 dimensions][row of the tile]
        const float *query_factors;
        // [part of 32 dimensions][row of the tile]
        const int32_t *own_products;
        KeyTile keys;
        int64_t n_parts;
    };

    // The products of a part of 32 dimensions: sums[row][vector of cells], which are exact.
    //
    // On the way, it prefetches the same part of the next cells, one line at a time: those of one
    // head are too far apart for the processor to prefetch them by itself, and if many are
    // requested at once, it waits. (GCC keeps the sums in registers only if the loops over rows are
    // unrolled, in a function of their own: this takes a third of the time.)
    template <int rows>
    [[gnu::noinline]] SUMS_IN_REGISTERS static void multiply_all(const int32_t *queries,
                                                                 const int32_t *keys,
                                                                 const char *next, size_t stride,
                                                                 Ints *to) {
        typename V::PairSums sums[rows][vectors];
#pragma GCC unroll 16
        for (auto &row : sums) {
            for (auto &sum : row) sum = V::zero_pair_sums();
        }
        for (int word = 0; word < part_words; word++) {
            for (int i = 0; i < tile_cells; i += part_words) {
                __builtin_prefetch(next);
                next += stride;
            }
            Ints key[vectors];
            for (int v = 0; v < vectors; v++) key[v] = V::load(keys + v * V::lanes);
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                const Ints query = V::broadcast_word(queries + row);
                for (int v = 0; v < vectors; v++) {
                    sums[row][v] = V::dot_shorts(sums[row][v], key[v], query);
                }
            }
            queries += rows;
            keys += tile_cells;
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            for (int v = 0; v < vectors; v++) to[row * vectors + v] = V::sum_of_pairs(sums[row][v]);
        }
    }

    // The same with half of the multiplications.
    template <int rows>
    [[gnu::noinline]] SUMS_IN_REGISTERS static void multiply_half(
        const int32_t *queries, const int32_t *own_products, const int32_t *keys,
        const int32_t *key_starts, const char *next, size_t stride, Ints *to) {
        Ints start[vectors];
        for (int v = 0; v < vectors; v++) start[v] = V::load(key_starts + v * V::lanes);
        Ints sums[rows][vectors];
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            const Ints own = V::broadcast_word(own_products + row);
            for (int v = 0; v < vectors; v++) sums[row][v] = V::subtract(start[v], own);
        }
        for (int word = 0; word < part_words; word += 2) {
            for (int i = 0; i < 2 * tile_cells; i += part_words) {
                __builtin_prefetch(next);
                next += stride;
            }
            Ints first_key[vectors], second_key[vectors];
            for (int v = 0; v < vectors; v++) {
                first_key[v] = V::load(keys + v * V::lanes);
                second_key[v] = V::load(keys + tile_cells + v * V::lanes);
            }
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++) {
                const Ints first_query = V::broadcast_word(queries + row);
                const Ints second_query = V::broadcast_word(queries + rows + row);
                for (int v = 0; v < vectors; v++) {
                    sums[row][v] =
                        V::dot_shorts(sums[row][v], V::add_shorts(first_query, second_key[v]),
                                      V::add_shorts(second_query, first_key[v]));
                }
            }
            queries += 2 * rows;
            keys += 2 * tile_cells;
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            for (int v = 0; v < vectors; v++) to[row * vectors + v] = sums[row][v];
        }
    }

    // The products of all parts: sums[part][row * vectors + vector of cells].
    template <int rows>
    static void multiply_tile(const Operands &from, const NextCells &next, Ints *sums) {
        for (int64_t part = 0; part < from.n_parts; part++) {
            const int32_t *const queries = from.queries + part * part_words * rows;
            const int32_t *const keys = from.keys.words + part * part_words * tile_cells;
            const char *const next_part = next.cells + part * next.part_bytes;
            Ints *const to = sums + part * rows * vectors;
            if constexpr (halved) {
                multiply_half<rows>(queries, from.own_products + part * rows, keys,
                                    from.keys.starts + part * tile_cells, next_part, next.stride,
                                    to);
            } else {
                multiply_all<rows>(queries, keys, next_part, next.stride, to);
            }
        }
    }

    // Call `multiply_tile` with the number of rows as a constant.
    template <int rows = most_rows>
    static void multiply(int n_rows, const Operands &from, const NextCells &next, Ints *sums) {
        if constexpr (rows > 1) {
            if (n_rows < rows) return multiply<rows - 1>(n_rows, from, next, sums);
        }
        multiply_tile<rows>(from, next, sums);
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

    // dots = query * keys, for a row and the cells of a tile: the sums of the parts are added in
    // their order.
    static void add_parts(const Operands &from, int n_rows, int row, const Ints *sums,
                          Floats (&dots)[vectors]) {
        sums += row * vectors;
        for (auto &dot : dots) dot = V::zero();
        for (int64_t part = 0; part < from.n_parts; part++) {
            const Floats query_factor = V::all(from.query_factors[part * n_rows + row]);
            const float *key_factors = from.keys.factors + part * tile_cells;
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                const Floats product = V::multiply(V::to_floats(sums[v]), query_factor);
                const Floats factors = V::load_floats(key_factors + v * V::lanes);
                dots[v] = V::multiply_add(product, factors, dots[v]);
            }
            sums += n_rows * vectors;
        }
    }

    // scores = cap(dots) + slope * mask, for a row and the cells of a tile. On the way, the largest
    // score of the row and the largest factor of the values that it sees are updated.
    static void finish(const AttentionJob &job, const char *mask, float slope,
                       const Floats (&dots)[vectors], const float *factors, float *scores,
                       float *largest) {
        const bool only_dots = V::all_shorts_equal(mask, 0) && job.softcap <= 0;
        Floats largest_score = V::load_floats(largest);
        Floats largest_factor = V::load_floats(largest + V::lanes);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            Floats score = dots[v];
            Floats factor = V::load_floats(factors + v * V::lanes);
            if (!only_dots) {
                if (job.softcap > 0) score = cap(score, job.softcap);
                const Floats bias =
                    V::multiply(V::load_halves(mask + 2 * v * V::lanes), V::all(slope));
                // A hidden cell may contain anything, and -inf + NaN would not be hidden.
                const typename V::Mask seen = V::not_equal(bias, V::all(-INFINITY));
                score = V::add(V::keep_where(seen, score), bias);
                factor = V::keep_where(seen, factor);
            }
            V::store(scores + v * V::lanes, score);
            largest_score = V::larger(score, largest_score);  // ignores a NaN
            largest_factor = V::larger(factor, largest_factor);
        }
        V::store(largest, largest_score);
        V::store(largest + V::lanes, largest_factor);
    }

    // A tile of cells, and where its results go.
    struct CellTile {
        int64_t first_cell;
        // The first cell of the tile that comes next.
        int64_t next_cell;
        KeyTile keys;
        // [cell]: the factors of the values.
        float *factors;
        // [row][cell]: the scores of the task's rows, which are `row_scores` floats apart.
        float *scores;
        int64_t row_scores;
        // [row]: the largest score and factor so far (see `TaskMemory::largest`).
        float *largest;
        // Memory for the sums of products.
        Ints *sums;
    };

    // The scores of a tile of cells for rows m to m + n of the task.
    static void score_rows(const AttentionJob &job, const TaskRow *rows, int64_t m, int n,
                           const NextCells &next, const CellTile &tile) {
        const int64_t n_parts = parts_of(job.key_size);
        const TaskRow &first = rows[m];
        const Operands from = {first.query, first.query_factors, first.own_products, tile.keys,
                               n_parts};
        multiply(n, from, next, tile.sums);

        const int64_t n_cells = smaller(tile_cells, job.n_cells - tile.first_cell);
        for (int i = 0; i < n; i++) {
            const TaskRow &row = rows[m + i];
            float *const scores = tile.scores + (m + i) * tile.row_scores;
            int16_t copy[cells_per_block];
            const char *mask = row.mask ? row.mask + 2 * tile.first_cell : nullptr;
            // The masks and scores of rows are far apart: prefetch those of the next tiles.
            if (mask) __builtin_prefetch(mask + 4 * tile_cells);
            prefetch_to_write(scores + tile_cells, tile_cells * sizeof(float));
            if (!mask || n_cells < tile_cells) mask = copy_mask(mask, n_cells, copy);
            Floats dots[vectors];
            add_parts(from, n, i, tile.sums, dots);
            finish(job, mask, row.slope, dots, tile.factors, scores,
                   tile.largest + (m + i) * largest_floats<V>);
        }
    }

    // The scores of a tile of cells for all rows of the task, and the factors of the cells' values.
    static void score_tile(const AttentionJob &job, const AttentionTask &task,
                           const TaskRow *rows, const CellTile &tile) {
        const RowTiles tiles(task.rows(), most_rows);
        const NextCells next_keys = {keys_of(job, task) + tile.next_cell * job.key_cell_stride,
                                     job.key_cell_stride,
                                     bytes_of_numbers(job.key_type, part_dimensions)};
        const NextCells next_values = {
            values_of(job, task) + tile.next_cell * job.value_cell_stride, job.value_cell_stride,
            bytes_of_numbers(job.value_type, part_dimensions)};
        const NextCells nothing = {reinterpret_cast<const char *>(tile.keys.words), 0, 0};
        // While the tiles of rows are multiplied, they prefetch the keys and the values of the next
        // tile of cells alternately. (A busy processor drops prefetches, so later tiles of rows
        // repeat them.) If there are few tiles of rows, the next keys are prefetched while these
        // keys are converted.
        const bool few = tiles.n <= 2;
        const NextCells next[] = {few ? next_values : next_keys, next_values};
        with_type(job.key_type, [&](auto type) {
            IntegerKeys<V>::template convert<type()>(job, task, tile.first_cell,
                                                     few ? next_keys : nothing, tile.keys);
        });
        if constexpr (halved) tile.keys.find_starts(parts_of(job.key_size));
        IntegerValues<V>::find_factors(job, task, tile.first_cell, tile_cells, tile.factors);
        for (int64_t i = 0; i < tiles.n; i++) {
            score_rows(job, rows, tiles.first(i), tiles.rows(i), next[i % 2], tile);
        }
    }

    // --- a task ---

    // Row m of a task, whose query is converted to `query`.
    static TaskRow prepare_row(const AttentionJob &job, const AttentionTask &task, int64_t m,
                               const typename IntegerQueries<V>::Query &query) {
        const int64_t row = task.query_row(m);
        const int64_t head = task.head(m);
        const char *floats = job.queries + row * job.query_row_stride +
                             head * job.query_head_stride + task.stream * job.query_stream_stride;
        const float scale = job.softcap > 0 ? job.scale / job.softcap : job.scale;
        IntegerQueries<V>::template convert<halved>(reinterpret_cast<const float *>(floats),
                                                    job.key_size, scale, query);
        return {query.words, query.factors, query.own_products,
                job.mask ? mask_of(job, task, row, head) : nullptr,
                alibi_slope(job.max_bias, job.n_heads, head)};
    }

    // All rows of a task. The queries of a tile of rows are interleaved.
    static void prepare_rows(const AttentionJob &job, const AttentionTask &task,
                             const ThreadMemory &memory) {
        const int64_t n_parts = parts_of(job.key_size);
        const RowTiles tiles(task.rows(), most_rows);
        for (int64_t i = 0; i < tiles.n; i++) {
            const int64_t first_part = tiles.first(i) * n_parts;
            for (int row = 0; row < tiles.rows(i); row++) {
                const int64_t m = tiles.first(i) + row;
                memory.rows[m] = prepare_row(job, task, m,
                                             {memory.queries + first_part * part_words + row,
                                              memory.query_factors + first_part + row,
                                              memory.own_products + first_part + row,
                                              tiles.rows(i)});
            }
        }
    }

    // Begin with the largest scores and factors of a thread: none.
    static void clear_largest(float *largest, int64_t n_rows) {
        for (int64_t m = 0; m < n_rows; m++) {
            V::store(largest + m * largest_floats<V>, V::all(-INFINITY));
            V::store(largest + m * largest_floats<V> + V::lanes, V::zero());
        }
    }

    // A share of the blocks that the task sees: their scores, the factors of their values, and the
    // largest of both for each row.
    static void run(const AttentionJob &job, const AttentionTask &task, Share share,
                    BlockList blocks, const ThreadMemory &thread_memory,
                    const TaskMemory &task_memory) {
        prepare_rows(job, task, thread_memory);
        CellTile tile;
        tile.keys = {thread_memory.keys, thread_memory.key_factors, thread_memory.key_starts,
                     tile_cells};
        tile.row_scores = row_distance(blocks.n());
        tile.largest = task_memory.largest + share.index * task.rows() * largest_floats<V>;
        tile.sums = reinterpret_cast<Ints *>(thread_memory.dots);
        clear_largest(tile.largest, task.rows());
        for (int64_t position = share.index; position < blocks.n(); position += share.n) {
            const int64_t first_cell = blocks[position] * cells_per_block;
            // The share's next block. (After the last one, what is prefetched is not used.)
            const int64_t next_block = blocks[smaller(position + share.n, blocks.n() - 1)];
            for (int i = 0; i < cells_per_block; i += tile_cells) {
                const bool is_last = i + tile_cells == cells_per_block;
                tile.first_cell = first_cell + i;
                tile.next_cell =
                    is_last ? next_block * cells_per_block : tile.first_cell + tile_cells;
                tile.factors = task_memory.factors + position * cells_per_block + i;
                tile.scores = task_memory.scores + position * cells_per_block + i;
                score_tile(job, task, thread_memory.rows, tile);
            }
        }
    }
};

}  // namespace
