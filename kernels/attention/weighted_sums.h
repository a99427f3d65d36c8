// The third pass of attention: sums of integer weights times integer values, which are exact.
//
//     outputs[row] = scales[row] * sum over cells of weights[row][cell] * values[cell]
//
// The outputs of a task are cut in three ways: into strips of dimensions, whose integer values fit
// into the second-level cache; into tiles of rows; and into tiles of vectors within a strip, whose
// sums fit into the registers.
#pragma once

#include "attention/halved_products.h"
#include "attention/integer_values.h"
#include "attention/task.h"
#include "vectors/arithmetic.h"

namespace {

// `halved`: whether sums are computed with half of the multiplications (halved_products.h).
template <class V, bool halved>
struct WeightedSums {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    // The rows of a tile, and its vectors of outputs: their sums fit into the registers. If
    // products are halved, there are twice as many operands, and more rows, so that values are not
    // loaded more often.
    static constexpr int most_rows = halved ? 8 : 6;
    static constexpr int tile_vectors = halved ? 2 : V::pair_accumulators / most_rows;
    // The vectors of a strip. Tiles of the same rows in a strip share the search for the few
    // pairs of cells that have heavy weights.
    static constexpr int strip_vectors = 128 / V::lanes;
    // Threads that share a task get strips of 32 dimensions: one cache line of float16 values.
    static constexpr int shared_vectors = 32 / V::lanes;
    // How many blocks of values are converted at a time: the integers, 128 KB for 128 dimensions,
    // stay in the second-level cache.
    static constexpr int64_t blocks_at_once = 8;

    // What a tile of rows multiplies.
    struct Operands {
        // For each row, [block]: 64 light parts, then 64 heavy ones.
        const int16_t *weights[most_rows];
        // For each row, [block]: a bit for each pair of cells that has a heavy part.
        const uint32_t *heavy_pairs[most_rows];
        // For each row, [block]: see `TaskMemory`.
        const int32_t *own_products[most_rows];
        // [block][pair of cells][dimension of the strip][2]
        const int16_t *values;
        // [block][dimension of the strip]: see `ThreadMemory`.
        const int32_t *value_starts;
        int64_t n_blocks;
        // The dimensions of the strip.
        int64_t size;

        const int16_t *pair(int64_t block, int pair) const {
            return values + (block * pairs_per_block + pair) * 2 * size;
        }
        // The weights of a row, two cells to a word.
        const int32_t *words(int row, int64_t block) const {
            return reinterpret_cast<const int32_t *>(weights[row] + block * 2 * cells_per_block);
        }
    };

    // The sums of a tile of rows over a strip. Those of light parts are in two words, low + high *
    // 2^16; those of heavy parts are in one (see softmax_weights.h).
    struct Sums {
        Ints low[most_rows][strip_vectors];
        Ints high[most_rows][strip_vectors];
        Ints heavy[most_rows][strip_vectors];
    };

    static int64_t bytes_of_values(int64_t n_blocks) {
        constexpr int64_t block_bytes =
            cells_per_block * strip_vectors * V::lanes * sizeof(int16_t);
        return smaller(blocks_at_once, n_blocks) * block_bytes;
    }
    static int64_t bytes_of_starts(int64_t n_blocks) {
        return smaller(blocks_at_once, n_blocks) * strip_vectors * V::lanes * sizeof(int32_t);
    }
    static int64_t bytes_of_sums(int64_t n_rows) {
        return RowTiles(n_rows, most_rows).n * sizeof(Sums);
    }

    // --- sums of a tile ---

    // sums <- the products of a block's light parts, for `rows` rows and vectors first, first + 1,
    // ... of a strip. They fit into 32 bits.
    template <int rows, int vectors>
    [[gnu::always_inline]] static void multiply_all(const Operands &from, int64_t block, int first,
                                                    typename V::PairSums (&sums)[rows][vectors]) {
#pragma GCC unroll 8
        for (auto &row : sums) {
            for (auto &sum : row) sum = V::zero_pair_sums();
        }
        for (int pair = 0; pair < pairs_per_block; pair++) {
            const int16_t *pairs = from.pair(block, pair) + first * 2 * V::lanes;
            Ints values[vectors];
            for (int v = 0; v < vectors; v++) values[v] = V::load(pairs + v * 2 * V::lanes);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                const Ints weights = V::broadcast_word(from.words(row, block) + pair);
                for (int v = 0; v < vectors; v++) {
                    sums[row][v] = V::dot_shorts(sums[row][v], values[v], weights);
                }
            }
        }
    }

    // The same with half of the multiplications.
    template <int rows, int vectors>
    [[gnu::always_inline]] static void multiply_half(const Operands &from, int64_t block, int first,
                                                     typename V::PairSums (&sums)[rows][vectors]) {
        const int32_t *const starts = from.value_starts + block * from.size + first * V::lanes;
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const Ints own = V::broadcast_word(from.own_products[row] + block);
            for (int v = 0; v < vectors; v++) {
                sums[row][v] = V::subtract(V::load(starts + v * V::lanes), own);
            }
        }
        for (int pair = 0; pair < pairs_per_block; pair += 2) {
            const int16_t *const first_pairs = from.pair(block, pair) + first * 2 * V::lanes;
            const int16_t *const second_pairs = first_pairs + 2 * from.size;
            Ints first_values[vectors], second_values[vectors];
            for (int v = 0; v < vectors; v++) {
                first_values[v] = V::load(first_pairs + v * 2 * V::lanes);
                second_values[v] = V::load(second_pairs + v * 2 * V::lanes);
            }
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                const int32_t *const words = from.words(row, block) + pair;
                const Ints first_weights = V::broadcast_word(words);
                const Ints second_weights = V::broadcast_word(words + 1);
                for (int v = 0; v < vectors; v++) {
                    sums[row][v] =
                        V::dot_shorts(sums[row][v], V::add_shorts(first_weights, second_values[v]),
                                      V::add_shorts(second_weights, first_values[v]));
                }
            }
        }
    }

    // Add the products of light parts, for `rows` rows and vectors first, first + 1, ... of a
    // strip.
    template <int rows, int vectors>
    [[gnu::noinline]] SUMS_IN_REGISTERS static void add_light(const Operands &from, int first,
                                                              Sums &to) {
        for (int64_t block = 0; block < from.n_blocks; block++) {
            typename V::PairSums sums[rows][vectors];
            if constexpr (halved) {
                multiply_half(from, block, first, sums);
            } else {
                multiply_all(from, block, first, sums);
            }
            // The sums of all blocks need two words.
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                for (int v = 0; v < vectors; v++) {
                    Ints &low = to.low[row][first + v];
                    Ints &high = to.high[row][first + v];
                    const Ints sum = V::sum_of_pairs(sums[row][v]);
                    low = V::add(low, V::bit_and(sum, V::all_ints(0xffff)));
                    high = V::add(high, V::template shift_ints_right<16>(sum));
                }
            }
        }
    }

    // Add the products of heavy parts for one row. Few pairs of cells have any, and each row has
    // others.
    template <int vectors>
    [[gnu::noinline]] static void add_heavy(const Operands &from, int row, int first, Sums &to) {
        typename V::PairSums sums[vectors];
        for (auto &sum : sums) sum = V::zero_pair_sums();
        for (int64_t block = 0; block < from.n_blocks; block++) {
            const int32_t *words = from.words(row, block) + pairs_per_block;
            for (uint32_t rest = from.heavy_pairs[row][block]; rest != 0; rest &= rest - 1) {
                const int pair = __builtin_ctz(rest);
                const int16_t *pairs = from.pair(block, pair) + first * 2 * V::lanes;
                const Ints weights = V::broadcast_word(words + pair);
                for (int v = 0; v < vectors; v++) {
                    sums[v] = V::dot_shorts(sums[v], V::load(pairs + v * 2 * V::lanes), weights);
                }
            }
        }
        for (int v = 0; v < vectors; v++) {
            Ints &heavy = to.heavy[row][first + v];
            heavy = V::add(heavy, V::sum_of_pairs(sums[v]));
        }
    }

    // --- sums of a strip ---

    // Add the products of some blocks, for a tile of rows and all vectors of a strip.
    template <int rows>
    static void add_strip(const Operands &from, int n_vectors, Sums &to) {
        int v = 0;
        for (; v + tile_vectors <= n_vectors; v += tile_vectors) {
            add_light<rows, tile_vectors>(from, v, to);
        }
        for (; v < n_vectors; v++) add_light<rows, 1>(from, v, to);
        for (int row = 0; row < rows; row++) {
            int h = 0;
            for (; h + 8 <= n_vectors; h += 8) add_heavy<8>(from, row, h, to);
            for (; h + 4 <= n_vectors; h += 4) add_heavy<4>(from, row, h, to);
            for (; h < n_vectors; h++) add_heavy<1>(from, row, h, to);
        }
    }

    // Call `add_strip` with the number of rows as a constant.
    template <int rows = most_rows>
    static void add_rows(int n_rows, const Operands &from, int n_vectors, Sums &to) {
        if constexpr (rows > 1) {
            if (n_rows < rows) return add_rows<rows - 1>(n_rows, from, n_vectors, to);
        }
        add_strip<rows>(from, n_vectors, to);
    }

    // Add some blocks of a strip to the sums of rows m to m + n_rows of the task. `position` is
    // that of the first block, of `n_positions` in all.
    static void add_blocks(const Operands &strip, int n_vectors, int64_t m, int n_rows,
                           int64_t position, int64_t n_positions, const TaskMemory &memory,
                           Sums &to) {
        Operands from = strip;
        for (int i = 0; i < n_rows; i++) {
            const float *row = memory.scores + (m + i) * row_distance(n_positions);
            from.weights[i] = reinterpret_cast<const int16_t *>(row + position * cells_per_block);
            from.heavy_pairs[i] = memory.heavy_pairs + (m + i) * n_positions + position;
            from.own_products[i] = memory.own_products + (m + i) * n_positions + position;
        }
        add_rows(n_rows, from, n_vectors, to);
    }

    // Write the outputs of rows m to m + n_rows of the task, from vector `first` on.
    static void write_rows(const AttentionJob &job, const AttentionTask &task, int64_t m,
                           int n_rows, int64_t first, int n_vectors, const double *scales,
                           const Sums &sums) {
        for (int i = 0; i < n_rows; i++) {
            const int64_t row = (task.stream * job.n_rows + task.query_row(m + i)) * job.n_heads +
                                task.head(m + i);
            for (int v = 0; v < n_vectors; v++) {
                const int64_t d = (first + v) * V::lanes;
                const int64_t left = job.value_size - d;
                const Floats outputs = V::join_sums(sums.high[i][v], sums.low[i][v],
                                                    sums.heavy[i][v], scales[m + i]);
                float *to = job.outputs + row * job.value_size + d;
                if (left >= V::lanes) {
                    V::store(to, outputs);
                } else {
                    V::store_first(to, outputs, static_cast<int>(left));
                }
            }
        }
    }

    // Find what the sums of a block start from, for all dimensions of a strip.
    static void find_starts(const int16_t *values, int64_t size, int32_t *starts) {
        for (int64_t d = 0; d < size; d += V::lanes) {
            V::store(starts + d, start_of_sums<V>(values + 2 * d, pairs_per_block, 2 * size));
        }
    }

    // Compute a strip of the outputs of all rows of the task, from vector `first` on.
    static void run_strip(const AttentionJob &job, const AttentionTask &task, int64_t first,
                          int n_vectors, BlockList blocks, const ThreadMemory &thread_memory,
                          const TaskMemory &task_memory) {
        const RowTiles tiles(task.rows(), most_rows);
        Sums *sums = reinterpret_cast<Sums *>(thread_memory.sums);
        std::memset(sums, 0, tiles.n * sizeof(Sums));
        Operands strip = {};
        strip.values = thread_memory.values;
        strip.value_starts = thread_memory.value_starts;
        strip.size = n_vectors * V::lanes;
        for (int64_t start = 0; start < blocks.n(); start += blocks_at_once) {
            // Convert the values of a few blocks, then multiply them with all rows.
            strip.n_blocks = smaller(blocks_at_once, blocks.n() - start);
            for (int64_t i = 0; i < strip.n_blocks; i++) {
                int16_t *const values = thread_memory.values + i * cells_per_block * strip.size;
                const float *const factors = task_memory.factors + (start + i) * cells_per_block;
                IntegerValues<V>::convert(job, task, blocks[start + i], factors, first * V::lanes,
                                          strip.size, values);
                if constexpr (halved) {
                    IntegerValues<V>::clear_not_finite(factors, strip.size, values);
                    find_starts(values, strip.size, thread_memory.value_starts + i * strip.size);
                }
            }
            for (int64_t i = 0; i < tiles.n; i++) {
                add_blocks(strip, n_vectors, tiles.first(i), tiles.rows(i), start, blocks.n(),
                           task_memory, sums[i]);
            }
        }
        for (int64_t i = 0; i < tiles.n; i++) {
            write_rows(job, task, tiles.first(i), tiles.rows(i), first, n_vectors,
                       task_memory.scales, sums[i]);
        }
    }

    // --- a task ---

    // How many strips there are if threads share the task.
    static int64_t shared_strips(int64_t value_size) {
        return (value_size + shared_vectors * V::lanes - 1) / (shared_vectors * V::lanes);
    }

    // A share of the strips of the task's outputs.
    static void run(const AttentionJob &job, const AttentionTask &task, Share share,
                    BlockList blocks, const ThreadMemory &thread_memory,
                    const TaskMemory &task_memory) {
        const int64_t n_vectors = rounded_up(job.value_size, V::lanes) / V::lanes;
        const int width = share.n == 1 ? strip_vectors : shared_vectors;
        for (int64_t first = share.index * width; first < n_vectors; first += share.n * width) {
            const int n = static_cast<int>(smaller(width, n_vectors - first));
            run_strip(job, task, first, n, blocks, thread_memory, task_memory);
        }
    }
};

}  // namespace
