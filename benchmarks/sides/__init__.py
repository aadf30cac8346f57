"""The competitors: a function for each, from a cell to a call to be timed.

Each module imports its framework inside its functions, so that a process holds one of them. A side
raises NotImplementedError for what its framework has not, and gets its own favourite layout.
"""
