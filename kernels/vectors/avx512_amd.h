// The vector operations of AVX-512 with VNNI on AMD's CPUs.
#pragma once

#include "vectors/avx512_vnni.h"

struct Avx512Amd : Avx512Vnni {
    // With six heads of queries for each head of keys, 8 rows of a batch are 48 here, and take 0.95
    // of the time. One row would take up to 1.05.
    static constexpr int least_halved_rows = 40;
};
