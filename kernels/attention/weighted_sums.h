// The third pass of attention: sums of integer weights times integer values, which are exact.
#pragma once

#include "attention/cells.h"
#include "attention/integer_values.h"

// Where all registers are in use, GCC 12 also stores each sum to the stack in every step of the loop, unless
// it leaves variables apart: on AVX2 the third pass took 1.5 times as long.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SUMS_IN_REGISTERS [[gnu::optimize("no-tree-coalesce-vars")]]
#else
#define SUMS_IN_REGISTERS
#endif

namespace {

template <class V>
struct AttentionValues {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    // A tile of registers: so many rows and vectors of outputs. Tiles of the same rows make a
    // strip, for which the few pairs of cells with heavy weights are looked up once.
    static constexpr int most_rows = 6, tile_vectors = V::accumulators / most_rows;
    static constexpr int strip_vectors = 128 / V::lanes;
    // Threads that share a task get strips of the numbers in a line of the processor's cache.
    static constexpr int shared_vectors = 32 / V::lanes;
    // So many blocks of values are integers at a time: 128 KB of 128 dimensions, which stay in the
    // second level of the cache.
    static constexpr int64_t blocks_at_once = 8;

    // The weights of a row, and the values of as many dimensions as a strip has.
    struct Operands {
        const int16_t *weights[most_rows];       // [block]: 64 light parts, 64 heavy ones
        const uint32_t *heavy_pairs[most_rows];  // [block]
        const int16_t *values;                   // [block][pair][size][2]
        int64_t n_blocks, size;

        const int16_t *pair(int64_t block, int pair) const {
            return values + (block * pairs_per_block + pair) * 2 * size;
        }
        const int32_t *words(int row, int64_t block) const {
            return reinterpret_cast<const int32_t *>(weights[row] + block * 2 * cells_per_block);
        }
    };

    // Sums of a strip, as two words and as the sum of heavy parts (see attention_weights.h).
    struct Sums {
        Ints low[most_rows][strip_vectors], high[most_rows][strip_vectors];
        Ints heavy[most_rows][strip_vectors];
    };
    static int64_t bytes_of_values(int64_t n_blocks) {
        constexpr int64_t block_bytes = cells_per_block * strip_vectors * V::lanes * sizeof(int16_t);
        return smaller(blocks_at_once, n_blocks) * block_bytes;
    }
    static int64_t bytes_of_sums(int64_t n_rows) { return RowTiles(n_rows, most_rows).n * sizeof(Sums); }

    // Sums of light parts for `rows` rows and vectors first, first + 1, ... of their outputs.
    template <int rows, int vectors>
    [[gnu::noinline]] SUMS_IN_REGISTERS static void add_light(const Operands &from, int first, Sums &to) {
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
        for (int v = 0; v < vectors; v++) sums[v] = to.heavy[row][first + v];
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

    template <int rows = most_rows>
    static void add_rows(int n_rows, const Operands &from, int n_vectors, Sums &to) {
        if constexpr (rows > 1) {
            if (n_rows < rows) return add_rows<rows - 1>(n_rows, from, n_vectors, to);
        }
        add_strip<rows>(from, n_vectors, to);
    }

    // Add some blocks of a strip to the sums of rows m to m + n_rows of the task; `position` is the
    // first block's.
    static void add_blocks(const Operands &strip, int n_vectors, int64_t m, int n_rows,
                           int64_t position, int64_t n_positions, const TaskMemory &memory, Sums &to) {
        Operands from = strip;
        for (int i = 0; i < n_rows; i++) {
            const int64_t block = (m + i) * n_positions + position;
            from.weights[i] =
                reinterpret_cast<const int16_t *>(memory.scores + block * cells_per_block);
            from.heavy_pairs[i] = memory.heavy_pairs + block;
        }
        add_rows(n_rows, from, n_vectors, to);
    }

    // Outputs of rows m to m + n_rows of the task, from vector `first` on.
    static void write_rows(const AttentionJob &job, const AttentionTask &task, int64_t m,
                           int n_rows, int64_t first, int n_vectors, const double *scales,
                           const Sums &sums) {
        for (int i = 0; i < n_rows; i++) {
            const int64_t row = (task.stream * job.n_rows + task.query_row(m + i)) * job.n_heads +
                                task.head(m + i);
            for (int v = 0; v < n_vectors; v++) {
                const int64_t d = (first + v) * V::lanes, left = job.value_size - d;
                const Floats outputs =
                    V::join(sums.high[i][v], sums.low[i][v], sums.heavy[i][v], scales[m + i]);
                float *to = job.outputs + row * job.value_size + d;
                if (left >= V::lanes) {
                    V::store(to, outputs);
                } else {
                    V::store_first(to, outputs, static_cast<int>(left));
                }
            }
        }
    }

    // A strip of the outputs of all rows of the task.
    static void run_strip(const AttentionJob &job, const AttentionTask &task, int64_t first,
                          int n_vectors, const uint32_t *blocks, const ThreadMemory &own,
                          const TaskMemory &memory) {
        const RowTiles tiles(task.rows(), most_rows);
        Sums *sums = reinterpret_cast<Sums *>(own.sums);
        std::memset(sums, 0, tiles.n * sizeof(Sums));
        Operands strip = {};
        strip.values = own.values;
        strip.size = n_vectors * V::lanes;
        for (int64_t start = 0; start < blocks[0]; start += blocks_at_once) {
            strip.n_blocks = smaller(blocks_at_once, blocks[0] - start);
            for (int64_t i = 0; i < strip.n_blocks; i++) {
                AttentionIntegers<V>::convert(
                    job, task, blocks[1 + start + i], memory.factors + (start + i) * cells_per_block,
                    first * V::lanes, strip.size, own.values + i * cells_per_block * strip.size);
            }
            for (int64_t i = 0; i < tiles.n; i++) {
                add_blocks(strip, n_vectors, tiles.first(i), tiles.rows(i), start, blocks[0], memory,
                           sums[i]);
            }
        }
        for (int64_t i = 0; i < tiles.n; i++) {
            write_rows(job, task, tiles.first(i), tiles.rows(i), first, n_vectors, memory.scales, sums[i]);
        }
    }

    static int64_t shared_strips(int64_t value_size) {
        return (value_size + shared_vectors * V::lanes - 1) / (shared_vectors * V::lanes);
    }

    // Strips `part`, `part` + n_parts, ... of the task's outputs.
    static void run(const AttentionJob &job, const AttentionTask &task, int part, int n_parts,
                    const uint32_t *blocks, const ThreadMemory &own, const TaskMemory &memory) {
        const int64_t n_vectors = rounded_up(job.value_size, V::lanes) / V::lanes;
        const int width = n_parts == 1 ? strip_vectors : shared_vectors;
        for (int64_t first = part * width; first < n_vectors; first += n_parts * width) {
            run_strip(job, task, first, static_cast<int>(smaller(width, n_vectors - first)), blocks, own,
                      memory);
        }
    }
};

}  // namespace
