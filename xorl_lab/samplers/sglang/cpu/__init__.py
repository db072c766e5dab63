"""What lets SGLang's plain wheel run on a CPU.  It runs in SGLang's environment, not in ours."""
