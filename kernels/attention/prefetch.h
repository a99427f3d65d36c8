// Asking for memory before it is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

// What the processor fetches at once.
constexpr int64_t cache_line_bytes = 64;

inline void prefetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += cache_line_bytes) __builtin_prefetch(from + i);
}
inline void prefetch_to_write(const void *to, int64_t bytes) {
    const char *from = static_cast<const char *>(to);
    for (int64_t i = 0; i < bytes; i += cache_line_bytes) __builtin_prefetch(from + i, 1);
}

// Asks for the lines of some cells one at a time, between other work.
//
// The cells of one head are far apart in the cache, so that the processor does not foresee them,
// and if many are asked for at once it waits. (One row over 14 thousand cells takes 0.9 of the
// time.)
class CellPrefetcher {
    // The next cell, and the line in it that comes next.
    const char *cell;
    size_t stride;
    // Bytes of a cell.
    int64_t bytes;
    int64_t n_cells;
    int64_t offset = 0;

  public:
    CellPrefetcher(const char *cell, size_t stride, int64_t bytes, int64_t n_cells)
        : cell(cell), stride(stride), bytes(bytes), n_cells(n_cells) {}

    void prefetch_line() {
        if (n_cells <= 0) return;
        __builtin_prefetch(cell + offset);
        offset += cache_line_bytes;
        if (offset < bytes) return;
        offset = 0;
        cell += stride;
        n_cells--;
    }
};

}  // namespace
