"""Who is in the network, and what each node holds.

Every node is connected to every other. A node is *live* for as long as a connection to it stands:
what is only heard of from a third one is an address to dial, never a member, so a node that is
gone cannot come back by hearsay.
"""
