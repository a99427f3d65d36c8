"""specgen's own CPU kernels: a C++ library, whose source is in `kernels/`.

`admission` decides whether they are used, `verdicts` keeps what their tests in child processes
showed, and `attached` attaches the library to llama.cpp.
"""
