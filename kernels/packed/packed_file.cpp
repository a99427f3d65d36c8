// A packed file is
//
//     Header | StoredEntry of each tensor | padding to a whole page | the packed buffer
#include "packed/packed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>

#include "packed/allowance.h"

thread_local PackedFile *packed_file = nullptr;

namespace {

constexpr char magic[8] = {'s', 'p', 'e', 'c', 'p', 'a', 'c', '1'};
constexpr size_t page = 4096;

struct Header {
    char magic[8];
    uint64_t n_entries;
    // Where the packed buffer begins, and how long it is.
    uint64_t data_start;
    uint64_t data_bytes;
};
// A name, and the numbers of PackedFile::Entry.
struct StoredEntry {
    char name[64];
    uint64_t offset;
    uint64_t bytes;
    uint64_t rows_check;
    uint64_t packed_check;
};

// FNV-1a of the first and the last page. Damage and other contents are detected without reading
// everything.
uint64_t check_of(const char *data, size_t bytes) {
    uint64_t hash = 0xcbf29ce484222325;
    const auto add = [&](const char *from, size_t n) {
        for (size_t i = 0; i < n; i++) {
            hash = (hash ^ static_cast<unsigned char>(from[i])) * 0x100000001b3;
        }
    };
    add(data, std::min(bytes, page));
    if (bytes > page) add(data + bytes - page, page);
    return hash;
}

std::string name_of(const ggml_tensor *tensor) {
    return {tensor->name, strnlen(tensor->name, sizeof tensor->name)};
}

// Read the header. Returns false if it is not one, or if the file is not as long as it says.
bool read_header(int file, Header &header) {
    struct stat about;
    return fstat(file, &about) == 0 && pread(file, &header, sizeof header, 0) == sizeof header &&
           std::memcmp(header.magic, magic, sizeof magic) == 0 && header.data_start % page == 0 &&
           header.n_entries < 1 << 20 &&
           header.data_start + header.data_bytes == static_cast<uint64_t>(about.st_size);
}

bool read_entries(int file, const Header &header, std::vector<StoredEntry> &stored) {
    stored.resize(header.n_entries);
    const auto bytes = static_cast<ssize_t>(stored.size() * sizeof(StoredEntry));
    return pread(file, stored.data(), bytes, sizeof header) == bytes;
}

bool write_all(int file, const char *data, size_t bytes) {
    while (bytes > 0) {
        const ssize_t n = ::write(file, data, std::min<size_t>(bytes, 64 << 20));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        data += n;
        bytes -= n;
    }
    return true;
}

// A part of this process's memory, as /proc/self/maps describes it.
struct MappedPart {
    unsigned long start = 0;
    unsigned long end = 0;
    // Whether it is shared with a file.
    bool is_file = false;

    // Read a line of the list. Returns false if it is not as expected.
    bool read(const std::string &line) {
        unsigned long inode;
        char permissions[5];
        if (std::sscanf(line.c_str(), "%lx-%lx %4s %*x %*s %lu", &start, &end, permissions,
                        &inode) != 4) {
            return false;
        }
        is_file = inode != 0 && permissions[3] == 's';
        return true;
    }
    bool contains(const char *address) const {
        return reinterpret_cast<unsigned long>(address) >= start &&
               reinterpret_cast<unsigned long>(address) < end;
    }
};

}  // namespace

PackedFile::PackedFile(const char *path) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    Header header;
    std::vector<StoredEntry> stored;
    if (!read_header(file, header) || !read_entries(file, header, stored)) {
        close(file);
        return;
    }
    for (StoredEntry &each : stored) {
        each.name[sizeof each.name - 1] = 0;
        entries_[each.name] = {each.offset, each.bytes, each.rows_check, each.packed_check};
    }
    file_ = file;
    data_start_ = header.data_start;
    size_ = header.data_bytes;
}

PackedFile::~PackedFile() {
    is_ending_ = true;
    if (reader_.joinable()) reader_.join();
    if (file_ >= 0) close(file_);
}

void *PackedFile::take_memory(size_t size) {
    if (n_buffers_ > 0 || file_ < 0 || size != size_) return nullptr;
    // A private mapping: tensors that differ after all are packed into pages of our own.
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file_,
                        static_cast<off_t>(data_start_));
    if (memory == MAP_FAILED) return nullptr;
    n_buffers_++;
    memory_ = static_cast<char *>(memory);
    is_mapped_ = true;
    read_ahead(memory_, size);
    return memory;
}

// Map the pages in a thread while the vocabulary is read and contexts are made. Otherwise the first
// batch waits for a page fault every 64 KB, which takes 0.2 s for 4 GB. It is done piece by piece,
// because meanwhile the process cannot map anything else.
void PackedFile::read_ahead(char *memory, size_t size) {
#ifdef __linux__
    double usable_bytes = static_cast<double>(allowance.memory_bytes);
    if (usable_bytes == 0) {
        usable_bytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    }
    if (static_cast<double>(size) > 0.75 * usable_bytes) return;
    constexpr int populate_read = 22;  // MADV_POPULATE_READ, since Linux 5.14
    static constexpr size_t piece = 8 << 20;
    reader_ = std::thread([this, memory, size] {
        for (size_t start = 0; start < size && !is_ending_; start += piece) {
            if (madvise(memory + start, std::min(piece, size - start), populate_read) != 0) return;
        }
    });
#endif
}

void PackedFile::remember(void *memory, size_t size) {
    if (size == 0) return;
    n_buffers_++;
    if (is_mapped_) return;
    memory_ = static_cast<char *>(memory);
    size_ = size;
    entries_.clear();
}

bool PackedFile::has(const ggml_tensor *tensor, const char *rows, size_t packed_bytes) {
    if (!is_mapped_) return false;
    const auto found = entries_.find(name_of(tensor));
    const auto *data = static_cast<const char *>(tensor->data);
    return found != entries_.end() && found->second.bytes == packed_bytes &&
           memory_ + found->second.offset == data &&
           found->second.rows_check == check_of(rows, ggml_api.nbytes(tensor)) &&
           found->second.packed_check == check_of(data, packed_bytes);
}

void PackedFile::note_packed(const ggml_tensor *tensor, const char *rows, size_t packed_bytes) {
    n_packed_++;
    if (is_mapped_ || n_buffers_ != 1) return;
    const auto *data = static_cast<const char *>(tensor->data);
    entries_[name_of(tensor)] = {static_cast<uint64_t>(data - memory_), packed_bytes,
                                 check_of(rows, ggml_api.nbytes(tensor)),
                                 check_of(data, packed_bytes)};
}

// Find the part of this process's memory that contains the rows, if it is mapped from a file.
void PackedFile::find_source(const char *rows) {
    source_start_ = source_end_ = rows;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        MappedPart part;
        if (part.read(line) && part.is_file && part.contains(rows)) {
            source_start_ = reinterpret_cast<const char *>(part.start);
            source_end_ = reinterpret_cast<const char *>(part.end);
        }
    }
}

void PackedFile::release_rows(const char *rows, size_t bytes) {
    if (rows < source_start_ || rows >= source_end_) find_source(rows);
    if (source_start_ == source_end_) return;
    const auto first = (reinterpret_cast<uintptr_t>(rows) + page - 1) / page * page;
    const auto end = reinterpret_cast<uintptr_t>(rows + bytes) / page * page;
    if (first < end) madvise(reinterpret_cast<void *>(first), end - first, MADV_DONTNEED);
}

size_t PackedFile::bytes() const {
    return !is_mapped_ && n_buffers_ == 1 && !entries_.empty() ? size_ : 0;
}

int PackedFile::write(const char *path) const {
    const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return errno;
    std::vector<StoredEntry> stored;
    for (const auto &[name, entry] : entries_) {
        StoredEntry each = {};
        std::strncpy(each.name, name.c_str(), sizeof each.name - 1);
        each.offset = entry.offset;
        each.bytes = entry.bytes;
        each.rows_check = entry.rows_check;
        each.packed_check = entry.packed_check;
        stored.push_back(each);
    }
    const size_t entries_end = sizeof(Header) + stored.size() * sizeof(StoredEntry);
    Header header = {};
    std::memcpy(header.magic, magic, sizeof magic);
    header.n_entries = stored.size();
    header.data_start = (entries_end + page - 1) / page * page;
    header.data_bytes = size_;
    const std::vector<char> padding(header.data_start - entries_end);
    const bool is_written =
        write_all(file, reinterpret_cast<const char *>(&header), sizeof header) &&
        write_all(file, reinterpret_cast<const char *>(stored.data()),
                  stored.size() * sizeof(StoredEntry)) &&
        write_all(file, padding.data(), padding.size()) && write_all(file, memory_, size_);
    int problem = 0;
    if (!is_written) problem = errno != 0 ? errno : EIO;
    const bool is_closed = close(file) == 0;
    return is_closed || problem != 0 ? problem : errno;
}
