"""SGLang's own attention kit, case by case, in the Python that has SGLang.

`phases/conformance.py` says which cases and judges them.

    __main__   reads a request, runs its cases, and prints a line of JSON for each
    cases      one case: the kit's fixture, its oracle, and what is watched meanwhile
    graph      the kit's graph mode without its fault, around a real CUDA graph
    hidden     the kit's fault: how many tokens it hides, and a minimal case that shows it
"""
