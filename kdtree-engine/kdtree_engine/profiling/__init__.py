"""Where the time of a decode step goes, from a trace that torch.profiler wrote.

    reader       the events of a trace file, one at a time; the standard library
    rules        classes of kernels by name and stage, and the lever of each: `rules.toml`
    timeline     what one GPU did and who launched it, in columns
    collectives  bytes of NCCL's collectives, and which rank waited for which
    steps        where the decode steps begin and end
    host         what the host did while the GPU waited for it
    intervals    overlapping intervals as a sequence of segments
    summary      time per step by class, idle time and its cause, the largest kernels
    comparison   one summary less another

Nothing here imports SGLang or torch, or needs a GPU. It needs Python 3.11, as `rules.toml` is read
with tomllib; the rest of the package does not import it.
"""
