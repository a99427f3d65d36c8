// What an ARM CPU can do, as Linux reports it.
#pragma once

#include <sys/auxv.h>

inline bool arm_has_dot_products() {
    constexpr unsigned long asimddp = 1UL << 20;  // HWCAP_ASIMDDP
    return (getauxval(AT_HWCAP) & asimddp) != 0;
}
