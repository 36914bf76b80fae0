"""The SGLang plugin: attention backend `kdtree_mla`.

    plugin      the entry point that SGLang calls in each of its processes; registers the name
    settings    the KDTREE_ environment variables, typed
    compat      every difference between the SGLang releases that are supported, and what is needed
    start_up    what is checked where the backend is made, and the one line that the log gets
    backend     the backend: a TritonAttnBackend whose target-verify runs tree_verify_attention

This is the one room that may import SGLang, and it does so inside functions, apart from `backend`,
which is imported where a server makes it: SGLang loads plugins in processes that never attend.
"""
