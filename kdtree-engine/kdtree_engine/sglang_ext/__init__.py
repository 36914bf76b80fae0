"""The SGLang plugin: attention backend `kdtree_mla`.

    plugin      the entry point that SGLang calls in each of its processes; registers the name
    settings    the KDTREE_ environment variables, typed
    compat      every difference between the SGLang releases that are supported, and what is needed
    start_up    what is checked where the backend is made, and the one line that the log gets
    backend     the backend: a TritonAttnBackend whose target-verify runs tree_verify_attention
    allocators  KV allocators that keep a churned pool in runs
    churn       SGLang's allocator, request pool and prefix cache under traffic, without a model
    allocator_trial     random operations on an allocator, beside SGLang's and a model of the pool

This is the one room that may import SGLang, and it does so inside functions, apart from `backend`
and `allocators`, which are imported where they are made: SGLang loads plugins in processes that
never attend.
"""
