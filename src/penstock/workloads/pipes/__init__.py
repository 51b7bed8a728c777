"""One model over several machines, and the text stays home (seed 000).

A model's layers are split over nodes. The *origin* of a job has the *end model* (tokenizer,
embedding, final norm and head), and usually some layers of its own; the other nodes have layers
and see hidden states only. A `Pipe` is a way from the first layer to the last over nodes that
hold them. A `Job` goes round its pipe once for each token: the `JobProcessor` of each node
carries it through what that node holds, and hands it on.

Invariants:

- Only the origin answers its caller, once, with a reason: nobody else knows the text.
- What a node keeps of a job is its cache. Each step says at which position it begins, so a cache
  can always be cut back to there; a step that was seen before is passed over.
- One thread computes (`compute.py`); the event loop moves bytes and never computes. Between them
  are an inbox with a condition, and `call_soon_threadsafe`.
"""
