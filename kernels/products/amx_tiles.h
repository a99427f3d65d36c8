// The tile registers of AMX (Intel's Advanced Matrix Extensions), and the instructions on them.
//
// A thread has 8 registers of 16 rows of 64 bytes. One instruction multiplies two of them: for
// each row m of A, a column of activations, and each lane n of B, a row of the weight matrix,
//
//     C[m][n] += sum over k of A[m][k] * B[k / 4][n][k % 4]        k = 0 ... 63
//
// where A and B are bytes and C holds 32-bit integers. B is the packed form of weights: a word of
// 4 codes in each lane. The instruction takes as many cycles as A has rows (8 at least), however
// many rows B has; storing C takes 15, however many rows it has.
//
// The instructions are written out, as GCC 12's intrinsics are not safe: it may remove the stores
// that fill a configuration or a tile's memory, of which they do not say that they read it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

// How many rows of how many bytes each register has. Its instructions fail where there is none.
struct TileConfiguration {
    uint8_t palette = 0;  // 1: there is a configuration
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int n_rows, int bytes) {
        palette = 1;
        rows[tile] = static_cast<uint8_t>(n_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
    void read() { asm volatile("sttilecfg %0" : "=m"(*this)); }
    void load() const {
        if (palette) {
            asm volatile("ldtilecfg %0" ::"m"(*this));
        } else {
            asm volatile("tilerelease");
        }
    }
};
static_assert(sizeof(TileConfiguration) == 64, "as the processor reads it");

template <int tile> void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
// Rows are `stride` bytes apart.
template <int tile> void load_tile(const void *p, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
template <int tile> void store_tile(void *p, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
// c += a * b, where the bytes of a are signed, and those of b if `signed_b`.
template <int c, int a, int b, bool signed_b = false> void multiply_tiles() {
    if constexpr (signed_b) {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
    } else {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
    }
}

// The registers of products: 4 for sums, 2 for columns, 2 for weights.
constexpr int first_sums = 0, first_columns = 4, first_weights = 6;

// The configuration of this thread, which other code (llama.cpp's) sets once and relies on.
struct ThreadTiles {
    TileConfiguration before;
    int n_columns = 0, words = 0;  // 0: the configuration is not ours

    // For products of `columns` columns and `n_words` words of 4 weights at once.
    void use(int columns, int n_words) {
        if (columns == n_columns && n_words == words) return;
        if (n_columns == 0) before.read();
        n_columns = columns;
        words = n_words;
        TileConfiguration ours;
        for (int i = 0; i < 4; i++) ours.set(first_sums + i, columns, 64);
        for (int i = 0; i < 2; i++) ours.set(first_columns + i, columns, 4 * words);
        for (int i = 0; i < 2; i++) ours.set(first_weights + i, words, 64);
        ours.load();
    }
    // A thread that has tiles in use costs more to switch, and may hold the clock down.
    void release() {
        if (n_columns != 0) before.load();
        n_columns = words = 0;
    }
};

}  // namespace
