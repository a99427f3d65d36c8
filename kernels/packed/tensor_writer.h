// Writing a packed file tensor by tensor, so that memory never holds more than two of them.
#pragma once

#include <cstddef>
#include <cstdint>

class TensorWriter {
  public:
    // Write to an open file.
    explicit TensorWriter(int file) : file_(file) {}
    ~TensorWriter();
    TensorWriter(const TensorWriter &) = delete;

    // Memory for a packed tensor; null if there is none. It is the same for all tensors.
    char *memory(size_t bytes);
    // Write the tensor that is in that memory to a place of the file. Returns 0 or errno.
    int write(size_t bytes, uint64_t offset);
    // Wait until the disk has written everything. Returns 0 or errno.
    int finish();

  private:
    int wait_for_disk();

    int file_;
    char *memory_ = nullptr;
    size_t memory_bytes_ = 0;
    // What the disk is writing.
    uint64_t written_from_ = 0;
    size_t written_bytes_ = 0;
};
