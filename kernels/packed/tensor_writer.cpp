#include "packed/tensor_writer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "packed/packed_format.h"

TensorWriter::~TensorWriter() {
    if (memory_ != nullptr) munmap(memory_, memory_bytes_);
}

char *TensorWriter::memory(size_t bytes) {
    if (bytes <= memory_bytes_) return memory_;
    if (memory_ != nullptr) munmap(memory_, memory_bytes_);
    memory_ = nullptr;
    memory_bytes_ = 0;
    void *memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    memory_ = static_cast<char *>(memory);
    memory_bytes_ = bytes;
    return memory_;
}

int TensorWriter::write(size_t bytes, uint64_t offset) {
    const int problem = write_at(file_, memory_, bytes, offset);
    if (problem != 0) return problem;
    // The disk writes this tensor while the next one is packed.
    const int problem_before = wait_for_disk();
    if (problem_before != 0) return problem_before;
    written_from_ = offset;
    written_bytes_ = bytes;
    sync_file_range(file_, written_from_, written_bytes_, SYNC_FILE_RANGE_WRITE);
    return 0;
}

// Wait until the disk has what it is writing, and let the system forget that. Returns 0 or errno.
// (The system reports an error of the disk only once: here, and not again in `finish`.)
int TensorWriter::wait_for_disk() {
    if (written_bytes_ == 0) return 0;
    const int result = sync_file_range(file_, written_from_, written_bytes_,
                                       SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                           SYNC_FILE_RANGE_WAIT_AFTER);
    // Some sandboxes lack the call; there, `finish` waits for everything.
    const int problem = result == 0 || errno == ENOSYS ? 0 : errno;
    posix_fadvise(file_, written_from_, written_bytes_, POSIX_FADV_DONTNEED);
    written_bytes_ = 0;
    return problem;
}

int TensorWriter::finish() {
    const int problem = wait_for_disk();
    if (problem != 0) return problem;
    return fdatasync(file_) == 0 ? 0 : errno;
}
