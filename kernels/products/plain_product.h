// Products of tensors as ggml stores them: rows of floats that are not packed.
//
//     outputs[column][row] = sum over inputs i of rows[row][i] * columns[column][i]
//
// llama.cpp multiplies a single column with other code than two or more, which adds up in another
// order. Here each output has one order of additions, whatever is computed with it.
//
// Attention without flash attention sums over the cells of the cache, whose order differs from
// one run to another. As in attention/attention.h, such sums are exact, so that the order does
// not matter.
#pragma once

#include "products/plain_job.h"
#include "vectors/arithmetic.h"
#include "vectors/stored_numbers.h"

namespace {

template <class V>
struct PlainProduct {
    using Floats = typename V::Floats;
    using Doubles = typename V::Doubles;
    static constexpr int lanes = V::lanes;

    static void run(const PlainProductJob &job) {
        switch (job.type) {
            case NumberType::f16: return run<NumberType::f16>(job);
            case NumberType::bf16: return run<NumberType::bf16>(job);
            default: return run<NumberType::f32>(job);
        }
    }

    template <NumberType type>
    static void run(const PlainProductJob &job) {
        job.over_cells ? multiply_over_cells<type>(job) : multiply<type>(job);
    }

    // --- sums over inputs ---

    // A tile of n_rows x n_columns outputs, one in each lane: row r and column c in lane
    // r * n_columns + c. Each output has a vector of partial sums; at the end, a transposition lets
    // the lanes of all of them be added up at once.
    template <NumberType type, int n_rows, int n_columns>
    static Floats tile(const char *const *rows, const float *const *columns, int64_t n) {
        static_assert(n_rows * n_columns == lanes);
        Floats sums[lanes];
#pragma GCC unroll 16
        for (int i = 0; i < lanes; i++) sums[i] = V::zero();
        int64_t i = 0;
        for (; i + lanes <= n; i += lanes) {
            add_products<n_rows, n_columns>(
                sums, [&](int r) { return load_numbers<V, type>(rows[r], i); },
                [&](int c) { return V::load_floats(columns[c] + i); });
        }
        if (i < n) {
            add_products<n_rows, n_columns>(
                sums, [&](int r) { return load_last_numbers<V, type>(rows[r], i, n); },
                [&](int c) {
                    const char *column = reinterpret_cast<const char *>(columns[c]);
                    return load_last_numbers<V, NumberType::f32>(column, i, n);
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

    // Add the products of one vector of inputs. `row(r)` and `column(c)` load it.
    template <int n_rows, int n_columns, class Row, class Column>
    static void add_products(Floats (&sums)[lanes], Row row, Column column) {
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

    // Compute and store a tile. At the edges of the matrices, the last row and column stand in for
    // missing ones.
    template <NumberType type, int n_rows, int n_columns>
    static void multiply_tile(const PlainProductJob &job, int64_t first_row,
                              int64_t first_column) {
        const char *rows[n_rows];
        const float *columns[n_columns];
        for (int r = 0; r < n_rows; r++) {
            const int64_t row = smaller(first_row + r, job.n_rows - 1);
            rows[r] = job.rows + row * job.row_bytes;
        }
        for (int c = 0; c < n_columns; c++) {
            columns[c] = job.columns[smaller(first_column + c, job.n_columns - 1)];
        }
        float results[lanes];
        V::store(results, tile<type, n_rows, n_columns>(rows, columns, job.n_inputs));
        for (int c = 0; c < n_columns && first_column + c < job.n_columns; c++) {
            for (int r = 0; r < n_rows && first_row + r < job.n_rows; r++) {
                job.outputs[first_column + c][first_row + r] = results[r * n_columns + c];
            }
        }
    }

    template <NumberType type>
    static void multiply(const PlainProductJob &job) {
        constexpr int n_rows = 4;
        constexpr int n_columns = lanes / n_rows;
        // A single last column gets tiles of more rows instead.
        const bool single_last = job.n_columns % n_columns == 1;
        const int64_t in_tiles = job.n_columns - single_last;
        for (int64_t r = 0; r < job.n_rows; r += n_rows) {
            for (int64_t c = 0; c < in_tiles; c += n_columns) {
                multiply_tile<type, n_rows, n_columns>(job, r, c);
            }
        }
        if (in_tiles == job.n_columns) return;
        for (int64_t r = 0; r < job.n_rows; r += lanes) {
            multiply_tile<type, lanes, 1>(job, r, in_tiles);
        }
    }

    // --- sums over cells ---

    // Sums that do not depend on the order of their terms: each starts at 1.5 * 2^18 in double
    // precision. So it has no bits below 2^-34, and each term is in effect rounded down to a
    // multiple of that: always to the same one, which would not be so for ties if it were rounded
    // to the nearest. This holds while the sum of all terms is below 2^17. (The columns are
    // weights whose sum is 1, and values of float16 are below 2^16.) Terms of 0 change nothing,
    // however many there are. Rounding each term by itself and then adding it would take three
    // instructions, not one.
    static constexpr double start = 393216;
    static constexpr int cell_rows = V::accumulators < 24 ? 2 : 4;
    static constexpr int cell_columns = 2;
    using CellSums = Doubles[cell_rows][cell_columns];

    // Add the products of one vector of cells. `column(c)` and `row(r)` load it.
    template <class Column, class Row>
    static void add_cells(CellSums &sums, Column column, Row row) {
        Floats weights[cell_columns];
        bool any_weight = false;
#pragma GCC unroll 2
        for (int c = 0; c < cell_columns; c++) {
            weights[c] = column(c);
            any_weight |= V::count_lanes(V::not_equal(weights[c], V::zero())) != 0;
        }
        if (!any_weight) return;
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

    // The sums over all cells. This is a separate function because the compiler moves arithmetic
    // across a change of the rounding mode.
    template <NumberType type>
    [[gnu::noinline]] static void sum_cells(const char *const *rows, const char *const *columns,
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
                [&](int r) { return load_numbers<V, type>(rows[r], i); });
        }
        if (i < n) {
            add_cells(
                sums,
                [&](int c) { return load_last_numbers<V, NumberType::f32>(columns[c], i, n); },
                [&](int r) { return load_last_numbers<V, type>(rows[r], i, n); });
        }
        for (int r = 0; r < cell_rows; r++) {
            for (int c = 0; c < cell_columns; c++) results[r][c] = sums[r][c];
        }
    }

    template <NumberType type>
    static void multiply_over_cells(const PlainProductJob &job) {
        for (int64_t row = 0; row < job.n_rows; row += cell_rows) {
            const char *rows[cell_rows];
            for (int r = 0; r < cell_rows; r++) {
                rows[r] = job.rows + smaller(row + r, job.n_rows - 1) * job.row_bytes;
            }
            for (int64_t column = 0; column < job.n_columns; column += cell_columns) {
                const char *columns[cell_columns];
                for (int c = 0; c < cell_columns; c++) {
                    const int64_t at = smaller(column + c, job.n_columns - 1);
                    columns[c] = reinterpret_cast<const char *>(job.columns[at]);
                }
                CellSums sums;
                {
                    const typename V::RoundingDown rounding;
                    sum_cells<type>(rows, columns, job.n_inputs, sums);
                }
                for (int c = 0; c < cell_columns && column + c < job.n_columns; c++) {
                    for (int r = 0; r < cell_rows && row + r < job.n_rows; r++) {
                        const Doubles sum = V::subtract(sums[r][c], V::all_doubles(start));
                        job.outputs[column + c][row + r] = static_cast<float>(V::sum(sum));
                    }
                }
            }
        }
    }
};

}  // namespace
