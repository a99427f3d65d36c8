// The kernels in use: those of the best instruction set that this CPU has.
#pragma once

#include "instruction_sets/instruction_set.h"

// Set once, before ggml learns of the library.
extern const InstructionSet *kernels;

// Set `kernels` to those of the best instruction set, or of the one that the variable
// SPECGEN_KERNELS_INSTRUCTIONS names. Returns "", or why there are none.
const char *choose_kernels();
