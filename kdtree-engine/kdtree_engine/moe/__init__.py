"""Which experts a step of decoding activates, where they lie, and what that costs its slowest rank.

    routing     tokens of each expert, by step and layer; batches are steps taken together
    trace       recorded routing: a router trace in lines of JSON
    recorder    recorded routing: the dumps of SGLang's expert-distribution recorder
    synthetic   drawn routing, in the shapes of Kimi K2
    placement   experts on ranks: contiguous, or replicated and balanced as EPLB does
    dispatch    the work of each rank under a placement, or under tensor parallelism
    costs       seconds of that work and of the all-reduce behind it (rates: kdtree_engine.gpus)

Nothing here imports SGLang, and nothing is measured here: every time is a prediction.
"""
