"""What a step of decoding costs, whether it fits, and what bounds it: a model of costs.

    shapes       a model's sizes: Kimi K2, or a config.json
    parts        a component of a step: its seconds by what bounds them, and what they rest on
    attention    tree verification: a roofline fitted to kept times of the kernel
    dense        the products every token takes part in: projections, shared experts, head
    experts      routed experts, by kdtree_engine.moe
    collectives  all-reduces between the ranks of tensor parallelism
    drafting     a drafter's pass, the tree's operations, tokens that a step gives
    memory       weights and KV of a GPU, and whether they fit
    step         all of it together: seconds of a step, tokens a second
    calibration  the host's share of a step, from measured steps, and the error of the model

Nothing here reads evidence or runs anything: what was measured comes in as arguments.
"""
