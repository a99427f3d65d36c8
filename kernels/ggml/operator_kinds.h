// The kinds of operators that the library computes: what computes each of them, and what they
// share.
#pragma once

#include <algorithm>
#include <atomic>

#include "ggml/ggml_internals.h"

// Products of packed weights (GGML_OP_MUL_MAT): with one matrix, and with a stack of matrices.
ggml::cpu::tensor_traits *packed_product();
ggml::cpu::tensor_traits *stack_product();

// Products with a packed matrix for each expert (GGML_OP_MUL_MAT_ID).
ggml::cpu::tensor_traits *expert_product();

// Attention (GGML_OP_FLASH_ATTN_EXT); null if it is of a kind that the kernels do not support.
ggml::cpu::tensor_traits *flash_attention(const ggml_tensor *op);

// A GGML_OP_MUL_MAT whose weights are not packed, or a GGML_OP_SOFT_MAX, computed such that a row
// has the same bits in any batch. Null if llama.cpp's own code does that, or if we cannot.
ggml::cpu::tensor_traits *plain_operator(const ggml_tensor *op);

// How many operators were computed so far.
extern std::atomic<uint64_t> n_products;
extern std::atomic<uint64_t> n_attentions;

// A chunk of groups of rows stays in the second-level cache while several tiles of columns are
// multiplied with it.
constexpr size_t chunk_bytes = 256 << 10;

// How many groups of rows a thread takes at a time: a chunk that fits into the cache, and few
// enough that all threads finish at about the same time.
inline int64_t groups_of_chunk(int64_t n_groups, size_t group_bytes, int n_threads) {
    const int64_t fair = n_groups / (n_threads * 4) + 1;
    const int64_t fitting = std::max<int64_t>(1, chunk_bytes / group_bytes);
    return std::min(fair, fitting);
}

// Let the threads take turns: each one takes chunks of 0 ... n_chunks - 1 until none is left.
// Before that, one thread must call `start_turns`, and all threads must meet at a barrier.
inline void start_turns(const ggml_compute_params *params) {
    ggml_api.chunk_set(params->threadpool, params->nth);
}
template <class Work>
void take_turns(const ggml_compute_params *params, int64_t n_chunks, Work work) {
    int64_t chunk = params->ith;
    while (chunk < n_chunks) {
        work(chunk);
        chunk = ggml_api.chunk_add(params->threadpool, 1);
    }
}
