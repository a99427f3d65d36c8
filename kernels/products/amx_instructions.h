// The instructions of AMX (Intel's Advanced Matrix Extensions) on tile registers.
//
// A thread has 8 registers of 16 rows of 64 bytes. One instruction multiplies two of them: for each
// row m of A, a column of activations, and each lane n of B, a row of the weight matrix,
//
//     C[m][n] += sum over k of A[m][k] * B[k / 4][n][k % 4]        k = 0 ... 63
//
// where A and B are bytes and C holds 32-bit integers. B is the packed form of weights: a word of 4
// codes in each lane. The instruction takes as many cycles as A has rows (at least 8), however many
// rows B has; storing C takes 15, however many rows it has.
//
// The instructions are written as assembly because GCC 12's intrinsics are not safe: they do not
// tell the compiler that they read the configuration or a tile's memory, so it may remove the
// stores to it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

// How many rows of how many bytes each register has. Without it, its instructions fail.
struct TileConfiguration {
    // 1: there is a configuration.
    uint8_t palette = 0;
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

}  // namespace
