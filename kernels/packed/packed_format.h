// The format of packed files:
//
//     Header | padding | the packed buffer | StoredEntry of each tensor
//
// The header is written last, so that an unfinished file has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

// A tensor in the packed buffer.
struct PackedEntry {
    // Where its packed form is, from the beginning of the buffer.
    uint64_t offset;
    uint64_t bytes;
    // Checks of the rows that it was packed from, and of the packed form.
    uint64_t rows_check;
    uint64_t packed_check;
};
// By the name of the tensor.
using PackedEntries = std::unordered_map<std::string, PackedEntry>;

// Where the buffer begins: a multiple of the size of pages on any system, so that it can be mapped.
constexpr size_t packed_data_start = 64 << 10;

// The contents of a packed file, apart from the buffer itself.
struct PackedContents {
    uint64_t data_bytes = 0;
    PackedEntries entries;
};

// Read the contents of an open file. Returns false if it is not a complete packed file.
bool read_contents(int file, PackedContents &contents);

// Complete an open file in which the buffer has been written. Returns 0 or errno.
int write_contents(int file, const PackedContents &contents);

// Write bytes at a place of an open file. Returns 0 or errno.
int write_at(int file, const void *data, size_t bytes, uint64_t offset);

// A check of the first and the last page. Damage and other contents are detected without reading
// everything.
uint64_t check_of(const char *data, size_t bytes);
