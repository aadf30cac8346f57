"""MSL -> C++ for the simulated Metal device: preprocess, token pass, tables for the runtime, compile and link.

`build_kernel.py` is the command that the runtime starts; the other modules hold one step each. Needs a clang and the
standard library only.
"""
