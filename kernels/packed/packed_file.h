// A file that keeps the packed weights of a model, so that the next process maps it instead of packing.
//
// While a thread loads a model with a PackedFile, the model's one packed buffer is the file's contents, mapped, and
// tensors that the file has are left as they are; or, if there is no such file, the buffer is remembered, so that
// it can be written to one.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <unordered_map>

#include "ggml/ggml_internals.h"

class PackedFile {
  public:
    // Map the file at `path`, if it is whole.
    explicit PackedFile(const char *path);
    ~PackedFile();
    PackedFile(const PackedFile &) = delete;

    // Memory of `size` bytes for a packed buffer: the mapped file, or null if it has no such buffer. The buffer
    // unmaps it.
    void *take_memory(size_t size);
    // The rows of the model's file were used: if they are mapped, they leave this process's memory.
    void drop(const char *rows, size_t bytes);
    // Memory that a buffer got instead.
    void remember(void *memory, size_t size);

    // Whether the weights are there already, so that most of the model's own file need not be read.
    bool is_whole() const { return file_ >= 0; }

    // Whether the tensor is in the mapped memory as it would be packed from `rows`.
    bool has(const ggml_tensor *tensor, const char *rows, size_t packed_bytes);
    // A tensor was packed into its memory.
    void packed(const ggml_tensor *tensor, const char *rows, size_t packed_bytes);

    // Whether all weights came from the file, and none were packed.
    bool was_used() const { return memory_ != nullptr && is_mapped_ && n_packed_ == 0; }
    // Bytes to write; 0 if there is nothing that a file can keep.
    size_t bytes() const;
    // Write the remembered buffer, which must be alive, to a new file. Returns 0 or errno.
    int write(const char *path) const;

  private:
    void read_ahead(char *memory, size_t size);

    struct Entry {
        uint64_t offset, bytes, rows_check, packed_check;
    };
    std::unordered_map<std::string, Entry> entries_;
    int file_ = -1;
    char *memory_ = nullptr;
    size_t size_ = 0, data_start_ = 0;
    const char *source_start_ = nullptr, *source_end_ = nullptr;
    int n_buffers_ = 0, n_packed_ = 0;
    bool is_mapped_ = false;
    std::atomic<bool> is_ending_{false};
    std::thread reader_;
};

// What the calling thread loads with, or null.
extern thread_local PackedFile *packed_file;
