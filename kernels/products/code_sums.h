// The sums of rounded activations that a product may need.
#pragma once

namespace {

// Sums of 32 codes, of 16 each: of the positive codes, and of the magnitudes of the negative ones.
struct CodeSums {
    int positive[2];
    int negative[2];
};

}  // namespace
