// What the code for one instruction set offers to the rest of the library.
//
// Each of avx2.cpp, avx_vnni.cpp, avx512.cpp, avx512_vnni.cpp, amx_int8.cpp and neon_dotprod.cpp is
// compiled with the compiler flags of its instruction set, and defines a constant table for it
// (avx512_vnni.cpp also one for AMD's CPUs). Nothing else is shared between these files, so that no
// function compiled for a newer CPU can be called on an older one: they use no containers or
// algorithms of the standard library, and all their templates have the vector type of the
// instruction set as a parameter. (amx_int8.cpp calls functions of the table of avx512_vnni.cpp;
// code that both contain is compiled for the same instructions.)
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/job.h"
#include "products/plain_job.h"
#include "products/weight_type.h"

struct InstructionSet {
    const char *name;

    // --- products of packed weights, see products/product_table.h ---

    // Rows of a weight matrix that are packed side by side: one for each 32-bit lane of a vector.
    int rows_per_group;
    // The most columns (tokens) that one call of `multiply` takes, if there are n_columns in all.
    // These are cut into calls of nearly equal size.
    int (*max_columns)(WeightType type, int64_t n_columns);

    // Bytes of one packed group of `rows_per_group` rows of `n_inputs` weights.
    size_t (*group_bytes)(WeightType type, int64_t n_inputs);
    // Pack `n_rows` <= rows_per_group rows, `row_bytes` apart, into one group. Missing rows are 0.
    void (*pack)(WeightType type, const void *rows, size_t row_bytes, int n_rows, int64_t n_inputs,
                 void *group);

    // Bytes of one column of activations, prepared for weights of this type.
    size_t (*column_bytes)(WeightType type, int64_t n_inputs);
    // How many inputs are prepared together: `n_inputs` of `prepare` is a multiple of it.
    int (*inputs_per_block)(WeightType type);
    // Prepare n_inputs values of one column, which is number `column` of the `n_columns` of a tile.
    void (*prepare)(WeightType type, const float *values, int64_t n_inputs, void *tile,
                    int n_columns, int column);

    // outputs[column][row] for one group of rows and one tile of n_columns <= max_columns columns.
    // Columns are `output_stride` floats apart. Only `n_rows` rows are written.
    void (*multiply)(WeightType type, const void *group, const void *tile, int64_t n_inputs,
                     int n_columns, int n_rows, float *outputs, size_t output_stride);
    // Each thread calls this when it has finished the products of an operator: from then on, its
    // registers are ggml's again.
    void (*finish)();

    // --- attention, see attention/attention.h ---

    // Bytes of scratch memory for one attention operator, shared by up to `n_threads` threads.
    size_t (*attention_bytes)(const AttentionJob &job, int n_threads);
    // Compute the part of thread `thread` of `n_threads`. All threads call this with the same
    // arguments; `barrier` returns once every thread has called it.
    void (*attention)(const AttentionJob &job, int thread, int n_threads, void *scratch,
                      void (*barrier)(void *), void *barrier_argument);

    // --- tensors that are not packed, see products/plain_product.h and attention/softmax.h ---

    void (*multiply_plain)(const PlainProductJob &job);
    void (*softmax)(const SoftmaxJob &job);

    // --- logits, see logits/likeliest_tokens.h ---

    // Find the `n_best` likeliest of n tokens by a row of logits. Among equal ones the lowest
    // token comes first; where none is left, the token is -1. Returns the sum of e^(logit -
    // largest), with a relative error of at most 1e-5; NaN if a logit is NaN. The row is changed
    // and restored.
    double (*likeliest_tokens)(float *row, int64_t n, int n_best, int32_t *tokens, float *scores);
};

extern const InstructionSet avx2_set;
extern const InstructionSet avx_vnni_set;
extern const InstructionSet avx512_set;
extern const InstructionSet avx512_vnni_set;
extern const InstructionSet avx512_vnni_amd_set;
extern const InstructionSet amx_int8_set;
extern const InstructionSet neon_dotprod_set;
