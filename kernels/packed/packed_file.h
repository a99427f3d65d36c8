// A file that keeps the packed weights of a model, so that the next process maps it instead of
// packing.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <unordered_map>

#include "ggml/ggml_internals.h"

// While a thread loads a model with a PackedFile, the memory of the model's packed buffer is the
// contents of the file, mapped, and tensors that are in the file are left as they are. If there
// is no such file, the buffer is remembered, so that it can be written to one.
class PackedFile {
  public:
    // Map the file at `path`, if it is complete.
    explicit PackedFile(const char *path);
    ~PackedFile();
    PackedFile(const PackedFile &) = delete;

    // --- a buffer ---

    // Return `size` bytes of memory for a packed buffer: the mapped file; null if it has no such
    // buffer. The buffer unmaps it.
    void *take_memory(size_t size);
    // Remember the memory that a buffer got instead.
    void remember(void *memory, size_t size);

    // --- its tensors ---

    // Whether the tensor is in the mapped memory as it would be packed from `rows`.
    bool has(const ggml_tensor *tensor, const char *rows, size_t packed_bytes);
    // Note that a tensor was packed into its memory.
    void note_packed(const ggml_tensor *tensor, const char *rows, size_t packed_bytes);
    // Let go of rows of the model's file that are not needed any more: if they are mapped, they
    // leave this process's memory.
    void release_rows(const char *rows, size_t bytes);

    // --- afterwards ---

    // Whether the file exists and is complete, so that most of the model's own file need not be
    // read.
    bool is_whole() const { return file_ >= 0; }
    // Whether all weights came from the file, and none were packed.
    bool was_used() const { return memory_ != nullptr && is_mapped_ && n_packed_ == 0; }
    // How many bytes there are to write; 0 if there is nothing that a file could keep.
    size_t bytes() const;
    // Write the remembered buffer, which must still exist, to a new file. Returns 0 or errno.
    int write(const char *path) const;

  private:
    void read_ahead(char *memory, size_t size);
    void find_source(const char *rows);

    // A tensor in the packed buffer.
    struct Entry {
        // Where its packed form is, from the beginning of the buffer.
        uint64_t offset;
        uint64_t bytes;
        // Checks of the rows that it was packed from, and of the packed form.
        uint64_t rows_check;
        uint64_t packed_check;
    };
    // By the name of the tensor.
    std::unordered_map<std::string, Entry> entries_;

    // The file, open; -1 if there is none.
    int file_ = -1;
    // Where the packed buffer begins in it.
    size_t data_start_ = 0;
    // The packed buffer: mapped from the file, or remembered.
    char *memory_ = nullptr;
    size_t size_ = 0;
    bool is_mapped_ = false;
    // How many packed buffers the model has. (A file keeps only one.)
    int n_buffers_ = 0;
    int n_packed_ = 0;

    // The part of this process's memory that is mapped from the model's own file. Empty: the rows
    // that were asked about last are not mapped from a file.
    const char *source_start_ = nullptr;
    const char *source_end_ = nullptr;

    // The thread that maps pages ahead, and whether it should end.
    std::thread reader_;
    std::atomic<bool> is_ending_{false};
};

// What the calling thread loads models with, or null.
extern thread_local PackedFile *packed_file;
