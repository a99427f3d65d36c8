// The rows of tensors as llama.cpp passes them: if it maps the model's file, they are pages of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// A part of this process's memory that is shared with a file, as /proc/self/maps describes it.
struct MappedPart {
    const char *start = nullptr;
    const char *end = nullptr;
    // Where it begins in the file.
    uint64_t offset = 0;
    std::string path;

    bool contains(const char *address) const { return address >= start && address < end; }
};

// Reads and releases the rows of a model's tensors, one tensor at a time. Rows that are not mapped
// from a file are left alone.
class ModelRows {
  public:
    ModelRows() = default;
    ~ModelRows();
    ModelRows(const ModelRows &) = delete;

    // Read the rows of a tensor into memory, which page faults would do in small pieces.
    void read(const char *rows, size_t bytes);
    // Let go of rows that are not needed any more: they leave this process's memory and, if
    // `from_cache`, the system's.
    void release(const char *rows, size_t bytes, bool from_cache);

  private:
    bool find(const char *rows);

    // The part that had the last rows (empty if they were not mapped), and its open file (-1 if it
    // could not be opened).
    MappedPart part_;
    int file_ = -1;
};
