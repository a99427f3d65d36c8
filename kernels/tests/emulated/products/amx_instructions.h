// The tile instructions of AMX for CPUs without it, with the registers in memory: see
// vectors/avx512_vnni.h in this folder. kernels/products/amx_instructions.h is the original, and
// explains what each one does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct EmulatedTile {
    int n_rows = 0;
    int row_bytes = 0;
    uint8_t rows[16][64];
};
EmulatedTile emulated_tiles[8];

struct TileConfiguration {
    EmulatedTile tiles[8];

    void set(int tile, int n_rows, int bytes) {
        tiles[tile].n_rows = n_rows;
        tiles[tile].row_bytes = bytes;
    }
    void read() { std::memcpy(tiles, emulated_tiles, sizeof(tiles)); }
    // Afterwards, the contents of the registers are undefined.
    void load() const {
        for (int i = 0; i < 8; i++) {
            emulated_tiles[i].n_rows = tiles[i].n_rows;
            emulated_tiles[i].row_bytes = tiles[i].row_bytes;
            std::memset(emulated_tiles[i].rows, 0x5a, sizeof(EmulatedTile::rows));
        }
    }
};

// As on a CPU, the rest of the register becomes zero.
template <int tile> void zero_tile() {
    std::memset(emulated_tiles[tile].rows, 0, sizeof(EmulatedTile::rows));
}
template <int tile> void load_tile(const void *p, size_t stride) {
    zero_tile<tile>();
    EmulatedTile &t = emulated_tiles[tile];
    for (int m = 0; m < t.n_rows; m++) {
        std::memcpy(t.rows[m], static_cast<const uint8_t *>(p) + m * stride, t.row_bytes);
    }
}
template <int tile> void store_tile(void *p, size_t stride) {
    const EmulatedTile &t = emulated_tiles[tile];
    for (int m = 0; m < t.n_rows; m++) {
        std::memcpy(static_cast<uint8_t *>(p) + m * stride, t.rows[m], t.row_bytes);
    }
}
template <int c, int a, int b, bool signed_b = false> void multiply_tiles() {
    EmulatedTile &sums = emulated_tiles[c];
    const EmulatedTile &columns = emulated_tiles[a];
    const EmulatedTile &weights = emulated_tiles[b];
    if (columns.n_rows != sums.n_rows || columns.row_bytes != 4 * weights.n_rows ||
        weights.row_bytes != sums.row_bytes) {
        std::puts("tiles of these shapes cannot be multiplied: a CPU would raise a fault");
        std::exit(1);
    }
    for (int m = 0; m < sums.n_rows; m++) {
        for (int n = 0; n < sums.row_bytes / 4; n++) {
            int32_t sum;
            std::memcpy(&sum, &sums.rows[m][4 * n], 4);
            for (int k = 0; k < columns.row_bytes; k++) {
                const uint8_t byte = weights.rows[k / 4][4 * n + k % 4];
                const int weight = signed_b ? static_cast<int8_t>(byte) : byte;
                sum += static_cast<int8_t>(columns.rows[m][k]) * weight;
            }
            std::memcpy(&sums.rows[m][4 * n], &sum, 4);
        }
    }
}

}  // namespace
