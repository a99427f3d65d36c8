# Included by llama-cpp-python's CMakeLists.txt. Leaves out the library that llama.cpp's programs
# share, which Python does not call and which takes a third of the compile time.
set(LLAMA_BUILD_COMMON OFF)
