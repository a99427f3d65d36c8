"""specgen's own CPU kernels, a C++ library (`kernels/` in the source): `attached` attaches it to
llama.cpp, `admission` only if it passed its self-test here, and for models on which a trial did not
end its process.
"""
