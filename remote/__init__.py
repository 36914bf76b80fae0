"""Hosts: what they are (inventory), how they are reached (transport), what they have (facts).

The only room that knows Fabric and Invoke, and it imports them when a connection is made, not
before: `kd --help` must not wait for them.
"""
