"""specgen's own CPU kernels, and whether they are used here.

The kernels are a C++ library (`kernels/` in the source), compiled when specgen is installed if there is a compiler and
the kernels support the platform. `attached` attaches it to llama.cpp for the whole process. `admission` does so only
if the library passed its self-test on this machine, and only for models on which a trial did not end its process.
"""
