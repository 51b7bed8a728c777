"""A whole engine with its workers and users in one thread, on made-up time, from one seed.

The control plane and the workers are the real ones. The disk, the connections, the clock,
the jobs' own code and the users are simulated, and can do whatever such things do.
"""
