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

// The keys or values of the cells that come next, which are prefetched.
struct NextCells {
    const char *cells;
    size_t stride;
    // Bytes of 32 dimensions of a cell.
    int64_t part_bytes;
};

}  // namespace
