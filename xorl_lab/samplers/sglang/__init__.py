"""SGLang: servers of our own in an environment of their own, and any server seen from outside."""
