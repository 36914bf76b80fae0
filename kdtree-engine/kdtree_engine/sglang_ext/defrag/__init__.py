"""KV slots in runs, on SGLang's structures.

    allocators  SGLang's page-1 allocator with the policies that keep a churned pool in runs
    service     Tier 0 where a server makes its KV pool
    gauges      fragmentation of a server's pool, for Prometheus
    host_copy   a tensor on its way to the host
    releases    what differs here between the SGLang releases that are supported
    churn       SGLang's allocator, request pool and prefix cache under traffic, without a model
    trial       random operations on an allocator, beside SGLang's and a model of the pool
    relocation  moves rows of running requests, and rewrites or fences all who hold their slots
    relocation_trial  random operations with relocations between them, beside a shadow of the KV

`churn` and the trials are programs for the Python that has SGLang. SGLang is imported inside of
functions, apart from `allocators`, which is imported where one is made.
"""
