// The third pass of attention: sums of integer weights times integer values, which are exact.
#pragma once

#include "attention_cells.h"

namespace {

template <class V>
struct AttentionValues {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    // Vectors of outputs that are made together, so that the weights of a row are read once.
    static constexpr int strip_vectors = 8;

    // The weights of a row, and the values of as many dimensions as a tile has.
    struct Operands {
        const int16_t *weights[rows_per_tile];       // [block]: 64 light parts, 64 heavy ones
        const uint32_t *heavy_pairs[rows_per_tile];  // [block]
        const int16_t *values;                       // [block][pair][size][2]
        int64_t n_blocks, size;

        const int16_t *pair(int64_t block, int pair) const {
            return values + (block * pairs_per_block + pair) * 2 * size;
        }
        const int32_t *words(int row, int64_t block) const {
            return reinterpret_cast<const int32_t *>(weights[row] + block * 2 * cells_per_block);
        }
    };

    // Sums of a tile, as two words and as the sum of heavy parts (see attention_weights.h).
    struct Sums {
        Ints low[rows_per_tile][strip_vectors], high[rows_per_tile][strip_vectors];
        Ints heavy[rows_per_tile][strip_vectors];
    };

    // Sums of light parts for `rows` rows and vectors first, first + 1, ... of their outputs.
    template <int rows, int vectors>
    [[gnu::noinline]] static void add_light(const Operands &from, int first, Sums &to) {
        for (int row = 0; row < rows; row++) {
            for (int v = 0; v < vectors; v++) {
                to.low[row][first + v] = to.high[row][first + v] = V::zero_ints();
            }
        }
        for (int64_t block = 0; block < from.n_blocks; block++) {
            Ints sums[rows][vectors];
#pragma GCC unroll 8
            for (auto &row : sums) {
                for (auto &sum : row) sum = V::zero_ints();
            }
            for (int pair = 0; pair < pairs_per_block; pair++) {
                const int16_t *pairs = from.pair(block, pair) + first * 2 * V::lanes;
                Ints values[vectors];
                for (int v = 0; v < vectors; v++) values[v] = V::load(pairs + v * 2 * V::lanes);
#pragma GCC unroll 8
                for (int row = 0; row < rows; row++) {
                    const Ints weights = V::all_words(from.words(row, block) + pair);
                    for (int v = 0; v < vectors; v++) {
                        sums[row][v] = V::dot_shorts(sums[row][v], values[v], weights);
                    }
                }
            }
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                for (int v = 0; v < vectors; v++) {
                    Ints &low = to.low[row][first + v], &high = to.high[row][first + v];
                    low = V::add(low, V::bits(sums[row][v], V::all_ints(0xffff)));
                    high = V::add(high, V::template shift_lanes_right<16>(sums[row][v]));
                }
            }
        }
    }

    // Sums of the heavy parts of a row: of few pairs of cells, so each row by itself.
    template <int vectors>
    [[gnu::noinline]] static void add_heavy(const Operands &from, int row, int first, Sums &to) {
        Ints sums[vectors];
        for (auto &sum : sums) sum = V::zero_ints();
        for (int64_t block = 0; block < from.n_blocks; block++) {
            const int32_t *words = from.words(row, block) + pairs_per_block;
            for (uint32_t rest = from.heavy_pairs[row][block]; rest != 0; rest &= rest - 1) {
                const int pair = __builtin_ctz(rest);
                const int16_t *pairs = from.pair(block, pair) + first * 2 * V::lanes;
                const Ints weights = V::all_words(words + pair);
                for (int v = 0; v < vectors; v++) {
                    sums[v] = V::dot_shorts(sums[v], V::load(pairs + v * 2 * V::lanes), weights);
                }
            }
        }
        for (int v = 0; v < vectors; v++) to.heavy[row][first + v] = sums[v];
    }

    template <int rows>
    static void add_strip(const Operands &from, int n_vectors, Sums &to) {
        int v = 0;
        for (; v + V::tile_vectors <= n_vectors; v += V::tile_vectors) {
            add_light<rows, V::tile_vectors>(from, v, to);
        }
        for (; v < n_vectors; v++) add_light<rows, 1>(from, v, to);
        for (int row = 0; row < rows; row++) {
            int h = 0;
            for (; h + 8 <= n_vectors; h += 8) add_heavy<8>(from, row, h, to);
            for (; h + 4 <= n_vectors; h += 4) add_heavy<4>(from, row, h, to);
            for (; h < n_vectors; h++) add_heavy<1>(from, row, h, to);
        }
    }

    static void add_rows(const Operands &from, int n_rows, int n_vectors, Sums &to) {
        switch (n_rows) {
            case 1: return add_strip<1>(from, n_vectors, to);
            case 2: return add_strip<2>(from, n_vectors, to);
            case 3: return add_strip<3>(from, n_vectors, to);
            case 4: return add_strip<4>(from, n_vectors, to);
            case 5: return add_strip<5>(from, n_vectors, to);
            default: return add_strip<rows_per_tile>(from, n_vectors, to);
        }
    }

    // Outputs of rows m to m + n_rows of the task, for the vectors from `first_vector` on.
    static void write_rows(const AttentionJob &job, const AttentionTask &task, int64_t m, int n_rows,
                           int64_t first_vector, int n_vectors, int64_t n_blocks,
                           const TaskMemory &memory) {
        Operands from = {};
        from.size = rounded_up(job.value_size, V::lanes);
        from.values = memory.values + first_vector * 2 * V::lanes;
        from.n_blocks = n_blocks;
        for (int i = 0; i < n_rows; i++) {
            from.weights[i] = reinterpret_cast<const int16_t *>(memory.scores +
                                                                (m + i) * n_blocks * cells_per_block);
            from.heavy_pairs[i] = memory.heavy_pairs + (m + i) * n_blocks;
        }
        Sums sums;
        add_rows(from, n_rows, n_vectors, sums);
        for (int i = 0; i < n_rows; i++) {
            const int64_t row = (task.stream * job.n_rows + task.query_row(m + i)) * job.n_heads +
                                task.head(m + i);
            for (int v = 0; v < n_vectors; v++) {
                const int64_t d = (first_vector + v) * V::lanes, left = job.value_size - d;
                const Floats outputs = V::join(sums.high[i][v], sums.low[i][v], sums.heavy[i][v],
                                               memory.scales[m + i]);
                float *to = job.outputs + row * job.value_size + d;
                if (left >= V::lanes) {
                    V::store(to, outputs);
                } else {
                    V::store_first(to, outputs, static_cast<int>(left));
                }
            }
        }
    }

    // Tiles `part`, `part` + n_parts, ... of the task's outputs.
    static void run(const AttentionJob &job, const AttentionTask &task, int part, int n_parts,
                    int64_t n_blocks, const TaskMemory &memory) {
        const int64_t n_vectors = rounded_up(job.value_size, V::lanes) / V::lanes;
        // Threads that share a task get narrower tiles.
        const int width = n_parts == 1 ? strip_vectors : strip_vectors / 2;
        int64_t tile = 0;
        for (int64_t m = 0; m < task.rows(); m += rows_per_tile) {
            const int64_t rows = task.rows() - m;
            for (int64_t v = 0; v < n_vectors; v += width, tile++) {
                if (tile % n_parts != part) continue;
                const int64_t vectors = n_vectors - v;
                write_rows(job, task, m, static_cast<int>(rows < rows_per_tile ? rows : rows_per_tile),
                           v, static_cast<int>(vectors < width ? vectors : width), n_blocks, memory);
            }
        }
    }
};

}  // namespace
