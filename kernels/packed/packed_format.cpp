#include "packed/packed_format.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace {

constexpr char magic[8] = {'s', 'p', 'e', 'c', 'p', 'a', 'c', '2'};
constexpr uint64_t max_entries = 1 << 20;

struct Header {
    char magic[8];
    uint64_t n_entries;
    uint64_t data_bytes;
};
// A name, and the numbers of PackedEntry.
struct StoredEntry {
    char name[64];
    uint64_t offset;
    uint64_t bytes;
    uint64_t rows_check;
    uint64_t packed_check;
};

// Read the header. Returns false if it is not one, or if the file is not as long as it says.
bool read_header(int file, Header &header) {
    struct stat about;
    if (fstat(file, &about) != 0 || pread(file, &header, sizeof header, 0) != sizeof header) {
        return false;
    }
    return std::memcmp(header.magic, magic, sizeof magic) == 0 &&
           header.n_entries < max_entries &&
           packed_data_start + header.data_bytes + header.n_entries * sizeof(StoredEntry) ==
               static_cast<uint64_t>(about.st_size);
}

}  // namespace

bool read_contents(int file, PackedContents &contents) {
    Header header;
    if (!read_header(file, header)) return false;
    std::vector<StoredEntry> stored(header.n_entries);
    const auto bytes = static_cast<ssize_t>(stored.size() * sizeof(StoredEntry));
    const auto start = static_cast<off_t>(packed_data_start + header.data_bytes);
    if (pread(file, stored.data(), bytes, start) != bytes) return false;
    contents.data_bytes = header.data_bytes;
    for (StoredEntry &each : stored) {
        each.name[sizeof each.name - 1] = 0;
        contents.entries[each.name] = {each.offset, each.bytes, each.rows_check,
                                       each.packed_check};
    }
    return true;
}

int write_contents(int file, const PackedContents &contents) {
    std::vector<StoredEntry> stored;
    for (const auto &[name, entry] : contents.entries) {
        StoredEntry each = {};
        std::strncpy(each.name, name.c_str(), sizeof each.name - 1);
        each.offset = entry.offset;
        each.bytes = entry.bytes;
        each.rows_check = entry.rows_check;
        each.packed_check = entry.packed_check;
        stored.push_back(each);
    }
    Header header = {};
    std::memcpy(header.magic, magic, sizeof magic);
    header.n_entries = stored.size();
    header.data_bytes = contents.data_bytes;
    const int problem = write_at(file, stored.data(), stored.size() * sizeof(StoredEntry),
                                 packed_data_start + contents.data_bytes);
    return problem != 0 ? problem : write_at(file, &header, sizeof header, 0);
}

int write_at(int file, const void *data, size_t bytes, uint64_t offset) {
    constexpr size_t most = 64 << 20;  // in one call
    const auto *from = static_cast<const char *>(data);
    while (bytes > 0) {
        const ssize_t n = pwrite(file, from, std::min(bytes, most), static_cast<off_t>(offset));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        if (n == 0) return EIO;
        from += n;
        offset += n;
        bytes -= n;
    }
    return 0;
}

// FNV-1a.
uint64_t check_of(const char *data, size_t bytes) {
    constexpr size_t page = 4096;
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
