// A file that keeps the packed weights of a model, so that the next process maps it instead of
// packing.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ggml/ggml_internals.h"
#include "packed/model_rows.h"
#include "packed/packed_format.h"
#include "packed/tensor_writer.h"
#include "packed/weight_stream.h"

// While a thread loads a model with a PackedFile, the memory of the model's packed buffer is
//
// - the file, mapped, if it exists: tensors that are in the file are left as they are;
// - otherwise, if the buffer may not be in memory as a whole, a new file, mapped: each tensor is
//   packed and written to it;
// - otherwise memory of the process, which is remembered, so that it can be written to a file.
class PackedFile {
  public:
    // Use the file at `path`, if it is complete.
    explicit PackedFile(const char *path);
    ~PackedFile();
    PackedFile(const PackedFile &) = delete;

    // Let a buffer of more bytes than this be streamed. Unless the file exists, such a buffer is
    // packed into the empty file at `new_path`.
    void limit(size_t max_bytes, const char *new_path);

    // Map the file as the memory of a packed buffer of `size` bytes, which unmaps it. Null if the
    // file is not for this buffer. If there is a `problem` then, the buffer must not be loaded.
    void *take_memory(size_t size);
    // Remember the memory that a buffer got instead.
    void remember(void *memory, size_t size);
    // Bring the packed form of a tensor into its memory. `rows` is as in the model's file.
    void load(ggml_tensor *tensor, const char *rows);
    // All tensors were loaded: complete the new file, and begin to stream. Returns 0 or errno. Even
    // if the file cannot be completed, this process can use it.
    int finish();

    // Whether the file exists and is complete.
    bool is_whole() const { return is_whole_; }
    // Whether the rows that are needed are read here, so that llama.cpp need not read them all.
    bool reads_rows() const { return file_ >= 0; }
    // Whether all weights came from the file, and none were packed.
    bool was_used() const { return is_whole_ && memory_ != nullptr && n_packed_ == 0; }
    // Why a buffer that must be streamed cannot be: EBADMSG if the file has other weights, or the
    // error of writing the new one; 0 if it can.
    int problem() const { return problem_; }
    // How many bytes each pass over the model reads from the disk.
    size_t streamed_bytes() const { return stream_ ? stream_->streamed_bytes() : 0; }

    // How many bytes were packed that a file could keep; 0 if none.
    size_t bytes() const;
    // Write the remembered buffer, which must still exist, to a new file. Returns 0 or errno.
    int write(const char *path) const;

  private:
    bool must_stream() const { return max_bytes_ > 0 && size_ > max_bytes_; }
    // Whether the buffer is mapped from the file.
    bool is_mapped() const { return memory_ != nullptr && file_ >= 0; }
    void forget_file();
    int extend_file(size_t size) const;
    void read_ahead();
    bool has(const ggml_tensor *tensor, const char *rows, size_t packed_bytes) const;
    void note_packed(const ggml_tensor *tensor, const char *rows, const char *packed,
                     size_t packed_bytes);
    int pack_into_file(const ggml_tensor *tensor, const char *rows, size_t packed_bytes);

    // The file, or the new one, open; -1 if there is none.
    int file_ = -1;
    bool is_whole_ = false;
    PackedEntries entries_;
    // How much of a buffer may be in memory; 0: all of it.
    size_t max_bytes_ = 0;
    int problem_ = 0;

    // The packed buffer, once it has memory.
    char *memory_ = nullptr;
    // Its size, or that of the one in the file.
    size_t size_ = 0;
    // How many packed buffers the model has. (A file keeps only one.)
    int n_buffers_ = 0;
    int n_packed_ = 0;
    ModelRows rows_;
    // Writes the new file.
    std::unique_ptr<TensorWriter> writer_;

    // The thread that maps pages ahead, and whether it should end.
    std::thread reader_;
    std::atomic<bool> is_ending_{false};
    // The tensors that were loaded into the mapped file, and what streams them.
    std::vector<WeightStream::Tensor> tensors_;
    std::unique_ptr<WeightStream> stream_;
};

// What the calling thread loads models with, or null.
extern thread_local PackedFile *packed_file;
