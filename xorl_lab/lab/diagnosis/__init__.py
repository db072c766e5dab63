"""Why trainer and sampler disagree: recorded completions, evaluated again under control."""
