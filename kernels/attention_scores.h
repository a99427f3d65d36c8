// The first pass of attention: the scores of all cells, and the values as integers.
//
// The score of a cell is one chain of float32 multiply-adds over the key, in the order of its
// dimensions, whatever the number of rows is and wherever the cell lies.
#pragma once

#include "attention_cells.h"

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
    if (mask) std::memcpy(space, mask, n * sizeof(int16_t));
    return reinterpret_cast<const char *>(space);
}

// ALiBi: the mask of head `head` is multiplied by this.
inline float slope_of(const AttentionJob &job, int64_t head) {
    if (job.max_bias <= 0) return 1.0f;
    int64_t n = 1;  // the largest power of two among the heads
    while (2 * n <= job.n_heads) n *= 2;
    const float step = head < n ? job.max_bias : job.max_bias / 2;
    const float base = powf(2.0f, -step / n);
    return powf(base, head < n ? head + 1 : 2 * (head - n) + 1);
}

template <class V>
struct AttentionScores {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    static constexpr int tile_cells = V::tile_vectors * V::lanes;

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
            const int64_t left = job.n_cells - first;
            const int64_t n_cells = left < cells_per_block ? left : cells_per_block;
            bool seen = !job.mask;
            const int64_t n_heads = job.n_mask_heads == 1 ? 1 : task.group;
            for (int64_t row = 0; !seen && row < task.n_rows; row++) {
                for (int64_t i = 0; !seen && i < n_heads; i++) {
                    const int64_t head = task.kv_head * task.group + i;
                    seen = sees(mask_of(job, task, task.first_row + row, head) + 2 * first, n_cells);
                }
            }
            if (seen) blocks[++n] = static_cast<uint32_t>(first / cells_per_block);
        }
        blocks[0] = n;
    }

    // --- keys ---

    // The keys of a block as floats, transposed, so that a vector holds one dimension of many
    // cells. (Cells behind the last one repeat it: they are hidden.)
    template <CacheType type>
    static void transpose_keys(const AttentionJob &job, const AttentionTask &task, int64_t block,
                               const ThreadMemory &memory) {
        const int64_t size = rounded_up(job.key_size, V::lanes);
        const char *keys = job.keys + task.kv_head * job.key_head_stride +
                           task.stream * job.key_stream_stride;
        for (int first = 0; first < cells_per_block; first += V::lanes) {
            for (int i = 0; i < V::lanes; i++) {
                const int64_t cell = block * cells_per_block + first + i;
                const int64_t present = cell < job.n_cells ? cell : job.n_cells - 1;
                cell_to_floats<V, type>(keys + present * job.key_cell_stride, job.key_size,
                                        memory.rows + i * size);
            }
            float *tile = memory.keys + first / tile_cells * tile_cells * size + first % tile_cells;
            for (int64_t d = 0; d < size; d += 4) {
                Floats v[4];
                for (int i = 0; i < 4; i++) {
                    v[i] = V::load_quads(memory.rows + i * size + d, 4 * size);
                }
                V::transpose_quads(v);
                for (int i = 0; i < 4; i++) V::store(tile + (d + i) * tile_cells, v[i]);
            }
        }
    }

    // --- scores ---

    // Dot products of `rows` queries with the cells of a tile. (GCC keeps the sums in registers only
    // if the loops over rows are unrolled: 4 times as fast.)
    template <int rows>
    [[gnu::noinline]] static void multiply_tile(const float *const *queries, const float *keys, int64_t key_size,
                              float *dots) {
        Floats sums[rows][V::tile_vectors];
#pragma GCC unroll 8
        for (auto &row : sums) {
            for (auto &sum : row) sum = V::zero();
        }
        for (int64_t d = 0; d < key_size; d++) {
            Floats key[V::tile_vectors];
            for (int v = 0; v < V::tile_vectors; v++) {
                key[v] = V::load_floats(keys + d * tile_cells + v * V::lanes);
            }
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                const Floats query = V::all(queries[row][d]);
                for (int v = 0; v < V::tile_vectors; v++) {
                    sums[row][v] = V::multiply_add(query, key[v], sums[row][v]);
                }
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            for (int v = 0; v < V::tile_vectors; v++) {
                V::store(dots + row * cells_per_block + v * V::lanes, sums[row][v]);
            }
        }
    }

    static void multiply(const float *const *queries, int n_queries, const float *keys,
                         int64_t key_size, float *dots) {
        switch (n_queries) {
            case 1: return multiply_tile<1>(queries, keys, key_size, dots);
            case 2: return multiply_tile<2>(queries, keys, key_size, dots);
            case 3: return multiply_tile<3>(queries, keys, key_size, dots);
            case 4: return multiply_tile<4>(queries, keys, key_size, dots);
            case 5: return multiply_tile<5>(queries, keys, key_size, dots);
            default: return multiply_tile<rows_per_tile>(queries, keys, key_size, dots);
        }
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
        for (int i = 0; i < cells_per_block; i += V::lanes) {
            Floats score = V::multiply(V::load_floats(dots + i), V::all(scale));
            if (job.softcap > 0) score = cap(score, job.softcap);
            const Floats bias = V::multiply(V::load_halves(mask + 2 * i), V::all(slope));
            // A cell not seen may hold anything: -inf + NaN would be seen.
            const typename V::Mask seen = V::differ(bias, V::all(-INFINITY));
            V::store(scores + i, V::add(V::only(seen, score), bias));
        }
    }

    // The scores of one block for all rows of the task; it is the task's block number `position`.
    static void score_block(const AttentionJob &job, const AttentionTask &task, int64_t block,
                            int64_t position, int64_t n_positions, const ThreadMemory &own,
                            const TaskMemory &memory) {
        const int64_t key_tile = tile_cells * rounded_up(job.key_size, V::lanes);
        const int64_t first_cell = block * cells_per_block;
        const int64_t left = job.n_cells - first_cell;
        float dots[rows_per_tile * cells_per_block];
        for (int64_t m = 0; m < task.rows(); m += rows_per_tile) {
            const int n = static_cast<int>(task.rows() - m < rows_per_tile ? task.rows() - m
                                                                           : rows_per_tile);
            const float *queries[rows_per_tile];
            for (int i = 0; i < n; i++) {
                queries[i] = reinterpret_cast<const float *>(
                    job.queries + task.query_row(m + i) * job.query_row_stride +
                    task.head(m + i) * job.query_head_stride + task.stream * job.query_stream_stride);
            }
            for (int t = 0; t < cells_per_block / tile_cells; t++) {
                multiply(queries, n, own.keys + t * key_tile, job.key_size, dots + t * tile_cells);
            }
            for (int i = 0; i < n; i++) {
                int16_t space[cells_per_block];
                const char *mask = nullptr;
                if (job.mask) {
                    mask = mask_of(job, task, task.query_row(m + i), task.head(m + i)) + 2 * first_cell;
                }
                if (!mask || left < cells_per_block) {
                    mask = copy_mask(mask, left < cells_per_block ? left : cells_per_block, space);
                }
                finish(job, mask, slope_of(job, task.head(m + i)), dots + i * cells_per_block,
                       memory.scores + ((m + i) * n_positions + position) * cells_per_block);
            }
        }
    }

    // --- values ---

    // A cell's factor: the power of two that makes its largest |value| an integer between 2^12 and
    // 2^13; so float16 values of the two top binades are exact integers. NaN where values are not
    // finite, so that it gets into the weights of just the rows that see the cell.
    template <CacheType type>
    static float factor_of(const char *cell, int64_t size) {
        Ints largest = V::zero_ints();
        for (int64_t i = 0; i < size; i += V::lanes) {
            const Ints absolute =
                V::bits(V::bits_of(load_cell<V, type>(cell, i)), V::all_ints(0x7fffffff));
            largest = V::larger(largest, absolute);
        }
        int exponent = V::largest_lane(largest) >> 23;
        if (exponent == 255) return __builtin_nanf("");
        if (exponent < 30) exponent = 30;  // all but zero: the factor has to have an inverse
        return power_of_two(exponent - 127 + 1 - 13);
    }

    static float power_of_two(int n) {
        const int32_t bits = (n + 127) << 23;
        float power;
        std::memcpy(&power, &bits, sizeof power);
        return power;
    }

    // The integers of two cells, side by side: the dot product of pairs adds both at once.
    template <CacheType type>
    static void store_pair(const char *first, const char *second, int64_t size, float *factors,
                           int16_t *pairs) {
        factors[0] = factor_of<type>(first, size);
        factors[1] = factor_of<type>(second, size);
        // The last bits of 1.5 * 2^23 + x are those of the integer nearest to x, also a negative
        // one: this saves the conversion to an integer.
        const Floats magic = V::all(12582912.0f);
        const Floats first_scale = V::all(1 / factors[0]), second_scale = V::all(1 / factors[1]);
        for (int64_t i = 0; i < size; i += V::lanes) {
            const Floats a = V::multiply_add(load_cell<V, type>(first, i), first_scale, magic);
            const Floats b = V::multiply_add(load_cell<V, type>(second, i), second_scale, magic);
            V::store(pairs + 2 * i, V::pair(V::bits_of(a), V::bits_of(b)));
        }
    }

    template <CacheType type>
    static void convert_values(const AttentionJob &job, const AttentionTask &task, int64_t block,
                               int64_t position, float *space, const TaskMemory &memory) {
        const int64_t size = rounded_up(job.value_size, V::lanes);
        const char *values = job.values + task.kv_head * job.value_head_stride +
                             task.stream * job.value_stream_stride;
        for (int pair = 0; pair < pairs_per_block; pair++) {
            const char *cells[2];
            for (int i = 0; i < 2; i++) {
                const int64_t cell = block * cells_per_block + 2 * pair + i;
                cells[i] = values + (cell < job.n_cells ? cell : job.n_cells - 1) *
                                        job.value_cell_stride;
            }
            float *factors = memory.factors + position * cells_per_block + 2 * pair;
            int16_t *pairs = memory.values + (position * pairs_per_block + pair) * 2 * size;
            if (size == job.value_size) {
                store_pair<type>(cells[0], cells[1], size, factors, pairs);
                continue;
            }
            for (int i = 0; i < 2; i++) {
                cell_to_floats<V, type>(cells[i], job.value_size, space + i * size);
            }
            store_pair<CacheType::f32>(reinterpret_cast<const char *>(space),
                                       reinterpret_cast<const char *>(space + size), size, factors,
                                       pairs);
        }
    }

    // Blocks `part`, `part` + n_parts, ... of those that the task sees.
    static void run(const AttentionJob &job, const AttentionTask &task, int part, int n_parts,
                    const uint32_t *blocks, const ThreadMemory &own, const TaskMemory &memory) {
        for (int64_t position = part; position < blocks[0]; position += n_parts) {
            const int64_t block = blocks[1 + position];
            switch (job.key_type) {
                case CacheType::f32: transpose_keys<CacheType::f32>(job, task, block, own); break;
                case CacheType::f16: transpose_keys<CacheType::f16>(job, task, block, own); break;
                case CacheType::bf16: transpose_keys<CacheType::bf16>(job, task, block, own); break;
                default: transpose_keys<CacheType::q8_0>(job, task, block, own);
            }
            score_block(job, task, block, position, blocks[0], own, memory);
            float *space = own.rows;
            switch (job.value_type) {
                case CacheType::f32:
                    convert_values<CacheType::f32>(job, task, block, position, space, memory);
                    break;
                case CacheType::f16:
                    convert_values<CacheType::f16>(job, task, block, position, space, memory);
                    break;
                case CacheType::bf16:
                    convert_values<CacheType::bf16>(job, task, block, position, space, memory);
                    break;
                default:
                    convert_values<CacheType::q8_0>(job, task, block, position, space, memory);
            }
        }
    }
};

}  // namespace
