"""A news brief from feeds: a product built on Penstock's public API alone.

    python -m examples.news HOME --feeds feeds.toml

`pipeline.py` has the six stages, `articles.py` the table that remembers what is done.
"""
