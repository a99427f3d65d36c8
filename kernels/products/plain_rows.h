// Products and softmax of tensors that lie as ggml has them: rows of floats, not packed.
//
// llama.cpp multiplies them by one code for a single column and by another one for two and more, which
// adds up in another order. Here each output has one order of additions, whatever stands beside it.
//
// Attention without flash attention adds up over the cells of the cache, whose order differs from one
// run to another. As in attention.h, such sums are exact, so that the order does not count.
#pragma once

#include "attention/softmax_weights.h"
#include "products/plain_job.h"

namespace {

template <class V>
struct PlainRows {
    using Floats = typename V::Floats;
    using Ints = typename V::Ints;
    using Doubles = typename V::Doubles;
    static constexpr int lanes = V::lanes;

    // --- products ---

    // Outputs of n_rows x n_columns, one in each lane: row r and column c in lane r * n_columns + c.
    // Each has a vector of sums; a transposition then adds up the lanes of all at once.
    template <CacheType type, int n_rows, int n_columns>
    static Floats tile(const char *const *rows, const float *const *columns, int64_t n) {
        static_assert(n_rows * n_columns == lanes);
        Floats sums[lanes];
#pragma GCC unroll 16
        for (int i = 0; i < lanes; i++) sums[i] = V::zero();
        int64_t i = 0;
        for (; i + lanes <= n; i += lanes) {
            add<n_rows, n_columns>(
                sums, [&](int r) { return load_cell<V, type>(rows[r], i); },
                [&](int c) { return V::load_floats(columns[c] + i); });
        }
        if (i < n) {
            add<n_rows, n_columns>(
                sums, [&](int r) { return load_rest<V, type>(rows[r], i, n); },
                [&](int c) {
                    const char *column = reinterpret_cast<const char *>(columns[c]);
                    return load_rest<V, CacheType::f32>(column, i, n);
                });
        }
        V::transpose(sums);
#pragma GCC unroll 4
        for (int step = lanes / 2; step > 0; step /= 2) {
#pragma GCC unroll 8
            for (int j = 0; j < step; j++) sums[j] = V::add(sums[j], sums[j + step]);
        }
        return sums[0];
    }

    template <int n_rows, int n_columns, class Row, class Column>
    static void add(Floats (&sums)[lanes], Row row, Column column) {
        Floats inputs[n_columns];
#pragma GCC unroll 4
        for (int c = 0; c < n_columns; c++) inputs[c] = column(c);
#pragma GCC unroll 16
        for (int r = 0; r < n_rows; r++) {
            const Floats weights = row(r);
#pragma GCC unroll 4
            for (int c = 0; c < n_columns; c++) {
                Floats &sum = sums[r * n_columns + c];
                sum = V::multiply_add(weights, inputs[c], sum);
            }
        }
    }

    // Rows `first_row` and the next n_rows, or what there is of them, times n_columns columns.
    template <CacheType type, int n_rows, int n_columns>
    static void multiply_tile(const PlainProduct &product, int64_t first_row, int64_t first_column) {
        const char *rows[n_rows];
        const float *columns[n_columns];
        for (int r = 0; r < n_rows; r++) {  // in place of missing ones the last one
            const int64_t row = smaller(first_row + r, product.n_rows - 1);
            rows[r] = product.rows + row * product.row_bytes;
        }
        for (int c = 0; c < n_columns; c++) {
            columns[c] = product.columns[smaller(first_column + c, product.n_columns - 1)];
        }
        float results[lanes];
        V::store(results, tile<type, n_rows, n_columns>(rows, columns, product.n_inputs));
        for (int c = 0; c < n_columns && first_column + c < product.n_columns; c++) {
            for (int r = 0; r < n_rows && first_row + r < product.n_rows; r++) {
                product.outputs[first_column + c][first_row + r] = results[r * n_columns + c];
            }
        }
    }

    template <CacheType type>
    static void multiply(const PlainProduct &product) {
        constexpr int n_rows = 4, n_columns = lanes / n_rows;
        const int64_t together = product.n_columns - (product.n_columns % n_columns == 1);
        for (int64_t r = 0; r < product.n_rows; r += n_rows) {
            for (int64_t c = 0; c < together; c += n_columns) {
                multiply_tile<type, n_rows, n_columns>(product, r, c);
            }
        }
        if (together == product.n_columns) return;
        for (int64_t r = 0; r < product.n_rows; r += lanes) {
            multiply_tile<type, lanes, 1>(product, r, together);
        }
    }

    // --- sums over cells ---

    // Products whose sums do not depend on the order of their terms. Each sum starts at 1.5 * 2^18. So it
    // has no bits below 2^-34, and a term is in effect rounded down to a multiple of that: always to the
    // same one, which rounding to the nearest would not do for ties. This holds while the sum of all terms
    // is below 2^17. (The columns are weights whose sum is 1, and values of float16 are below 2^16.) Terms
    // that are 0 change nothing, whatever their number. Rounding each term by itself, and then adding it,
    // takes three instructions for one.
    static constexpr double start = 393216;
    static constexpr int cell_rows = V::accumulators < 24 ? 2 : 4, cell_columns = 2;
    using CellSums = Doubles[cell_rows][cell_columns];

    template <class Column, class Row>
    static void add_cells(CellSums &sums, Column column, Row row) {
        Floats weights[cell_columns];
        bool any = false;
#pragma GCC unroll 2
        for (int c = 0; c < cell_columns; c++) {
            weights[c] = column(c);
            any |= V::count(V::differ(weights[c], V::zero())) != 0;
        }
        if (!any) return;
        Doubles factors[cell_columns];
#pragma GCC unroll 2
        for (int c = 0; c < cell_columns; c++) factors[c] = V::to_doubles(weights[c]);
#pragma GCC unroll 4
        for (int r = 0; r < cell_rows; r++) {
            const Doubles values = V::to_doubles(row(r));
#pragma GCC unroll 2
            for (int c = 0; c < cell_columns; c++) {
                sums[r][c] = V::multiply_add_down(values, factors[c], sums[r][c]);
            }
        }
    }

    // In a function of its own: the compiler moves arithmetic across a change of the rounding mode.
    template <CacheType type>
    [[gnu::noinline]] static void add_cells(const char *const *rows, const char *const *columns,
                                            int64_t n, CellSums &results) {
        CellSums sums;  // in registers
        for (auto &of_row : sums) {
            for (Doubles &sum : of_row) sum = V::all_doubles(start);
        }
        const auto floats = [](const char *row) { return reinterpret_cast<const float *>(row); };
        int64_t i = 0;
        for (; i + lanes <= n; i += lanes) {
            add_cells(
                sums, [&](int c) { return V::load_floats(floats(columns[c]) + i); },
                [&](int r) { return load_cell<V, type>(rows[r], i); });
        }
        if (i < n) {
            add_cells(
                sums, [&](int c) { return load_rest<V, CacheType::f32>(columns[c], i, n); },
                [&](int r) { return load_rest<V, type>(rows[r], i, n); });
        }
        for (int r = 0; r < cell_rows; r++) {
            for (int c = 0; c < cell_columns; c++) results[r][c] = sums[r][c];
        }
    }

    template <CacheType type>
    static void weigh_cells(const PlainProduct &product) {
        for (int64_t row = 0; row < product.n_rows; row += cell_rows) {
            const char *rows[cell_rows];
            for (int r = 0; r < cell_rows; r++) {
                rows[r] = product.rows + smaller(row + r, product.n_rows - 1) * product.row_bytes;
            }
            for (int64_t column = 0; column < product.n_columns; column += cell_columns) {
                const char *columns[cell_columns];
                for (int c = 0; c < cell_columns; c++) {
                    const int64_t at = smaller(column + c, product.n_columns - 1);
                    columns[c] = reinterpret_cast<const char *>(product.columns[at]);
                }
                CellSums sums;
                {
                    const typename V::RoundingDown rounding;
                    add_cells<type>(rows, columns, product.n_inputs, sums);
                }
                for (int c = 0; c < cell_columns && column + c < product.n_columns; c++) {
                    for (int r = 0; r < cell_rows && row + r < product.n_rows; r++) {
                        const Doubles sum = V::subtract(sums[r][c], V::all_doubles(start));
                        product.outputs[column + c][row + r] = static_cast<float>(V::sum(sum));
                    }
                }
            }
        }
    }

    template <CacheType type>
    static void run(const PlainProduct &product) {
        product.over_cells ? weigh_cells<type>(product) : multiply<type>(product);
    }

    static void run(const PlainProduct &product) {
        switch (product.type) {
            case CacheType::f16: return run<CacheType::f16>(product);
            case CacheType::bf16: return run<CacheType::bf16>(product);
            default: return run<CacheType::f32>(product);
        }
    }

    // --- softmax ---

    // A vector of a row's scores; -inf beyond the last one.
    static Floats scores_at(const PlainSoftmax &job, int64_t i) {
        const int64_t left = job.n - i;
        float scores[lanes], mask[lanes];
        char halves[2 * lanes] = {};
        const float *from = job.scores + i;
        const char *hidden = job.mask + i * (job.mask_is_half ? 2 : 4);
        if (left < lanes) {
            for (int l = 0; l < lanes; l++) scores[l] = -INFINITY, mask[l] = 0;
            std::memcpy(scores, from, left * sizeof(float));
            std::memcpy(job.mask_is_half ? halves : reinterpret_cast<char *>(mask), hidden,
                        left * (job.mask_is_half ? 2 : 4));
            from = scores;
            hidden = job.mask_is_half ? halves : reinterpret_cast<const char *>(mask);
        }
        const Floats added = job.mask_is_half
                                 ? V::load_halves(hidden)
                                 : V::load_floats(reinterpret_cast<const float *>(hidden));
        const Floats scaled = V::multiply(V::load_floats(from), V::all(job.scale));
        return V::multiply_add(added, V::all(job.slope), scaled);
    }

    static void softmax(const PlainSoftmax &job) {
        Floats largest = V::all(-INFINITY);
        for (int64_t i = 0; i < job.n; i += lanes) largest = V::larger(scores_at(job, i), largest);
        float m = V::largest_lane(largest);
        if (job.sink && !(*job.sink <= m)) m = *job.sink;
        // As in attention_weights.h, exp(score - m) * 2^28 is added up as an integer.
        typename AttentionWeights<V>::Total total;
        Ints together = V::zero_ints();  // of 8 numbers in each lane
        for (int64_t i = 0; i < job.n; i += lanes) {
            const Floats scores = scores_at(job, i);
            const Floats e = exponential<V>(V::subtract(scores, V::all(m)), 28);
            const Floats seen = V::only(V::differ(scores, V::all(-INFINITY)), e);
            together = V::add(together, V::to_ints(seen));
            put(job, i, seen);
            if (i / lanes % 8 == 7) {
                total.add(together);
                together = V::zero_ints();
            }
        }
        total.add(together);
        double sum = total.sum();
        if (job.sink) sum += V::first_lane(exponential<V>(V::all(*job.sink - m), 28));
        const Floats inverse = V::all(sum > 0 ? static_cast<float>(1 / sum) : 0.0f);
        for (int64_t i = 0; i < job.n; i += lanes) {
            const char *outputs = reinterpret_cast<const char *>(job.outputs);
            put(job, i, V::multiply(load_padded<V, CacheType::f32>(outputs, i, job.n), inverse));
        }
    }

    static void put(const PlainSoftmax &job, int64_t i, Floats values) {
        if (i + lanes <= job.n) {
            V::store(job.outputs + i, values);
        } else {
            V::store_first(job.outputs + i, values, static_cast<int>(job.n - i));
        }
    }
};

}  // namespace
