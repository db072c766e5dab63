"""Keeping a sampler elsewhere on the weights of a trainer, with proof."""
