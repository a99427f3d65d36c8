"""specgen's own CPU kernels, and whether they are used here.

The kernels are a C++ library (`kernels/` in the source). It is compiled when specgen is installed, if there is a
compiler and the kernels support the platform. `attached` attaches it to llama.cpp for the whole process, before the
first model is loaded. `admission` does so only if the library passed its self-test on this machine (`self_test`), and
only for models on which a trial did not end its process (`trial`). Both run in child processes, and are remembered.
"""
