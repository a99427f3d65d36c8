// Checks that packed/tensor_writer.h reports an error of the disk, which the system reports once.
//
//   cd kernels
//   g++ -std=c++17 -I. tests/writer_test.cpp packed/tensor_writer.cpp packed/packed_format.cpp
//       -o writer_test
//   ./writer_test FILE
#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "packed/tensor_writer.h"

namespace {

// What waiting for the disk fails with; 0: it does not.
int disk_problem = 0;

}  // namespace

// In place of the C library's.
extern "C" int sync_file_range(int, off64_t, off64_t, unsigned flags) {
    const bool waits = (flags & SYNC_FILE_RANGE_WAIT_AFTER) != 0;
    if (!waits || disk_problem == 0) return 0;
    errno = disk_problem;
    disk_problem = 0;
    return -1;
}

namespace {

// Write some tensors; the disk fails to write one of them. Returns the first problem.
int write_tensors(int file, int n_tensors, int failing) {
    constexpr size_t bytes = 4096;
    TensorWriter writer(file);
    for (int i = 0; i < n_tensors; i++) {
        std::memset(writer.memory(bytes), i, bytes);
        const int problem = writer.write(bytes, i * bytes);
        if (problem != 0) return problem;
        if (i == failing) disk_problem = EIO;
    }
    return writer.finish();
}

}  // namespace

int main(int n_arguments, char **arguments) {
    if (n_arguments != 2) return 2;
    const int file = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const bool finds_first = write_tensors(file, 3, 0) == EIO;
    const bool finds_last = write_tensors(file, 3, 2) == EIO;
    const bool is_fine = write_tensors(file, 3, -1) == 0;
    std::printf("%s\n", finds_first && finds_last && is_fine ? "ok" : "FAIL");
    return finds_first && finds_last && is_fine ? 0 : 1;
}
