// Attaching the library to ggml's CPU backend.
#pragma once

// Attach it, once ggml's libraries are loaded. Returns whether it is attached.
bool attach();

// Why the library is not attached; "" if it is.
const char *attach_problem();
