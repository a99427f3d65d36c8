// Pages of this process's memory.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

inline size_t page_bytes() {
    static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return size;
}

struct Pages {
    char *start;
    size_t bytes;

    // The pages that contain some of these bytes.
    static Pages around(const char *data, size_t n_bytes) {
        const auto first = reinterpret_cast<uintptr_t>(data);
        return between(first / page_bytes(), (first + n_bytes + page_bytes() - 1) / page_bytes());
    }
    // The pages that contain nothing but these bytes; none if there is no such page.
    static Pages within(const char *data, size_t n_bytes) {
        const auto first = reinterpret_cast<uintptr_t>(data);
        return between((first + page_bytes() - 1) / page_bytes(), (first + n_bytes) / page_bytes());
    }

  private:
    static Pages between(uintptr_t first_page, uintptr_t end_page) {
        const size_t n_pages = end_page > first_page ? end_page - first_page : 0;
        return {reinterpret_cast<char *>(first_page * page_bytes()), n_pages * page_bytes()};
    }
};

// Read pages of a mapped file and map them, at once instead of by page faults. Returns false if the
// system cannot do that.
inline bool populate(const Pages &pages) {
    constexpr int populate_read = 22;  // MADV_POPULATE_READ, since Linux 5.14
    return madvise(pages.start, pages.bytes, populate_read) == 0;
}
