# Included by llama-cpp-python's own CMakeLists.txt: what llama.cpp's programs share, a third of the
# compile time, is left out. No Python calls it.
set(LLAMA_BUILD_COMMON OFF)
