// Which tile registers of AMX products use, and for what (see amx_instructions.h).
#pragma once

#include "products/amx_instructions.h"

namespace {

// The registers of products: 4 for sums, 2 for columns, 2 for weights.
constexpr int first_sums = 0;
constexpr int first_columns = 4;
constexpr int first_weights = 6;

// The tile registers of a thread. Other code (llama.cpp's) configures them once and relies on
// that, so its configuration is restored after each operator.
struct TileState {
    TileConfiguration before;
    // What the present configuration is for; 0: it is not ours.
    int n_columns = 0;
    int n_words = 0;

    // Configure them for products of `columns` columns and `words` words of 4 weights at once.
    void use(int columns, int words) {
        if (columns == n_columns && words == n_words) return;
        if (n_columns == 0) before.read();
        n_columns = columns;
        n_words = words;
        TileConfiguration ours;
        for (int i = 0; i < 4; i++) ours.set(first_sums + i, columns, 64);
        for (int i = 0; i < 2; i++) ours.set(first_columns + i, columns, 4 * n_words);
        for (int i = 0; i < 2; i++) ours.set(first_weights + i, n_words, 64);
        ours.load();
    }
    // A thread that has tiles in use costs more to switch, and may keep the clock frequency down.
    void release() {
        if (n_columns != 0) before.load();
        n_columns = 0;
        n_words = 0;
    }
};

}  // namespace
