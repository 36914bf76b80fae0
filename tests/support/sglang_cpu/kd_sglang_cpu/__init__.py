"""What SGLang 0.5.23 lacks to verify trees without a GPU, as an SGLang plugin of its own.

With this folder on PYTHONPATH, SGLang finds the plugin by the metadata beside this package; nothing
is installed. The server must run with TRITON_INTERPRET=1: then SGLang's Triton kernels, and so
its real Triton backend, run on the CPU, and what has no CPU body can be SGLang's own Triton body.

    standins   routes calls to those bodies
    observe    counts trees and moved rows, and can spoil the mask
"""
