"""Samplers: from a prompt and a version of the weights to completions with logprobs."""
