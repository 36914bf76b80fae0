"""How scattered the KV slots of requests are, and allocation that scatters them less.

    measure     runs, mean run length and page locality of rows of a request table; torch
    free_runs   the free slots of a pool as maximal runs, on the host; pure Python
    growth      slots reserved per request for its decode steps, given back when unused
    layouts     slots of one request in runs of a given length, for timing; torch
    relocation  which rows of running requests to move, by runs removed per row
    traffic     seeded or recorded requests, for the churn that policies are measured under

Nothing here imports SGLang: what drives its allocator, request pool and radix cache with this is
`kdtree_engine.sglang_ext`.
"""
