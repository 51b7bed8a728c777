"""The mathematics of one decoder: what a config says, one layer, its caches, its two ends."""
